"""Views: which part of the model an attack reads, and the loss that it raises there.

An attack on the decoder's scores and one on the encoder's logits are different experiments: a saturated decoder has no
gradient for the first, but does not affect the second. Most attacks take a view as `on=`: a name of `VIEWS`, a `View`,
or a loss function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.asking import full_precision
from ecnn.checks import check_choice, check_count, check_number
from ecnn.errors import InputError
from ecnn.objectives import (
    bounded,
    codeword_distances,
    member_margin,
    member_targets,
    score_cross_entropy,
    score_margin,
)

Loss = Literal["margin", "cross_entropy", "dlr"]
#: A loss of your own, which attacks raise: (model, images, labels) -> (batch,).
LossFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Aim:
    """The objective of an attack: the classes to leave or to reach, and the loss.

    Attributes:
        labels: (batch,) the classes to move away from.
        goals: (batch,) the classes to move to; None moves away from the labels only.
        loss: name of the loss; views with a loss of their own ignore it.
        slack: a margin or DLR loss is clamped to this, so that it is not raised further.
    """

    labels: Tensor
    goals: Tensor | None = None
    loss: Loss = "margin"
    slack: float = math.inf


@dataclass(frozen=True)
class Look:
    """Losses and scores of a view at some points.

    Attributes:
        losses: (batch,) higher is worse for the model.
        scores: (batch, class) the scores by which a point counts as misclassified, usually the model's own, without
            gradient; None if the view's pass does not give them.
    """

    losses: Tensor
    scores: Tensor | None


@dataclass(frozen=True, eq=False, kw_only=True)
class View:
    """The part of a model that an attack reads, and its loss. Derive your own view from this or from `ScoreView`.

    A view is a small frozen dataclass; records describe it by its fields. Two equal views must compute the same: with
    `quick=True` a recorded pass is reused for an equal view. A view that holds tensors needs `eq=False`.

    Attributes:
        name: of the view, for records.
    """

    name: str

    @property
    def has_goals(self) -> bool:
        """Whether its loss can move to given classes, and not only away from the labels."""
        return True

    @property
    def passes_per_look(self) -> int:
        """How many forward passes one look takes, for the cost."""
        return 1

    def check_loss(self, loss: str) -> None:
        """Raises InputError unless this view has the loss of that name."""
        check_choice("loss", loss, get_args(Loss))

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        """The losses, and the scores if known, of images (batch, channel, height, width)."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreView(View):
    """A view with one score per class, as many attacks need. Its losses are those of `score_loss`."""

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """(batch, class) the scores to attack, and the model's own without gradient, or None if not in this pass."""
        raise NotImplementedError

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        read, own = self.read(model, images)
        return Look(score_loss(read, aim.labels, aim.loss, aim.slack, aim.goals), own)


def score_loss(
    scores: Tensor, labels: Tensor, loss: Loss, slack: float = math.inf, goals: Tensor | None = None
) -> Tensor:
    """(batch,) loss to raise: away from the labels, or with goals towards these.

    The margin is the best wrong score minus the label's score; with goals it is the goal's score minus the label's.
    DLR is the margin divided by a spread of the scores. Both are clamped to `slack` (the paper's c). Cross-entropy is
    that of the label, or minus that of the goal.

    Departs: the printed hinge attack minimises minus a maximum, which helps the defender; this is its negative.
    """
    if loss == "cross_entropy":
        return score_cross_entropy(scores, labels) if goals is None else -score_cross_entropy(scores, goals)
    if goals is None:
        lead = -score_margin(scores, labels)
    else:
        scores = bounded(scores)
        lead = (scores.gather(1, goals[:, None]) - scores.gather(1, labels[:, None])).squeeze(1)
    if loss == "dlr":
        lead = lead / _spread(bounded(scores), targeted=goals is not None)
    return lead.clamp(max=slack)


def _spread(scores: Tensor, *, targeted: bool) -> Tensor:
    """(batch,) the denominator that makes a margin independent of the scale of the scores (Croce & Hein 2020)."""
    needed = 4 if targeted else 3
    if scores.shape[1] < needed:
        raise InputError(
            f"the {'targeted ' if targeted else ''}DLR loss needs at least {needed} classes, and the model has "
            f'{scores.shape[1]}: use loss="margin".'
        )
    top = scores.topk(needed, dim=1).values
    low = (top[:, 2] + top[:, 3]) / 2 if targeted else top[:, 2]
    return top[:, 0] - low + 1e-12


def has_code(model: nn.Module) -> bool:
    """Whether the model has members and a code: `member_logits`, and `code` or `code_symbols`."""
    return hasattr(model, "member_logits") and (hasattr(model, "code") or hasattr(model, "code_symbols"))


def members_of(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The members' logits, (batch, member) or (batch, member, symbol), and the code's symbols (class, task).

    Works for any model with `member_logits(images)` and `code` (a CodeMatrix), such as an ECNN. Raises InputError for
    others.
    """
    if not has_code(model):
        raise InputError(f'{type(model).__name__} has no members (member_logits and code): use on="scores".')
    anything: Any = model
    logits = full_precision(anything.member_logits(images))
    symbols = getattr(anything, "code_symbols", None)
    if symbols is None:
        symbols = torch.from_numpy(anything.code.symbols.astype("int64"))
    return logits, symbols.to(logits.device)


def decoded_scores(model: nn.Module, logits: Tensor) -> Tensor | None:
    """(batch, class) the model's own scores of these member logits, without gradient; None if it has no `decode`."""
    anything: Any = model
    if not hasattr(model, "decode"):
        return None
    with torch.no_grad():
        return full_precision(anything.decode(logits.detach()))


def member_margins(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """(batch, member) margin of each member: signed logit, or right symbol's logit minus the best other."""
    logits, symbols = members_of(model, images)
    return member_margin(logits, member_targets(symbols, labels))


def decode_linearly(member_logits: Tensor, code_symbols: Tensor) -> Tensor:
    """(batch, class) correlation of the member logits with the codewords: a decoder without saturation."""
    logits = full_precision(member_logits)
    if logits.ndim == 2:
        return torch.matmul(logits, (2 * code_symbols.T - 1).to(logits.dtype))
    one_hot = F.one_hot(code_symbols, logits.shape[2]).to(logits.dtype)
    return torch.einsum("bnk,cnk->bc", _centred(logits), one_hot)


def temper(member_logits: Tensor) -> Tensor:
    """The logits divided by each image's largest absolute logit: so small that no decoder saturates.

    The divisor counts as a constant, without gradient. Of logits (batch, member, symbol) the mean over the symbols is
    subtracted first.
    """
    logits = _centred(full_precision(member_logits))
    scale = logits.detach().flatten(1).abs().amax(dim=1).clamp_min(1e-30)
    return logits / scale.view(-1, *[1] * (logits.ndim - 1))


def _centred(logits: Tensor) -> Tensor:
    return logits if logits.ndim == 2 else logits - logits.mean(dim=2, keepdim=True)


def member_loss(
    member_logits: Tensor,
    code_symbols: Tensor,
    labels: Tensor,
    loss: Loss,
    slack: float,
    goals: Tensor | None = None,
) -> Tensor:
    """(batch,) sum over the members of a loss to raise: away from the labels' codewords, or towards the goals'.

    "margin" pushes each member until it is wrong by `slack`. "cross_entropy" without goals pushes wrong members most;
    with goals it stops pushing members that clearly give the goal's symbol. With goals only members whose symbol
    differs between the two codewords count.
    """
    symbols = member_targets(code_symbols, labels)
    if goals is None:
        leads, counted = -member_margin(member_logits, symbols), None
    else:
        wanted = member_targets(code_symbols, goals)
        leads, counted = member_margin(member_logits, wanted), wanted != symbols
    if loss == "cross_entropy":
        parts = F.softplus(leads) if goals is None else -F.softplus(-leads)
    else:
        parts = leads.clamp(max=slack)
    return (parts if counted is None else parts * counted).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class Scores(ScoreView):
    """The scores that the model returns."""

    name: str = "scores"

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        scores = full_precision(model(images))
        return scores, scores.detach()


@dataclass(frozen=True, kw_only=True)
class Linear(ScoreView):
    """The linear decode of the member logits (`decode_linearly`), where no decoder saturates."""

    name: str = "linear"

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        logits, symbols = members_of(model, images)
        return decode_linearly(logits, symbols), decoded_scores(model, logits)


@dataclass(frozen=True, kw_only=True)
class Tempered(ScoreView):
    """The model's own decoder on member logits scaled down by `temper`, so that it does not saturate."""

    name: str = "tempered"

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        logits, _ = members_of(model, images)
        anything: Any = model
        if not hasattr(model, "decode"):
            raise InputError(f'{type(model).__name__} has no decode(member_logits): use on="linear".')
        return anything.decode(temper(logits)), decoded_scores(model, logits)


@dataclass(frozen=True, kw_only=True)
class Members(View):
    """The loss of all members at once (`member_loss`)."""

    name: str = "members"

    def check_loss(self, loss: str) -> None:
        super().check_loss(loss)
        if loss == "dlr":
            raise InputError(
                'members have no DLR loss: use loss="margin" or "cross_entropy", or on="linear".'
            )

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        logits, symbols = members_of(model, images)
        losses = member_loss(logits, symbols, aim.labels, aim.loss, aim.slack, aim.goals)
        return Look(losses, decoded_scores(model, logits))


@dataclass(frozen=True, kw_only=True)
class WeakestBit(View):
    """The smallest margin of any member for its bit of the goal's codeword.

    The loss of Zhang et al. (2020), min_n 2 t_n z_n on logits before any tanh. Once it is positive every bit is the
    goal's, whatever the decoder. Members with logits per symbol have their margin in place of 2 t_n z_n. Without goals
    it is the largest such loss of any wrong class.
    """

    name: str = "weakest bit"

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        logits, symbols = members_of(model, images)
        if aim.goals is not None:
            losses = member_margin(logits, member_targets(symbols, aim.goals)).amin(dim=1)
        else:
            wanted = symbols[None].expand(len(logits), -1, -1)
            spread = logits[:, None].expand(-1, len(symbols), *logits.shape[1:])
            weakest = member_margin(spread.flatten(0, 1), wanted.flatten(0, 1)).amin(dim=1)
            losses = weakest.view(len(logits), -1).scatter(1, aim.labels[:, None], -math.inf).amax(dim=1)
        # A logit is half the difference of two symbols' log odds in a tanh code, hence the 2.
        return Look(losses * (2 if logits.ndim == 2 else 1), decoded_scores(model, logits))


@dataclass(frozen=True, kw_only=True)
class Accepted(View):
    """A view for models that reject images far from every codeword: it seeks misclassified points that are accepted.

    The loss is the log probability that the members output the goal's codeword; without goals, the largest one of any
    wrong class. It does not saturate while members are wrong. A point is broken only if it is misclassified and not
    rejected: for rejected points this view replaces the scores by a one-hot vector of the label.

    Attributes:
        reject: largest accepted distance to the nearest codeword, as the expected number of disagreeing members.
    """

    name: str = "accepted"
    reject: float

    def __post_init__(self) -> None:
        check_number("reject", self.reject)

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        logits, symbols = members_of(model, images)
        fits = _codeword_likelihood(logits, symbols)
        if aim.goals is not None:
            losses = fits.gather(1, aim.goals[:, None]).squeeze(1)
        else:
            losses = fits.scatter(1, aim.labels[:, None], -math.inf).amax(dim=1)
        scores = decoded_scores(model, logits)
        if scores is None:
            scores = full_precision(model(images)).detach()
        is_far = codeword_distances(logits.detach(), symbols).amin(dim=1, keepdim=True) > self.reject
        label = F.one_hot(aim.labels, scores.shape[1]).to(scores.dtype)
        return Look(losses, torch.where(is_far, label, scores))


def _codeword_likelihood(member_logits: Tensor, code_symbols: Tensor) -> Tensor:
    """(batch, class) log probability that all members output the class's symbols, in nats."""
    if member_logits.ndim == 3:
        chosen = F.one_hot(code_symbols, member_logits.shape[2]).to(member_logits.dtype)
        return torch.einsum("bnk,cnk->bc", torch.log_softmax(member_logits, dim=2), chosen)
    ones = code_symbols.T.to(member_logits.dtype)
    return F.logsigmoid(2 * member_logits) @ ones + F.logsigmoid(-2 * member_logits) @ (1 - ones)


@dataclass(frozen=True, kw_only=True)
class UntargetedView(View):
    """A view without goals: its loss only moves away from the labels."""

    @property
    def has_goals(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class OwnLoss(UntargetedView):
    """A loss function of your own. It has no goals, and its looks have no scores.

    Attributes:
        function: (model, images, labels) -> (batch,) loss to raise.
    """

    name: str = "own"
    function: LossFunction

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        return Look(self.function(model, images, aim.labels), None)


@dataclass(frozen=True, eq=False, kw_only=True)
class WrappedView(View):
    """Base of views that modify another view; goals, losses and passes are those of that view.

    Attributes:
        view: the other view, or its name in `VIEWS`.
    """

    view: str | View

    def __post_init__(self) -> None:
        find_view(self.view)

    @property
    def has_goals(self) -> bool:
        return find_view(self.view).has_goals

    @property
    def passes_per_look(self) -> int:
        return find_view(self.view).passes_per_look

    def check_loss(self, loss: str) -> None:
        find_view(self.view).check_loss(loss)


@dataclass(frozen=True, kw_only=True)
class Averaged(WrappedView):
    """The mean losses and scores of another view over several passes of a random model (EOT, Athalye et al. 2018).

    Attributes:
        passes: how many looks at the other view the mean is taken over.
    """

    name: str = "averaged"
    passes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("passes", self.passes)

    @property
    def passes_per_look(self) -> int:
        return self.passes * super().passes_per_look

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        view = find_view(self.view)
        looks = [view.look(model, images, aim) for _ in range(self.passes)]
        scores = [bounded(look.scores) for look in looks if look.scores is not None]
        losses = torch.stack([look.losses for look in looks]).mean(dim=0)
        return Look(losses, torch.stack(scores).mean(dim=0) if scores else None)


#: The views that have a name.
VIEWS: dict[str, View] = {view.name: view for view in (Scores(), Linear(), Tempered(), Members())}
SCORES: ScoreView = Scores()


def find_view(on: str | View | LossFunction) -> View:
    """The view of that name, the given view, or an `OwnLoss` around a loss function."""
    if isinstance(on, View):
        return on
    if callable(on):
        return OwnLoss(function=on)
    check_choice("on", on, VIEWS)
    return VIEWS[on]


def find_score_view(on: str | View) -> ScoreView:
    """Like `find_view`, for attacks that need one score per class: raises InputError unless it is a `ScoreView`."""
    view = find_view(on)
    if not isinstance(view, ScoreView):
        names = ", ".join(name for name, known in VIEWS.items() if isinstance(known, ScoreView))
        raise InputError(
            f"this attack needs one score per class: on must be {names} or a ScoreView, not {on!r}."
        )
    return view
