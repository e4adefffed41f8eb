"""An attack on models that route images by decisions: it holds the decisions, and pushes the image to satisfy them.

A detector, a router or an input check compares a value with a threshold, or chooses the largest of a few values. At the
points that usual attacks reach, the outcome changes, and their gradient is that of another network, or zero. So this
attack intercepts the decisions, wherever in the model's code they are made, and gives them the outcome that they have
for the clean image, or one outcome for all images. It raises the loss under these outcomes, and at the same time pushes
the image to where the model itself decides so. Only what the unchanged model misclassifies counts.
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

_FIRST_WEIGHT = 0.1  # of the decisions' cost, relative to the loss
_WEIGHTS = (1e-3, 1e3)  # bounds of this weight
_MOMENTUM = 0.5
_LAST_STEP = 1e-3  # as a share of the first; small, as a threshold may leave little room
_BACK = 0.85  # share of its move that a pixel keeps if the cost pulls it out of the ball
# How many decisions are tried with forced outcomes, and how many values per image one may have at most.
_MOST_SITES, _MOST_AT_ONCE = 6, 16


def _read(
    model: nn.Module, points: Tensor, decisions: Decisions, *, stays_flat: bool = False
) -> tuple[Tensor, bool]:
    """(batch, class) scores of a pass in which decisions are noted or held, and whether the model rounds anything."""
    with straight_through(model, batch=len(points), stays_flat=stays_flat) as mode, decisions:
        return full_precision(model(points)), mode.rounded > 0


def _note(model: nn.Module, images: Tensor, forced: Mapping[int, bool], num_classes: int) -> Decisions:
    decisions = Decisions(len(images), num_classes=num_classes, forced=forced)
    with torch.enable_grad():
        _read(model, images.detach().clone().requires_grad_(True), decisions)
    return decisions


def ways_to_hold(model: nn.Module, images: Tensor) -> dict[str, Forced]:
    """Settings of `Holding.forced` to try, by name: no forced decision, or one decision with either outcome.

    Only decisions with few values per image are forced, as a mask of features has many values and routes no image.
    Empty if the model makes no decisions.
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
    """Raises the loss that the model would have if its decisions came out as they do for the clean image.

    The cost of bringing these outcomes about is weighed against the loss. Its weight grows while the model with held
    decisions is wrong but the image does not meet them, and shrinks while the image meets them but the model is right.

    Attributes:
        norm, eps: of the ball.
        steps: gradient steps from each start; they shrink from a quarter of the radius to a thousandth of that.
        forced: see `Forced`; the other decisions have the outcome of the clean image.
        restarts: how many starts; the first is the image, later ones are random.
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
        """A misclassified point for each image, or the image itself, and (batch,) whether one was found."""
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
            for shown in (trail.points, as_bytes):  # many checks reject what is no 8-bit image
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
        """(batch,) whether the model with held decisions is wrong at the points; also updates the trail's direction."""
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
        # Growth in half of the steps leads to the largest weight.
        growth = (_WEIGHTS[1] / _FIRST_WEIGHT) ** (2 / self.steps)
        factor = torch.where(wrong & astray, growth, torch.where(wrong | astray, 1.0, 1 / growth))
        trail.weights = (trail.weights * factor).clamp(*_WEIGHTS)
        direction = _of_length_one(up) - per_image(trail.weights, points) * _of_length_one(amiss)
        trail.pace, trail.amiss = _MOMENTUM * trail.pace + direction, amiss
        return wrong

    def _own_slope(self, target: Target, points: Tensor, noted: Decisions, *, otherwise: Tensor) -> Tensor:
        """The gradient of the decisions' cost with slope 0 for rounding, as a distance from rounded values needs.

        For images where this gradient is zero it is `otherwise`.
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
    """The state of a climb.

    Attributes:
        points: where it is, one point per image.
        weights: (batch,) weights of the decisions' cost.
        pace: the direction of the next step, with momentum.
        amiss: the gradient of the decisions' cost.
    """

    points: Tensor
    weights: Tensor
    pace: Tensor
    amiss: Tensor


def _fallen(target: Target, points: Tensor, labels: Tensor) -> Tensor:
    """(batch,) whether the unchanged model is wrong; False for all if it raises an error, as some input checks do."""
    if not len(points):
        return torch.zeros_like(labels, dtype=torch.bool)
    try:
        return predicted_classes(target.scores(points)) != labels
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception:
        return torch.zeros_like(labels, dtype=torch.bool)


def _let_go(moved: Tensor, trail: _Trail, images: Tensor) -> Tensor:
    """The points, with pixels that the cost pulls out of the ball or of [0, 1] moved some way back to the image.

    They cannot reach the value that the cost pulls them to; nearer to the image there may be another that satisfies it.
    """
    is_blocked = (moved == trail.points) & (trail.amiss * (trail.points - images) < 0)
    return torch.where(is_blocked, images + _BACK * (moved - images), moved)


def _of_length_one(gradient: Tensor) -> Tensor:
    lengths = gradient.flatten(1).abs().sum(dim=1)
    return gradient / per_image(lengths.clamp_min(1e-30), gradient)
