"""PGD with gradients that are estimated from the scores of points around (NES, SPSA)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

from ecnn.asking import undisturbed
from ecnn.attacks.base import Cost, Target, gradient_of
from ecnn.attacks.gradient import PGD
from ecnn.attacks.images import at_once, per_image
from ecnn.attacks.norms import NORMS, l2_norm
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import SCORES, Aim, Look, View, find_view
from ecnn.checks import check_choice, check_count, check_number
from ecnn.errors import InputError

_MOST_POINTS, _MOST_PIXELS = 1024, 2**22  # largest forward pass, unless the batch itself is larger
_STREAM = 31


@dataclass(frozen=True, kw_only=True)
class EstimatedPGD(PGD):
    """`PGD` with a gradient estimated from scores, for models whose backward pass is missing, masked or misleading.

    The loss is evaluated at pairs of opposite points around each point. Half the difference of a pair, divided by the
    deviation, times the direction of the pair, is in expectation the gradient of the loss smoothed over the deviation.
    Rounding steps of the model, and noise in its backward pass, therefore do not matter. Along promising directions
    (the last estimate and the gradient of a `prior`) the slope is measured directly; the random pairs estimate the
    rest of the gradient.

    Attributes:
        norm, eps, steps, step_size, loss, on, loss_slack, start, restarts, targets, schedule: as in `PGD`, but `start`
            cannot be "odi".
        pairs: how many pairs of points in random directions are evaluated in every step.
        estimator: how directions are drawn: "nes", normal numbers (Ilyas et al. 2018), or "spsa", plus or minus one
            (Spall 1992; Uesato et al. 2018).
        deviation: size of the move of each pixel, on the [0, 1] scale; larger than the steps by which the model rounds.
        memory: also evaluates one pair along the last estimate (after Meier et al. 2019), like a momentum that the
            scores confirm.
        prior: another model of the same classes, such as a surrogate, or None. One pair is evaluated along the
            gradient of its loss (after Cheng et al. 2019). Only the attacked model's passes are counted.

    Departs: points are cut to [0, 1], and the estimate is corrected for that. Steps are those of `PGD`; Uesato et al.
        use Adam's.
    """

    pairs: int
    estimator: Literal["nes", "spsa"] = "nes"
    deviation: float = 0.01
    memory: bool = True
    prior: nn.Module | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("pairs", self.pairs)
        check_choice("estimator", self.estimator, ("nes", "spsa"))
        check_number("deviation", self.deviation, most=1, above=True)
        if self.start == "odi":
            raise InputError('start="odi" needs gradients of scores: use "uniform" or "image".')
        if self.prior is not None and not isinstance(self.prior, nn.Module):
            raise InputError(
                f"prior must be a torch module from images to scores, not {type(self.prior).__name__}."
            )

    def cost(self, num_classes: int) -> Cost:
        climbs = self.num_climbs(num_classes)
        pairs = self.pairs + self.memory + (self.prior is not None)
        looks = climbs * (self.steps * (1 + 2 * pairs) + 1)
        return Cost(2 + looks * find_view(self.on).passes_per_look, 0)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        if self.radius == 0:
            return images.clone()
        asked = _Estimating.of(target, self, images, draws.fold(_STREAM))
        if self.prior is None:
            return super().search(asked, images, labels, draws)
        with undisturbed(self.prior):
            return super().search(asked, images, labels, draws)

    def _first(self, target: Target, images: Tensor, draws: Draws) -> Tensor:
        if isinstance(target, _Estimating):
            target.forget()
        return super()._first(target, images, draws)


class _Estimating(Target):
    """A target whose gradients are estimated from scores.

    Attributes:
        settings: the attack.
        draws: random numbers of the images of this target.
        places: (n,) positions of these images in `past`.
        past: last estimate for each image of the first batch; zero for none.
        asked: how many estimates were made, as a list of one number that narrowed targets share.
        most: largest number of points in one forward pass.
    """

    settings: EstimatedPGD
    draws: Draws
    places: Tensor
    past: Tensor
    asked: list[int]
    most: int

    @classmethod
    def of(cls, target: Target, settings: EstimatedPGD, images: Tensor, draws: Draws) -> Self:
        part = cls.__new__(cls)
        part.__dict__.update(vars(target))
        part.settings, part.draws, part.asked = settings, draws, [0]
        part.places = torch.arange(len(images), device=images.device)
        part.past = torch.zeros_like(images)
        few = min(_MOST_POINTS, _MOST_PIXELS // max(1, images[0].numel()))
        part.most = at_once(max(1, len(images), few))
        return part

    def narrow(self, rows: Tensor) -> Self:
        part = super().narrow(rows)
        part.draws, part.places = self.draws.take(rows), self.places[rows]
        return part

    def forget(self) -> None:
        """Clears the last estimates, for a new start from other points."""
        self.past[self.places] = 0

    def ascend(self, view: View, points: Tensor, aim: Aim) -> tuple[Look, Tensor]:
        look = self.look(view, points, aim)
        self.asked[0] += 1
        draws = self.draws.fold(self.asked[0])
        known, directions = torch.zeros_like(points), list[Tensor]()
        for likely in self._likely(points, aim):
            slope, direction = self._along(view, points, aim, likely, known)
            known = known + per_image(slope, points) * direction
            directions.append(direction)
        rest = self._estimate(view, points, aim, draws, known)
        for direction in directions:
            rest = rest - per_image(_dot(rest, direction), points) * direction
        # With fewer pairs than pixels the random part is mostly noise: this weight minimises the expected error.
        gradient = known + rest * (self.settings.pairs / (self.settings.pairs + points[0].numel()))
        if self.settings.memory:
            self.past[self.places] = gradient
        return look, gradient

    def _likely(self, points: Tensor, aim: Aim) -> Iterator[Tensor]:
        """Yields promising directions: the gradient of the prior's loss, and the last estimate."""
        if self.settings.prior is not None:
            leaf = points.detach().requires_grad_(True)
            with torch.enable_grad(), self.autocast():
                yield gradient_of(SCORES.look(self.settings.prior, leaf, aim).losses, leaf)
        if self.settings.memory:
            yield self.past[self.places]

    def _along(
        self, view: View, points: Tensor, aim: Aim, direction: Tensor, known: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(batch,) slope of the loss along a direction, beyond that of `known`, and the unit direction measured."""
        reach = self.settings.deviation * math.sqrt(points[0].numel())
        unit = NORMS["l2"].steepest(direction)
        upper, lower = (points + reach * unit).clamp(0, 1), (points - reach * unit).clamp(0, 1)
        moved = upper - lower
        lengths = l2_norm(moved)
        rises = self._rises(view, upper[:, None], lower[:, None], aim).squeeze(1) - _dot(known, moved)
        is_moved = lengths > 0
        slopes = torch.where(is_moved, rises / lengths.clamp_min(1e-30), 0.0)
        return slopes, moved / per_image(lengths.clamp_min(1e-30), moved)

    def _estimate(self, view: View, points: Tensor, aim: Aim, draws: Draws, known: Tensor) -> Tensor:
        """An estimate, from random pairs, of the smoothed gradient minus `known`."""
        settings, total = self.settings, torch.zeros_like(points)
        group = max(1, self.most // max(1, 2 * len(points)))
        for first in range(0, settings.pairs, group):
            numbers = range(first, min(first + group, settings.pairs))
            moves = [self._draw(points, draws.fold(number)) for number in numbers]
            ends = [
                torch.stack([(points + size * move).clamp(0, 1) for move in moves], dim=1)
                for size in (settings.deviation, -settings.deviation)
            ]
            rises = self._rises(view, ends[0], ends[1], aim)
            for place, move in enumerate(moves):
                rise = rises[:, place] - _dot(known, ends[0][:, place] - ends[1][:, place])
                total = total + per_image(rise, points) * move
        return total / (2 * settings.deviation * settings.pairs) / self._share(points)

    def _draw(self, points: Tensor, draws: Draws) -> Tensor:
        shape = points.shape[1:]
        if self.settings.estimator == "nes":
            return draws.normal(*shape, dtype=points.dtype)
        return 2 * draws.integers(2, *shape).to(points.dtype) - 1

    def _share(self, points: Tensor) -> Tensor:
        """The share of each pixel's slope that pairs cut to [0, 1] measure: about 1 far inside, 1/2 at 0 and at 1."""
        up, down = (1 - points) / self.settings.deviation, points / self.settings.deviation
        if self.settings.estimator == "nes":
            return (torch.erf(up / math.sqrt(2)) + torch.erf(down / math.sqrt(2))) / 2
        return (up.clamp(max=1) + down.clamp(max=1)) / 2

    def _rises(self, view: View, upper: Tensor, lower: Tensor, aim: Aim) -> Tensor:
        """(batch, pair) loss at the upper end of each pair minus loss at the lower end."""
        pairs = upper.shape[1]
        self.count(2 * pairs * view.passes_per_look)
        labels = aim.labels.repeat_interleave(pairs)
        goals = None if aim.goals is None else aim.goals.repeat_interleave(pairs)
        losses = []
        for ends in (upper, lower):
            points = ends.flatten(0, 1)
            looks = []
            for rows in torch.split(torch.arange(len(points), device=points.device), self.most):
                own = None if goals is None else goals[rows]
                aimed = Aim(labels[rows], own, aim.loss, aim.slack)
                looks.append(self._look(view, points[rows], aimed).losses)
            losses.append(torch.cat(looks).view(-1, pairs))
        return losses[0] - losses[1]


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """(batch,) the inner product of each row."""
    return (first * second).flatten(1).sum(dim=1)
