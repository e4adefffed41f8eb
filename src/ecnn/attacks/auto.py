"""AutoAttack: four attacks in turn, and a check for signs that they may fail on a model (Croce & Hein 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from ecnn.attacks.apgd import APGD
from ecnn.attacks.attempts import Attempts
from ecnn.attacks.base import Attack, BallAttack, Cost, Target
from ecnn.attacks.fab import FAB
from ecnn.attacks.norms import NORMS
from ecnn.attacks.randomness import Draws
from ecnn.attacks.square import Square
from ecnn.attacks.views import View, find_score_view, score_loss
from ecnn.checks import check_choice
from ecnn.comparing import scores_apart
from ecnn.errors import InputError

Version = Literal["standard", "apgd-ce", "apgd-t", "fab-t", "square"]
_STEPS, _TARGETS, _QUERIES = 100, 9, 5000
_SPARSE_STARTS = _SPARSE_TARGETS = 5  # in L1: starts of APGD on cross-entropy, and targets of APGD-T
_DIFFERENCE = 1e-4  # two passes that differ by more, relative to the spread of the scores, count as random
_SUM_TOLERANCE = 1e-5

DoubtKind = Literal["random", "probabilities", "dynamic", "no_gradient", "zero_gradient", "few_classes"]
_SENTENCES: dict[DoubtKind, str] = {
    "random": "Two passes over the same images gave different scores (up to {:.2g} of their spread): the model is "
    "random, so attack the average over its randomness.",
    "probabilities": "The scores are probabilities (in [0, 1], summing to 1): attack the logits before the softmax, "
    "which do not saturate.",
    "dynamic": "The model computes gradients while it classifies (a dynamic defence): these attacks cannot follow "
    "that, so attack the defence itself.",
    "no_gradient": "No gradient reaches the pixels: the model is not differentiable, so of "
    "AutoAttack's attacks only Square could work.",
    "zero_gradient": "The gradient is exactly zero for {:.1%} of the images: gradient attacks cannot work there; "
    "attack the values before the layer that saturates or quantises.",
    "few_classes": "The targeted DLR loss needs 4 classes and the model has {}: APGD-T used the margin loss "
    "instead, whose gradient may vanish with the scale of the scores.",
}


@dataclass(frozen=True)
class Doubt:
    """A reason why attacks on a model may find too little.

    Attributes:
        kind: one of `DoubtKind`, for programs.
        sentence: the reason in words, with figures, for people.
    """

    kind: DoubtKind
    sentence: str

    @classmethod
    def of(cls, kind: DoubtKind, figure: float = 0.0) -> Doubt:
        """The doubt of this kind with its usual sentence; `figure` is filled in if the sentence has a place for it."""
        return cls(kind, _SENTENCES[kind].format(figure))


@dataclass(frozen=True, kw_only=True)
class AutoAttack(BallAttack):
    """AutoAttack (Croce & Hein 2020): APGD on cross-entropy, APGD-T on DLR, FAB-T and Square.

    Each attack runs on the images that those before it did not break. To learn which attack broke an image, use
    `evaluate(model, split, attack.members(num_classes), cascade=True)`. `examine` lists reasons not to trust the
    result.

    Attributes:
        norm: of the ball, a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        version: the "standard" suite, or one of its attacks with the suite's settings: 100 steps, the nine best wrong
            classes, 5,000 queries, one start; in L1 five starts of APGD, and the five best wrong classes for APGD-T.
        on: the view that all of them attack: "scores" (the published suite), "linear", "tempered" or another
            `ScoreView`.

    Departs: with fewer than four classes, where the targeted DLR loss is not defined, APGD-T raises the margin. With
        fewer than ten classes all wrong classes are targets. The authors' program fails in both cases.
    """

    has_last_iterate: ClassVar[bool] = False

    version: Version = "standard"
    on: str | View = "scores"

    def __post_init__(self) -> None:
        super().__post_init__()
        find_score_view(self.on)
        check_choice("version", self.version, get_args(Version))
        if self.keep == "last":
            raise InputError(
                'AutoAttack keeps the points that break images: keep="last" has no meaning here.'
            )

    def members(self, num_classes: int) -> dict[str, Attack]:
        """The attacks by name, in the order in which they run, for a model with this number of classes."""
        common: dict[str, Any] = {
            "norm": self.norm,
            "eps": self.eps,
            "on": self.on,
            "early_exit": self.early_exit,
            "precision": self.precision,
            "quick": self.quick,
        }
        loss: Literal["dlr", "margin"] = "dlr" if num_classes >= 4 else "margin"
        sparse = NORMS[self.norm].is_sparse
        starts, targets = (_SPARSE_STARTS, _SPARSE_TARGETS) if sparse else (1, _TARGETS)
        suite: dict[str, Attack] = {
            "apgd-ce": APGD(steps=_STEPS, loss="cross_entropy", restarts=starts, **common),
            "apgd-t": APGD(steps=_STEPS, loss=loss, targets=targets, **common),
            "fab-t": FAB(steps=_STEPS, targets=_TARGETS, **common),
            "square": Square(queries=_QUERIES, rescale=False, **common),
        }
        return suite if self.version == "standard" else {self.version: suite[self.version]}

    def cost(self, num_classes: int) -> Cost:
        return sum((member.cost(num_classes) for member in self.members(num_classes).values()), Cost(1, 0))

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        if not len(images):
            return images.clone()
        num_classes = target.scores(images).shape[1]
        attempts = Attempts(target, images, early_exit=True)
        for member, part, rows in attempts.each(self.members(num_classes).values()):
            points = member.search(part, images[rows], labels[rows], draws.take(rows))
            broken = part.verdict(points) != labels[rows]
            attempts.keep(points, broken, broken.to(images.dtype))
        return attempts.points


def examine(target: Target, images: Tensor, on: str | View = "scores") -> tuple[int, tuple[Doubt, ...]]:
    """The number of classes, and the reasons why attacks may find too little on these images.

    They are those that the authors of AutoAttack warn of: random scores, probabilities instead of logits, gradients
    taken while classifying, gradients that are missing or exactly zero, and too few classes for the targeted DLR loss.
    Costs three forward passes and one backward pass.
    """
    scores, takes_gradients = _ask_watched(target, images)
    again, num_classes = target.scores(images), scores.shape[1]
    doubts: list[Doubt] = []
    apart = float(scores_apart(scores, again).amax())
    if apart > _DIFFERENCE:
        doubts.append(Doubt.of("random", apart))
    if _are_probabilities(scores):
        doubts.append(Doubt.of("probabilities"))
    if takes_gradients:
        doubts.append(Doubt.of("dynamic"))
    try:
        blind = _share_of_zero_gradients(target, images, scores.argmax(dim=1), on)
    except Exception:  # raised by autograd, or by a model that refuses to be differentiated
        blind = None
    if blind is None:
        doubts.append(Doubt.of("no_gradient"))
    elif blind:
        doubts.append(Doubt.of("zero_gradient", blind))
    if num_classes < 4:
        doubts.append(Doubt.of("few_classes", num_classes))
    return num_classes, tuple(doubts)


def _ask_watched(target: Target, images: Tensor) -> tuple[Tensor, bool]:
    """The scores, and whether the model took a gradient to compute them."""
    try:
        with _noticing_gradients() as taken:
            return target.scores(images), bool(taken)
    except RuntimeError:  # only torch.func's derivatives refuse saved-tensor hooks, so a gradient was taken
        return target.scores(images), True


@contextmanager
def _noticing_gradients() -> Iterator[list[bool]]:
    """Yields a list that becomes non-empty when a gradient of something computed in this context is taken."""
    taken: list[bool] = []

    def unpack(saved: Tensor) -> Tensor:
        taken.append(True)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        yield taken


def _are_probabilities(scores: Tensor) -> bool:
    low, high = (float(bound) for bound in scores.aminmax())
    sums_to_one = bool(((scores.sum(dim=1) - 1).abs() < _SUM_TOLERANCE).all())
    return sums_to_one and low > -_SUM_TOLERANCE and high < 1 + _SUM_TOLERANCE


def _share_of_zero_gradients(target: Target, images: Tensor, labels: Tensor, on: str | View) -> float | None:
    """The share of images whose gradient is exactly zero, from 0 to 1; None if no gradient reaches the pixels.

    The gradient is that of the DLR loss (of the margin for two classes), which does not vanish for confident models.
    """
    points = images.clone().requires_grad_(True)
    with torch.enable_grad(), target.autocast():
        scores, _ = find_score_view(on).read(target.model, points)
        losses = score_loss(scores, labels, "dlr" if scores.shape[1] >= 3 else "margin")
    target.count(1, 1)
    gradient = None
    if losses.requires_grad:
        (gradient,) = torch.autograd.grad(losses.sum(), points, allow_unused=True)
    return None if gradient is None else float((gradient.flatten(1) == 0).all(dim=1).double().mean())
