"""Training objectives by name, and the member losses, entropy terms and margins that they are made of.

No loss waits for the device or has a shape that depends on values, so a training step can be captured in a CUDA graph.
Losses and entropies are computed in float32 or better and stay exact for confident members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 as all of torch's users call it
from torch import Tensor

from ecnn.asking import full_precision
from ecnn.checks import build, check_choice, check_has, check_number
from ecnn.errors import InputError

EntropyUnit = Literal["nats", "normalised"]
ENTROPY_UNITS: tuple[str, ...] = ("nats", "normalised")


class CodedModel(Protocol):
    """A model that member objectives can train, such as `ECNN`."""

    code_symbols: Tensor
    share_head: bool
    head: Any

    def features(self, images: Tensor) -> Tensor: ...

    def apply_head(self, features: Tensor) -> Tensor: ...

    def member_logits(self, images: Tensor) -> Tensor: ...


#: (model, images, labels) -> scalar loss of the batch. If it has an argument `generator`, it gets the run's generator.
Objective = Callable[..., Tensor]


def member_targets(code_symbols: Tensor, labels: Tensor) -> Tensor:
    """(batch, member) the symbol that each member should answer: the codeword of each label.

    Args:
        code_symbols: (class, task) integers 0..arity-1, on the labels' device.
        labels: (batch,) class indices.
    """
    return code_symbols.index_select(0, labels)


def member_cross_entropy(member_logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the members' answers in nats, averaged over members (eqn:loss).

    Args:
        member_logits: (batch, member) logits of symbol 1, or (batch, member, symbol).
        targets: (batch, member) from `member_targets`.

    Returns:
        (batch,) from 0 up.

    Departs: eq:enc prints 1/(N(N-1)K); the mean over members and images is 1/(NK).
    """
    logits = _checked_logits(member_logits, targets)
    if logits.ndim == 2:
        return F.softplus(-_signs(targets, logits) * logits).mean(dim=1)
    return _cross_entropy(logits, targets).mean(dim=1)


def member_hinge(member_logits: Tensor, targets: Tensor, *, margin: float = 1.0) -> Tensor:
    """Hinge loss of binary members: how far their signed logits are below the margin, on average (eqn:loss).

    Args:
        member_logits: (batch, member) logits of symbol 1.
        targets: (batch, member) zeros and ones.
        margin: the size of a logit of the right sign from which the loss is 0.

    Returns:
        (batch,) mean of max(margin - t z, 0) with t = -1 or +1.
    """
    logits = _checked_logits(member_logits, targets, ndim=2)
    return torch.relu(margin - _signs(targets, logits) * logits).mean(dim=1)


def symbol_hinge(member_logits: Tensor, targets: Tensor, *, margin: float = 1.0) -> Tensor:
    """Hinge loss of q-ary members: how far the leads of the right symbols are below the margin, on average (eq:enc_q).

    It depends only on differences of a member's logits: adding a constant to all of them changes nothing.

    Args:
        member_logits: (batch, member, symbol).
        targets: (batch, member) right symbols.
        margin: the lead of the right symbol's logit over the best other from which the loss is 0; the paper's kappa.

    Returns:
        (batch,) mean of max(margin - (z_true - max of the others), 0).
    """
    logits = _checked_logits(member_logits, targets, ndim=3)
    return torch.relu(margin - _lead(logits, targets)).mean(dim=1)


def member_entropy(member_logits: Tensor, *, entropy_unit: EntropyUnit = "nats") -> Tensor:
    """Average uncertainty of the members about their own tasks.

    Training rewards it so that members do not grow confident on shared features (eq:div2). No term compares different
    members: it is a penalty on confidence.

    Args:
        member_logits: (batch, member) one logit per binary task, or (batch, member, symbol).
        entropy_unit: "nats", or "normalised" by log(arity).

    Returns:
        (batch,) between 0 and log(arity), or 1 when normalised.

    Departs: the printed joint objective adds this term; Lemma lem:solution and the authors' program subtract
        it, so `joint_loss` does too. Their program also divides by log(arity): `entropy_unit`.
    """
    if member_logits.ndim not in (2, 3):
        raise InputError(
            "member logits must be (batch, member) or (batch, member, symbol), not "
            f"{tuple(member_logits.shape)}."
        )
    binary = member_logits.ndim == 2
    unit = _unit(entropy_unit, 2 if binary else member_logits.shape[2])
    logits = full_precision(member_logits)
    return (_binary_entropy(logits) if binary else _symbol_entropy(logits)).mean(dim=1) / unit


def cross_member_entropy(
    features: Tensor, weight: Tensor, bias: Tensor | None = None, *, entropy_unit: EntropyUnit = "nats"
) -> Tensor:
    """Average uncertainty of each member's head about every other member's features (eq:div1).

    The paper calls features diverse if only the member's own head can read them. When all heads are the same, this is
    `member_entropy`.

    Args:
        features: (batch, member, feature).
        weight: (member, feature) or (member, feature, symbol), the unshared heads.
        bias: (member,) or (member, symbol), or None.
        entropy_unit: "nats", or "normalised" by log(arity).

    Returns:
        (batch,) mean over the N(N-1) ordered pairs of different members.

    Departs: the printed heads have no bias; ours do.
    """
    members = weight.shape[0]
    if (
        weight.ndim not in (2, 3)
        or features.ndim != 3
        or tuple(features.shape[1:]) != tuple(weight.shape[:2])
    ):
        raise InputError(
            "features must be (batch, member, feature) and weights (member, feature) or (member, feature, "
            f"symbol), not {tuple(features.shape)} and {tuple(weight.shape)}."
        )
    if members < 2:
        raise InputError("the entropy across members needs at least 2 members, not 1.")
    binary = weight.ndim == 2
    unit = _unit(entropy_unit, 2 if binary else weight.shape[2])
    # i: the member whose head it is, j: the member whose features it reads.
    logits = torch.einsum("bjf,if->bij" if binary else "bjf,ifs->bijs", features, weight)
    if bias is not None:
        logits = logits + (bias[:, None] if binary else bias[:, None, :])
    logits = full_precision(logits)
    entropies = _binary_entropy(logits) if binary else _symbol_entropy(logits)
    others = 1 - torch.eye(members, dtype=entropies.dtype, device=entropies.device)
    return (entropies * others).sum(dim=(1, 2)) / (members * (members - 1) * unit)


def joint_loss(loss: Tensor, entropy: Tensor, diversity_weight: float) -> Tensor:
    """Loss minus the weighted entropy: what joint training minimises (eq:enc_dec, eq:enc_dec_q).

    Departs: the printed `- gamma zeta log(zeta)` is plus gamma times the entropy, so minimising it would
        punish uncertainty; the text, Lemma lem:solution and the authors' program reward it.
    """
    return loss - diversity_weight * entropy


def stationary_logit(diversity_weight: float, *, entropy_unit: EntropyUnit = "nats", arity: int = 2) -> float:
    """The logit at which member cross entropy minus the weighted entropy is smallest (lem:solution).

    The derivative of softplus(-z) - weight * H(sigmoid(z)) is zero where weight * z * sigmoid(z) = 1. For more than two
    symbols, z is the lead of the right symbol's logit over the others, which are then all equal.

    Args:
        diversity_weight: 0 or more; for 0 the result is infinite.
        entropy_unit: unit of the entropy that the weight multiplies. "normalised" means divided by log(arity).
        arity: symbols per member.

    Returns:
        10.000454 for a weight of 0.1 in nats.
    """
    unit = _unit(entropy_unit, arity)
    check_number("diversity_weight", diversity_weight)
    weight = diversity_weight / unit
    if weight == 0:
        return math.inf
    # The right symbol has a probability between 1/arity and 1, and the product grows with z.
    low, high = 1 / weight, arity / weight
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if weight * middle * _confidence(middle, arity) < 1 else (low, middle)
    return low


def stationary_confidence(
    diversity_weight: float, *, entropy_unit: EntropyUnit = "nats", arity: int = 2
) -> float:
    """The probability that a member gives to the right symbol at `stationary_logit` (lem:solution).

    It is 1 for a weight of 0, and rounds to 1 for logits above 37, where `stationary_logit` is the better measure.

    Returns:
        0.99995 for a weight of 0.1 in nats.
    """
    logit = stationary_logit(diversity_weight, entropy_unit=entropy_unit, arity=arity)
    return _confidence(logit, arity)


def stationary_weight(confidence: float, *, entropy_unit: EntropyUnit = "nats", arity: int = 2) -> float:
    """The diversity weight at which members end with that probability of the right symbol (lem:solution).

    The inverse of `stationary_confidence`.

    Args:
        confidence: probability of the right symbol, above 1/arity and below 1.
    """
    unit = _unit(entropy_unit, arity)
    check_number("confidence", confidence, least=1 / arity, above=True, most=1, below=True)
    return unit / (confidence * math.log(confidence * (arity - 1) / (1 - confidence)))


def score_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """(batch,) softmax cross entropy of class scores, in nats.

    It stays exact for confident scores. In float32 the gradient of the usual form in the true class's score is exactly
    zero once that score leads by more than 17.

    Args:
        scores: (batch, class).
        labels: (batch,) class indices.
    """
    return _cross_entropy(bounded(scores), labels)


def member_margin(member_logits: Tensor, targets: Tensor) -> Tensor:
    """(batch, member) lead of each member's right symbol over the best other; negative where the member is wrong.

    Of a single logit it is the logit itself, with the sign changed for symbol 0.

    Args:
        member_logits: (batch, member) logits of symbol 1, or (batch, member, symbol).
        targets: (batch, member) the right symbols.
    """
    logits = _checked_logits(member_logits, targets)
    return _signs(targets, logits) * logits if logits.ndim == 2 else _lead(logits, targets)


def score_margin(scores: Tensor, labels: Tensor) -> Tensor:
    """(batch,) score of the true class minus the best other; negative when the image is misclassified.

    Infinite scores count as very large ones (`bounded`), so the margin is NaN only if a score is NaN.
    """
    return _lead(bounded(scores), labels)


def predicted_classes(scores: Tensor) -> Tensor:
    """(batch,) the class of the highest score, or -1 if the scores give no answer.

    All of ecnn decides by this function which class a model predicts. The answer is -1 if a score is NaN, or if the
    highest score is infinite and occurs more than once; a single +inf wins. Of equal finite scores the first wins.

    Args:
        scores: (batch, class).
    """
    scores = full_precision(scores)  # votes may be integers or booleans
    highest, classes = scores.max(dim=1, keepdim=True)  # the highest is NaN if one of them is
    # The difference is NaN for infinite scores equal to the highest, itself included, and for all scores if one is NaN.
    is_answer = (scores - highest).isnan().sum(dim=1) < 2
    return torch.where(is_answer, classes.squeeze(1), -1)


def codeword_distances(member_logits: Tensor, code_symbols: Tensor) -> Tensor:
    """(batch, class) expected number of members that disagree with each codeword, 0 to N.

    For confident members it is the Hamming distance of their answers. A binary member is taken to answer 1 with
    probability (1 + tanh z) / 2, as in the paper's decoder, whose scores are N minus twice these distances.

    Args:
        member_logits: (batch, member) or (batch, member, symbol).
        code_symbols: (class, task).
    """
    logits = full_precision(member_logits)
    if logits.ndim == 2:
        ones = code_symbols.T.to(logits.dtype)
        return torch.sigmoid(2 * logits) @ (1 - ones) + torch.sigmoid(-2 * logits) @ ones
    others = 1 - F.one_hot(code_symbols, logits.shape[2]).to(logits.dtype)
    return torch.einsum("bnk,cnk->bc", torch.softmax(logits, dim=2), others)


def flagging_threshold(distances: Tensor, share: float) -> Tensor:
    """The threshold above which that share of the distances lies, rounded down to whole images; a float64 scalar.

    It is half way between the smallest flagged distance and the next smaller one, so that rounding errors change no
    decision. If these two are equal, fewer images are flagged.

    Args:
        distances: (image,) distances of clean validation images, neither trained on nor tested on.
        share: share of the images to be flagged, from 0 to below 1.
    """
    check_number("the share to be flagged", share, most=1, below=True)
    if len(distances) == 0:
        raise InputError("a threshold needs at least one image, and none came.")
    ranked = distances.sort(descending=True).values.double()
    # In floating point 0.29 * 100 is just below 29.
    allowed = math.floor(share * len(ranked) + 1e-9)
    return (ranked[max(allowed - 1, 0)] + ranked[allowed]) / 2


def bounded(scores: Tensor) -> Tensor:
    """The scores in float32 or better, clamped to +-`largest_score` so that sums and differences are finite."""
    scores = full_precision(scores)
    limit = largest_score(scores.dtype)
    return scores.clamp(-limit, limit)


def largest_score(dtype: torch.dtype) -> float:
    """The number that `bounded` puts in place of infinity: about 1e27 in float32."""
    return float(torch.finfo(dtype).max ** 0.7)


@dataclass(frozen=True)
class MemberObjective:
    """Mean member loss minus the weighted entropy, without the decoder (eq:enc_dec, eq:enc_dec_q).

    Attributes:
        kind: "hinge" or "cross_entropy".
        diversity_weight: the paper's gamma; the paper takes 0.1 for MNIST and CIFAR-10.
        entropy_unit: "normalised" by log(arity) as in the authors' program, or "nats" as printed.
        margin: of the hinge.
        diversity: "own" rewards the entropy of each member (eq:div2), "cross" the entropy of each member's head on the
            other members' features (eq:div1). With a shared head the two are equal.
        scale: multiplies everything; the authors' program trains with 5.
    """

    kind: Literal["hinge", "cross_entropy"] = "hinge"
    diversity_weight: float = 0.0
    entropy_unit: EntropyUnit = "normalised"
    margin: float = 1.0
    diversity: Literal["own", "cross"] = "own"
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("hinge", "cross_entropy"))
        check_choice("entropy_unit", self.entropy_unit, ENTROPY_UNITS)
        check_choice("diversity", self.diversity, ("own", "cross"))
        for name in ("diversity_weight", "margin", "scale"):
            check_number(name, getattr(self, name))

    def __call__(self, model: CodedModel, images: Tensor, labels: Tensor) -> Tensor:
        check_has("a member objective", model, "code_symbols")
        targets = member_targets(model.code_symbols, labels)
        across = self.diversity == "cross" and self.diversity_weight > 0 and not model.share_head
        if not across:
            member_logits = model.member_logits(images)
            loss = self.member_loss(member_logits, targets)
            if self.diversity_weight == 0:
                return self.scale * loss.mean()
            entropy = member_entropy(member_logits, entropy_unit=self.entropy_unit)
        else:
            features = model.features(images)
            member_logits = model.apply_head(features)
            loss = self.member_loss(member_logits, targets)
            weight, bias = model.head.weight, model.head.bias
            if member_logits.ndim == 2:
                weight, bias = weight.squeeze(-1), bias.squeeze(-1)
            entropy = cross_member_entropy(features, weight, bias, entropy_unit=self.entropy_unit)
        return self.scale * joint_loss(loss, entropy, self.diversity_weight).mean()

    def member_loss(self, member_logits: Tensor, targets: Tensor) -> Tensor:
        """(batch,) the loss without the entropy term."""
        if self.kind == "cross_entropy":
            return member_cross_entropy(member_logits, targets)
        hinge = member_hinge if member_logits.ndim == 2 else symbol_hinge
        return hinge(member_logits, targets, margin=self.margin)


@dataclass(frozen=True)
class ScoreObjective:
    """Mean softmax cross entropy of the class scores: how ordinary classifiers are trained."""

    def __call__(self, model: Any, images: Tensor, labels: Tensor) -> Tensor:
        return score_cross_entropy(model(images), labels).mean()


#: name -> constructor, which takes the objective's attributes. `ecnn.models.OBJECTIVES` adds those of single kinds.
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "member_hinge": partial(MemberObjective, kind="hinge"),
    "member_cross_entropy": partial(MemberObjective, kind="cross_entropy"),
    "cross_entropy": ScoreObjective,
}


def make_objective(
    name: str, *, known: Mapping[str, Callable[..., Objective]] = OBJECTIVES, **options: Any
) -> Objective:
    """The objective of that name with these attributes; an unknown name or option is an InputError."""
    check_choice("objective", name, known)
    maker: Any = known[name]
    fixed = maker.keywords if isinstance(maker, partial) else {}
    kind: Any = maker.func if isinstance(maker, partial) else maker
    made: Objective = build(f"the objective {name!r}", kind, options, fixed=fixed)
    return made


def _checked_logits(member_logits: Tensor, targets: Tensor, ndim: int | None = None) -> Tensor:
    """The logits in float32 or better; InputError unless their shape fits the targets'."""
    allowed = (2, 3) if ndim is None else (ndim,)
    if member_logits.ndim not in allowed or member_logits.shape[:2] != targets.shape:
        shapes = {2: "(batch, member)", 3: "(batch, member, symbol)"}
        expected = " or ".join(shapes[size] for size in allowed)
        raise InputError(
            f"expected member logits {expected} and targets (batch, member), not "
            f"{tuple(member_logits.shape)} and {tuple(targets.shape)}."
        )
    return full_precision(member_logits)


def _signs(targets: Tensor, logits: Tensor) -> Tensor:
    """-1 for symbol 0, +1 for symbol 1."""
    return 2 * targets.to(logits.dtype) - 1


def _without(logits: Tensor, index: Tensor) -> Tensor:
    """The logits with minus infinity at one index of the last axis."""
    return logits.scatter(-1, index.unsqueeze(-1), -math.inf)


def _lead(logits: Tensor, targets: Tensor) -> Tensor:
    """By how much the target's logit exceeds the best other one, along the last axis."""
    right = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return right - _without(logits, targets).amax(dim=-1)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax at the target, along the last axis.

    Computed as softplus(logsumexp of the others - target), because the usual form is 0 once the target's probability
    rounds to 1.
    """
    right = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return F.softplus(_without(logits, targets).logsumexp(dim=-1) - right)


def _binary_entropy(logits: Tensor) -> Tensor:
    # Both terms are non-negative, so nothing cancels; p*log(p) is already nan at a float32 logit of 20.
    size = logits.abs()
    return F.softplus(-size) + size * torch.sigmoid(-size)


def _symbol_entropy(logits: Tensor) -> Tensor:
    # As above for several symbols, relative to the most probable one: log(1 + rest) plus the mean lead.
    best = logits.argmax(dim=-1, keepdim=True)
    lead = logits.gather(-1, best) - logits
    odds = torch.exp(-lead).scatter(-1, best, 0.0)
    rest = odds.sum(dim=-1)
    return torch.log1p(rest) + (odds * lead).sum(dim=-1) / (1 + rest)


def _unit(entropy_unit: str, arity: int) -> float:
    """The number by which an entropy in nats is divided."""
    check_choice("entropy_unit", entropy_unit, ENTROPY_UNITS)
    return 1.0 if entropy_unit == "nats" else math.log(arity)


def _confidence(lead: float, arity: int) -> float:
    return 1 / (1 + (arity - 1) * math.exp(-lead))
