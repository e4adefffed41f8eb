"""Minimum-norm attacks: they search the nearest misclassified image, in no ball. C&W variants are in `carlini`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ecnn.attacks.base import Attack, Cost, Target, gradient_of
from ecnn.attacks.images import per_image
from ecnn.attacks.norms import NORMS, Norm
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import Aim, View, find_score_view
from ecnn.checks import check_choice, check_count, check_number
from ecnn.errors import InputError
from ecnn.objectives import bounded, predicted_classes, score_margin

# A lead below this share of the largest score may vanish in another batch or in full precision.
_ROUNDING = {torch.float32: 4e-6, torch.float64: 1e-14}
_ROUNDING_BFLOAT16 = 2e-2


@dataclass(frozen=True, kw_only=True)
class MinimumNormAttack(Attack):
    """Base of minimum-norm attacks: `search` returns the nearest misclassified point found, or the image if none was.

    A point counts as misclassified if a wrong class leads by more than rounding error. So it is still misclassified in
    the final pass, in another batch and in full precision.
    """

    has_last_iterate: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep != "best":
            raise InputError(
                f'a minimum-norm attack returns the nearest misclassified image: keep must be "best", not '
                f"{self.keep!r}."
            )


@dataclass(frozen=True, kw_only=True)
class NearestInNorm(MinimumNormAttack):
    """A minimum-norm attack for several norms.

    Attributes:
        norm: of the distance, a name of `NORMS`.
        steps: the largest number of steps.
        on: the view that is attacked: a name of `VIEWS`, or a `ScoreView`.
    """

    norm: Norm
    steps: int
    on: str | View = "scores"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("norm", self.norm, NORMS)
        check_count("steps", self.steps)
        find_score_view(self.on)


def rounding(target: Target, scores: Tensor) -> Tensor:
    """(batch,) the largest lead that rounding could explain: a small share of the image's largest finite score."""
    share = _ROUNDING_BFLOAT16 if target.precision == "bfloat16" else _ROUNDING[scores.dtype]
    return share * torch.where(torch.isfinite(scores), scores.abs(), 0.0).amax(dim=1)


def misclassified(target: Target, scores: Tensor | None, points: Tensor, labels: Tensor) -> Tensor:
    """(batch,) whether a wrong class leads by more than rounding, or the scores give no answer.

    If `scores` is None, one forward pass computes them.
    """
    scores = target.scores(points) if scores is None else scores
    leads = -score_margin(scores, labels) > rounding(target, scores)
    return leads | (predicted_classes(scores) < 0)


def possible(direction: Tensor, points: Tensor) -> Tensor:
    """The direction, set to 0 for pixels at 0 or 1 that it would move out of [0, 1]."""
    stuck = ((points <= 0) & (direction < 0)) | ((points >= 1) & (direction > 0))
    return direction.masked_fill(stuck, 0)


@dataclass(frozen=True, kw_only=True)
class DeepFool(NearestInNorm):
    """DeepFool (Moosavi-Dezfooli et al. 2016): steps to the linearised model's nearest border until it is crossed.

    Each point is the image plus (1 + overshoot) times the sum of all steps so far: on a linear model the first step
    ends at (1 + overshoot) times the smallest distance. A step costs two passes and a gradient per wrong candidate;
    images leave the batch once they are misclassified.

    Attributes:
        norm: in which steps are shortest, a name of `NORMS`. In L1 a step moves one pixel.
        steps: the largest number of steps; the authors' 50.
        overshoot: the authors' 0.02.
        num_candidates: how many classes have their borders considered, the label included: those with the highest
            scores of the clean image; the authors' 10.
        on: the view that is attacked: "scores", "linear", "tempered" or another `ScoreView`.

    Departs: points are cut to [0, 1], and pixels at 0 or 1 that cannot move further are left out of a step. The
        authors' program lengthens every step by 0.0001; here it is lengthened by rounding error.
    """

    steps: int = 50
    overshoot: float = 0.02
    num_candidates: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_candidates", self.num_candidates, least=2)
        check_number("overshoot", self.overshoot)

    def cost(self, num_classes: int) -> Cost:
        borders = min(self.num_candidates, num_classes) - 1
        return Cost(3 + 2 * self.steps, borders * self.steps)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        found, points, moves = images.clone(), images, torch.zeros_like(images)
        rows = torch.arange(len(images), device=images.device)
        candidates: Tensor | None = None
        for step in range(self.steps + 1):
            broken = misclassified(target, None, points, labels)
            found[rows[broken]] = points[broken]
            kept = torch.nonzero(~broken).squeeze(1)
            if step == self.steps or not len(kept):
                break
            target, rows, labels, moves = target.narrow(kept), rows[kept], labels[kept], moves[kept]
            candidates = None if candidates is None else candidates[kept]
            move, candidates = self._shortest_step(target, points[kept], labels, candidates)
            moves = moves + move
            points = (images[rows] + (1 + self.overshoot) * moves).clamp(0, 1)
        return found

    def _shortest_step(
        self, target: Target, points: Tensor, labels: Tensor, candidates: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The shortest step to the border with any candidate class, and the wrong candidates (batch, rank)."""
        points = points.detach().requires_grad_(True)
        with torch.enable_grad(), target.autocast():
            scores = bounded(find_score_view(self.on).read(target.model, points)[0])
        if candidates is None:
            rivals = scores.detach().scatter(1, labels[:, None], -math.inf)
            candidates = rivals.topk(min(self.num_candidates, scores.shape[1]) - 1, dim=1).indices
        shortest = torch.zeros_like(points, requires_grad=False)
        nearest = torch.full_like(scores[:, 0], math.inf, requires_grad=False)
        # Without this, the step from a point on the border would be shorter than rounding error.
        least = 2 * rounding(target, scores.detach())
        count = candidates.shape[1]
        for rank in range(count):
            with torch.enable_grad():
                pair = scores.gather(1, torch.stack([labels, candidates[:, rank]], dim=1))
                gaps = pair[:, 0] - pair[:, 1]
            gradient = -possible(-gradient_of(gaps, points, again=rank + 1 < count), points)
            lengths, step = _step_to_border(gaps.detach().abs() + least, gradient, self.norm)
            nearer = lengths < nearest
            nearest = torch.where(nearer, lengths, nearest)
            shortest = torch.where(per_image(nearer, step), step, shortest)
        target.count(1, count)
        return shortest, candidates


def _step_to_border(gaps: Tensor, gradient: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """(batch,) distance, in the norm, to where a linear gap is zero, and the shortest move there.

    Without a gradient the distance is inf and the move 0.
    """
    lengths = gaps / NORMS[norm].dual(gradient)
    lengths = torch.where(torch.isfinite(lengths), lengths, math.inf)  # without a slope there is no border
    return lengths, -per_image(lengths.nan_to_num(posinf=0.0), gradient) * NORMS[norm].steepest(gradient)


@dataclass(frozen=True, kw_only=True)
class FMN(NearestInNorm):
    """The fast minimum-norm attack (Pintor et al. 2021): gradient steps in a ball of adaptive radius per image.

    Until the first success the radius is the distance to the border of the linearised model. From then on it shrinks
    by the share `radius_change` whenever the point is misclassified, and grows by it whenever it is not. The share and
    the step size decrease along half a cosine. The nearest misclassified iterate is kept.

    Attributes:
        norm: of the ball, a name of `NORMS`. The length of steps is measured in L2 for all norms, as published.
        steps: gradient steps; one more pass checks the last point.
        step_size: first and last L2 length of a step, the authors' 1 and 0.01.
        radius_change: first and last share, the authors' 0.05 and 0.001.
        on: the view that is attacked: "scores", "linear", "tempered" or another `ScoreView`.

    Departs: the authors' program never checks the point of the last step. Pixels at 0 or 1 that a step would move out
        of [0, 1] take no part in it: at a corner of [0, 1] they would use up the radius and stop the search.
    """

    step_size: tuple[float, float] = (1.0, 0.01)
    radius_change: tuple[float, float] = (0.05, 0.001)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, top in (("step_size", math.inf), ("radius_change", 1.0)):
            value = getattr(self, name)
            if not (
                isinstance(value, tuple | list) and len(value) == 2 and all(0 < end < top for end in value)
            ):
                raise InputError(
                    f"{name} must be two numbers between 0 and {top}, first and last, not {value!r}."
                )

    def cost(self, num_classes: int) -> Cost:
        return Cost(3 + self.steps, self.steps)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        view, norm = find_score_view(self.on), NORMS[self.norm]
        points, found = images, images.clone()
        shortest = torch.full(images.shape[:1], math.inf, device=images.device, dtype=images.dtype)
        radius = shortest.clone()
        for step in range(self.steps + 1):
            if step == self.steps:
                look, gradient = target.look(view, points, Aim(labels)), torch.zeros_like(points)
            else:
                look, gradient = target.ascend(view, points, Aim(labels))
            gradient = possible(gradient, points)
            scores = target.scores(points) if look.scores is None else look.scores
            broken = misclassified(target, scores, points, labels)
            lengths = norm.length(points - images)
            nearer = broken & (lengths < shortest)
            found = torch.where(per_image(nearer, found), points, found)
            shortest = torch.where(nearer, lengths, shortest)
            length, change = (
                _half_cosine(ends, step / self.steps) for ends in (self.step_size, self.radius_change)
            )
            # Aim beyond the border by rounding error: exactly on it, a linear model would never change the radius.
            missing = look.losses.abs() + 2 * rounding(target, scores)
            border = lengths + missing / norm.dual(gradient).clamp_min(1e-30)
            grown = torch.where(torch.isfinite(shortest), radius * (1 + change), border)
            radius = torch.where(broken, torch.minimum(radius * (1 - change), shortest), grown)
            moves = points - images + length * NORMS["l2"].steepest(gradient)
            points = (images + norm.shorten(moves, radius)).clamp(0, 1)
        return found


def _half_cosine(ends: tuple[float, float], done: float) -> float:
    first, last = ends
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * done))
