"""Where an attack looks: what it reads from the model, and the loss it raises there.

An attack on the decoder's scores and one on the encoder's logits are different experiments: a saturated decoder can
hide from the first and not from the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.backbones import full_precision
from ecnn.errors import InputError
from ecnn.objectives import member_margin, member_targets, score_cross_entropy, score_margin

Loss = Literal["margin", "cross_entropy", "dlr"]
#: A view of your own: (model, images, labels) -> (batch,) loss to raise.
LossFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Look:
    """What an attack saw at some points.

    Attributes:
        losses: (batch,) higher is worse for the model.
        scores: (batch, class) what the model itself says there; None when the view does not find out.
    """

    losses: Tensor
    scores: Tensor | None


#: (model, images, labels, goals) -> Look; goals are the classes to move to, None to move away from the labels.
View = Callable[[nn.Module, Tensor, Tensor, Tensor | None], Look]


def score_loss(
    scores: Tensor, labels: Tensor, loss: Loss, slack: float = math.inf, goals: Tensor | None = None
) -> Tensor:
    """(batch,) how far the scores are from the labels, or how near to the goals: cross-entropy, margin or DLR.

    The margin is not pushed further once a wrong class leads by `slack` (the paper's c).

    Departs: the printed hinge attack minimises minus a maximum, which helps the defender; this is its negative.
    """
    scores = full_precision(scores)
    if loss == "cross_entropy":
        return score_cross_entropy(scores, labels) if goals is None else -score_cross_entropy(scores, goals)
    if goals is None:
        lead = -score_margin(scores, labels)
    else:
        lead = (scores.gather(1, goals[:, None]) - scores.gather(1, labels[:, None])).squeeze(1)
    if loss == "dlr":
        lead = lead / _spread(scores, targeted=goals is not None)
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


def members_of(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """What the members say, (batch, member) or (batch, member, symbol), and the code (class, task) they speak.

    Any model with `member_logits(images)` and `code` (a CodeMatrix) has members; an ECNN has.
    """
    if not hasattr(model, "member_logits") or not (hasattr(model, "code") or hasattr(model, "code_symbols")):
        raise InputError(f'{type(model).__name__} has no members (member_logits and code): look on="scores".')
    anything: Any = model
    logits = full_precision(anything.member_logits(images))
    symbols = getattr(anything, "code_symbols", None)
    if symbols is None:
        symbols = torch.from_numpy(anything.code.symbols.astype("int64"))
    return logits, symbols.to(logits.device)


def _own_scores(model: nn.Module, logits: Tensor) -> Tensor | None:
    """(batch, class) the model's scores of these member logits, if it can say without another pass."""
    anything: Any = model
    if not hasattr(model, "decode"):
        return None
    with torch.no_grad():
        return full_precision(anything.decode(logits.detach()))


def member_margins(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """(batch, member) by how much each member prefers its right answer; a common level of its logits plays no part."""
    logits, symbols = members_of(model, images)
    return member_margin(logits, member_targets(symbols, labels))


def decode_linearly(member_logits: Tensor, code_symbols: Tensor) -> Tensor:
    """(batch, class) correlation of the member logits with the codewords, with nothing that saturates in between."""
    logits = full_precision(member_logits)
    if logits.ndim == 2:
        return torch.matmul(logits, (2 * code_symbols.T - 1).to(logits.dtype))
    one_hot = F.one_hot(code_symbols, logits.shape[2]).to(logits.dtype)
    return torch.einsum("bnk,cnk->bc", _centred(logits), one_hot)


def linear_scores(model: nn.Module, images: Tensor) -> Tensor:
    """(batch, class) `decode_linearly` of what the members say of the images."""
    return decode_linearly(*members_of(model, images))


def temper(member_logits: Tensor) -> Tensor:
    """The logits, scaled so that the largest of each image is 1 in size: no decoder saturates there.

    The scale is held constant, so that its gradient does not enter. Symbols members lose their common level.
    """
    logits = _centred(full_precision(member_logits))
    scale = logits.detach().flatten(1).abs().amax(dim=1).clamp_min(1e-30)
    return logits / scale.view(-1, *[1] * (logits.ndim - 1))


def _centred(logits: Tensor) -> Tensor:
    return logits if logits.ndim == 2 else logits - logits.mean(dim=2, keepdim=True)


VIEWS = ("scores", "linear", "tempered", "members")
#: The views that show one score per class, as attacks on scores need.
SCORE_VIEWS = VIEWS[:-1]


def read_scores(model: nn.Module, images: Tensor, on: str) -> tuple[Tensor, Tensor | None]:
    """(batch, class) the scores that a view attacks, and the model's own where the same pass gives them."""
    if on == "scores":
        scores = full_precision(model(images))
        return scores, scores.detach()
    logits, symbols = members_of(model, images)
    if on == "linear":
        return decode_linearly(logits, symbols), _own_scores(model, logits)
    anything: Any = model
    if not hasattr(model, "decode"):
        raise InputError(f'{type(model).__name__} has no decode(member_logits): look on="linear".')
    return anything.decode(temper(logits)), _own_scores(model, logits)


def member_loss(
    member_logits: Tensor,
    code_symbols: Tensor,
    labels: Tensor,
    loss: Loss,
    slack: float,
    goals: Tensor | None = None,
) -> Tensor:
    """(batch,) all bits at once: how far the members are from the labels' codewords, or how near to the goals'.

    "margin" pushes each member until it is wrong by `slack`; "cross_entropy" stops caring once it is wrong. With
    goals only the members that must change their answer count.
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


def make_view(on: str | LossFunction, loss: Loss, slack: float = math.inf) -> View:
    """The view behind a name, or one around a loss function of your own."""
    if loss not in get_args(Loss):
        raise InputError(f"loss must be one of {', '.join(get_args(Loss))}, not {loss!r}.")
    if callable(on):
        function = on

        def own(model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
            return Look(function(model, images, labels), None)

        return own
    check_view(on, VIEWS)
    return _named_view(on, loss, slack)


@lru_cache(maxsize=64)  # one object per view, by which recorded passes are found again
def _named_view(on: str, loss: Loss, slack: float) -> View:
    if on == "members":
        if loss == "dlr":
            raise InputError(
                'members have no DLR loss: use loss="margin" or "cross_entropy", or on="linear".'
            )

        def members(model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
            logits, symbols = members_of(model, images)
            losses = member_loss(logits, symbols, labels, loss, slack, goals)
            return Look(losses, _own_scores(model, logits))

        return members

    def scores(model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
        read, own = read_scores(model, images, on)
        return Look(score_loss(read, labels, loss, slack, goals), own)

    return scores


def check_view(on: Any, known: tuple[str, ...]) -> None:
    """Raises InputError unless the name is one of those this attack can look at."""
    if on not in known:
        raise InputError(f"this attack looks on={', '.join(map(repr, known))}, not {on!r}.")
