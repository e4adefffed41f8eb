"""An attack on models that decide which way an image goes: it holds them to a decision, and the image to its side.

A detector, a router or a check of the input compares something with a threshold, or chooses the largest of a few
values. Where usual attacks set foot, that comes out otherwise, and what they climb there is another network, or none.
So the decisions that a model makes are watched, wherever in its code they stand, and given the outcome that they have
for the clean image, or one outcome for all. What the model says then is climbed, while the image is pushed to where the
decisions come out so. The model itself has the last word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ecnn.asking import full_precision, read_model
from ecnn.attacks import Cost, Draws
from ecnn.attacks.base import BallAttack, Target, gradient_of
from ecnn.attacks.images import per_image
from ecnn.attacks.norms import NORMS, round_to_bytes
from ecnn.attacks.views import score_loss
from ecnn.auditing.bpda import straight_through
from ecnn.auditing.decisions import Decisions, Forced, StrayedError
from ecnn.checks import check_counts
from ecnn.objectives import predicted_classes

_FIRST_WEIGHT = 0.1  # of what decisions cost, against one of the loss
_WEIGHTS = (1e-3, 1e3)
_MOMENTUM = 0.5
_LAST_STEP = 1e-3  # as a share of the first: a threshold may stand close to what it lets pass
_BACK = 0.85  # how far from the image a pixel is let that was pulled out of the ball
# Decisions to try to either side, and of how many parts per image one may be.
_MOST_SITES, _MOST_AT_ONCE = 6, 16


def _read(
    model: nn.Module, points: Tensor, decisions: Decisions, *, stays_flat: bool = False
) -> tuple[Tensor, bool]:
    """(batch, class) the scores, with what is decided noted or held; and whether anything was rounded."""
    with straight_through(model, batch=len(points), stays_flat=stays_flat) as mode, decisions:
        return full_precision(model(points)), mode.rounded > 0


def _note(model: nn.Module, images: Tensor, forced: Mapping[int, bool], num_classes: int) -> Decisions:
    decisions = Decisions(len(images), num_classes=num_classes, forced=forced)
    with torch.enable_grad():
        _read(model, images.detach().clone().requires_grad_(True), decisions)
    return decisions


def ways_to_hold(model: nn.Module, images: Tensor) -> dict[str, Forced]:
    """By name, what may be forced upon the model: nothing, or one of its decisions to either side.

    Only what decides little at once chooses a way for an image; a mask of features does not. Nothing if there is none.
    """
    said = _note(model, images, {}, read_model(model, images).shape[1]).said
    if not said:
        return {}
    ways: dict[str, Forced] = {"decisions": ()}
    few = [
        site
        for site, part in enumerate(said)
        if part.dtype is torch.bool and part.numel() <= _MOST_AT_ONCE * len(images)
    ]
    for site in sorted(few, key=lambda one: said[one].numel())[:_MOST_SITES]:
        ways |= {f"decision-{site}-{side}".lower(): ((site, side),) for side in (True, False)}
    return ways


@dataclass(frozen=True, kw_only=True)
class Holding(BallAttack):
    """Climbs what the model would say if its comparisons came out as they do for the clean image.

    What it costs to bring them to that is weighed against the loss: more as long as the model would be wrong but
    decides otherwise, less once it decides so but would be right.

    Attributes:
        norm, eps: of the ball.
        steps: from each start; they fall from a quarter of the radius to next to nothing.
        forced: see `Forced`; the other comparisons have the outcome of the clean image.
        restarts: the first start is the image, later ones are random.
    """

    steps: int
    forced: Forced = ()
    restarts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "steps", "restarts")

    def cost(self, num_classes: int) -> Cost:
        return Cost(2 + self.restarts * (2 + 4 * self.steps), 2 * self.restarts * self.steps)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        best, norm = images.clone(), NORMS[self.norm]
        rows = torch.arange(len(images), device=images.device)
        for restart in range(self.restarts):
            given, own = images[rows], labels[rows]
            starts = norm.random(given, self.radius, draws.take(rows).fold(restart)) if restart else given
            found, broken = self._climb(target.narrow(rows), given, own, starts)
            best[rows] = torch.where(per_image(broken, found), found, best[rows])
            if self._drops_rows:
                rows = rows[~broken]
            if not len(rows):
                break
        return best

    def _climb(self, target: Target, images: Tensor, labels: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """A point for each image, and whether the model is wrong there."""
        best, broken = images.clone(), torch.zeros_like(labels, dtype=torch.bool)
        num_classes = target.scores(images).shape[1]
        noted = _note(target.model, images, dict(self.forced), num_classes)
        target.count(1)
        weights, nowhere = torch.full_like(images[:, 0, 0, 0], _FIRST_WEIGHT), torch.zeros_like(images)
        trail = _Trail(points, weights, nowhere, nowhere)
        for step in range(self.steps + 1):
            try:
                wrong = self._look(target, trail, labels, noted)
            except StrayedError:
                break
            as_bytes = round_to_bytes(trail.points, images, norm=self.norm, eps=self.radius)
            for shown in (trail.points, as_bytes):  # what bytes cannot hold is what many checks look for
                asked = (wrong & ~broken).nonzero().flatten()
                fallen = asked[_fallen(target.narrow(asked), shown[asked], labels[asked])]
                best[fallen], broken[fallen] = shown[fallen], True
            if bool(broken.all()):
                break
            length = self.radius / 4 * _LAST_STEP ** ((step / self.steps) ** 2)
            moved = trail.points + length * NORMS[self.norm].step(trail.pace, trail.points)
            moved = NORMS[self.norm].project(moved, images, self.radius)
            if step >= 0.4 * self.steps and step % max(1, self.steps // 10) == 0:
                moved = _let_go(moved, trail, images)
            trail.points = moved
        return best, broken

    def _look(self, target: Target, trail: _Trail, labels: Tensor, noted: Decisions) -> Tensor:
        """(batch,) whether the model would be wrong at the points; the trail knows then where to go from there."""
        points = trail.points.detach().clone().requires_grad_(True)
        decisions = Decisions(
            len(points), num_classes=noted.num_classes, forced=dict(self.forced), noted=noted
        )
        with torch.enable_grad():
            scores, is_rounded = _read(target.model, points, decisions)
            losses = score_loss(scores, labels, "margin")
            up = gradient_of(losses, points, again=True)
            decisions.slopes.are_spread = True
            amiss = gradient_of(decisions.cost, points)
        target.count(1, 1)
        if is_rounded:
            amiss = self._own_slope(target, points, noted, otherwise=amiss)
        wrong, astray = losses.detach() > 0, decisions.cost.detach().to(points) > 0
        growth = (_WEIGHTS[1] / _FIRST_WEIGHT) ** (
            2 / self.steps
        )  # the most that it can get in half of the steps
        factor = torch.where(wrong & astray, growth, torch.where(wrong | astray, 1.0, 1 / growth))
        trail.weights = (trail.weights * factor).clamp(*_WEIGHTS)
        direction = _of_length_one(up) - per_image(trail.weights, points) * _of_length_one(amiss)
        trail.pace, trail.amiss = _MOMENTUM * trail.pace + direction, amiss
        return wrong

    def _own_slope(self, target: Target, points: Tensor, noted: Decisions, *, otherwise: Tensor) -> Tensor:
        """The gradient of what decisions cost where rounding is flat, as in a distance from what was rounded.

        The other one where that says nothing.
        """
        decisions = Decisions(
            len(points), num_classes=noted.num_classes, forced=dict(self.forced), noted=noted
        )
        with torch.enable_grad():
            _read(target.model, points, decisions, stays_flat=True)
            decisions.slopes.are_spread = True
            own = gradient_of(decisions.cost, points)
        target.count(1, 1)
        return torch.where(per_image(own.flatten(1).any(dim=1), own), own, otherwise)


@dataclass(eq=False)
class _Trail:
    """Where a climb is.

    Attributes:
        points: of the images.
        weights: (batch,) of what decisions cost.
        pace: the way that it is going.
        amiss: the slope of what decisions cost.
    """

    points: Tensor
    weights: Tensor
    pace: Tensor
    amiss: Tensor


def _fallen(target: Target, points: Tensor, labels: Tensor) -> Tensor:
    """(batch,) where the model itself is wrong; nowhere if it refuses to answer, as some do of images astray."""
    if not len(points):
        return torch.zeros_like(labels, dtype=torch.bool)
    try:
        return predicted_classes(target.scores(points)) != labels
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception:
        return torch.zeros_like(labels, dtype=torch.bool)


def _let_go(moved: Tensor, trail: _Trail, images: Tensor) -> Tensor:
    """The points, but pixels that a decision pulls out of the ball or of [0, 1] are taken some way back.

    What they were pulled to is beyond reach; on this side there may be another place for them.
    """
    is_blocked = (moved == trail.points) & (trail.amiss * (trail.points - images) < 0)
    return torch.where(is_blocked, images + _BACK * (moved - images), moved)


def _of_length_one(gradient: Tensor) -> Tensor:
    lengths = gradient.flatten(1).abs().sum(dim=1)
    return gradient / per_image(lengths.clamp_min(1e-30), gradient)
