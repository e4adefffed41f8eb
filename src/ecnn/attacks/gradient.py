"""Gradient attacks in a ball: FGSM, BIM, PGD."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ecnn.attacks.attempts import Attempts, ClimbingAttack, Rows, iterate_rows, spread
from ecnn.attacks.base import Cost, Target
from ecnn.attacks.images import per_image
from ecnn.attacks.norms import NORMS
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import SCORES, Aim, Look, Loss, ScoreView, View, find_view
from ecnn.checks import check_choice, parse_eps
from ecnn.objectives import predicted_classes

_ODI_STEPS = 2
_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


@dataclass(frozen=True, kw_only=True)
class PGD(ClimbingAttack):
    """Projected gradient descent (Madry et al. 2018): steps up the gradient, projected onto the ball.

    Called with a generator it can be captured in a CUDA graph, as part of a training step: no shape and no branch
    depends on the data then.

    Attributes:
        norm: of the ball and of the steps, a name of `NORMS`. In L1 a step moves 1 % of the pixels.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        steps: gradient steps from each start.
        step_size: length of a step, on the [0, 1] scale.
        loss: "margin" (best wrong score minus true score), "cross_entropy" or "dlr" (Croce & Hein 2020: the margin
            divided by the spread of the scores, so that their scale has no effect).
        on: the view that is attacked: a name of `VIEWS`, a `View`, or a loss of your own, (model, images, labels) ->
            (batch,).
        loss_slack: a margin or DLR loss is clamped to this, so that it is not raised further; the paper's c.
        start: a "uniform" point of the ball; the "image"; or "odi" (Tashiro et al. 2020), two steps of length eps from
            a uniform point, up a random weighting of the scores.
        restarts: how many starts, each with its own random numbers; starts at the "image" are all the same.
        targets: 0 moves away from the label; k moves to each of the k best wrong classes in turn, from every start.
        schedule: the step size stays ("constant") or falls to zero ("linear", "cosine").
    """

    step_size: float | str
    loss: Loss = "margin"
    loss_slack: float = math.inf
    start: Literal["uniform", "image", "odi"] = "uniform"
    schedule: Literal["constant", "linear", "cosine"] = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_eps(self.step_size, "step_size")
        check_choice("start", self.start, ("uniform", "image", "odi"))
        check_choice("schedule", self.schedule, _SCHEDULES)

    def cost(self, num_classes: int) -> Cost:
        climbs = self.num_climbs(num_classes)
        passes = climbs * find_view(self.on).passes_per_look
        dispersing = Cost(1, 1) * (climbs * _ODI_STEPS if self.start == "odi" else 0)
        return Cost(2 + passes * (self.steps + 1), passes * self.steps) + dispersing

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        if self.keep == "last":
            return self._last_iterate(target, images, labels, draws.fold(0))
        goals = self.goals(target, images, labels)
        attempts = Attempts(target, images, early_exit=self.early_exit)
        settings = itertools.product([draws.fold(start) for start in range(self.restarts)], goals)
        for several, part, rows in attempts.several(settings):
            starts, own_goals = spread(several, rows)
            points = self._first(part, images[rows], starts)
            attempts.keep(*self.climb(part, images[rows], labels[rows], own_goals, points))
        return attempts.points

    def climb(
        self, target: Target, images: Tensor, labels: Tensor, goals: Tensor | None, points: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One search from the given points: each image's best point, (batch,) whether it is broken, and its loss."""
        view, knows_scores = find_view(self.on), True
        whole = _PGDState(
            images=images,
            labels=labels,
            goals=goals,
            **dict.fromkeys(("points", "best"), points),
            best_losses=torch.full(images.shape[:1], -math.inf, device=images.device, dtype=images.dtype),
            broken=torch.zeros_like(labels, dtype=torch.bool),
        )
        for step, part, state in iterate_rows(target, whole, self.steps + 1, early_exit=self.early_exit):
            aim = Aim(state.labels, state.goals, self.loss, self.loss_slack)
            if step == self.steps:
                look = part.look(view, state.points, aim)
                state.note(look, self.early_exit)
            else:
                look, gradient = part.ascend(view, state.points, aim)
                state.note(look, self.early_exit)
                state.points = self._move(state.points, gradient, state.images, step)
            knows_scores = look.scores is not None
        if not knows_scores:  # the view returns no scores: one more pass finds out what is broken
            whole.broken = predicted_classes(target.scores(whole.best)) != labels
        return whole.best, whole.broken, whole.best_losses

    def _last_iterate(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        view, points = find_view(self.on), self._first(target, images, draws)
        aim = Aim(labels, loss=self.loss, slack=self.loss_slack)
        for step in range(self.steps):
            _, gradient = target.ascend(view, points, aim)
            points = self._move(points, gradient, images, step)
        return points

    def _first(self, target: Target, images: Tensor, draws: Draws) -> Tensor:
        eps, norm = self.radius, NORMS[self.norm]
        if self.start == "image":
            return images.clone()
        points = norm.random(images, eps, draws)
        if self.start == "odi":
            view = _WeightedScores(view=find_view(self.on), draws=draws.fold(7))
            anything = Aim(torch.zeros(len(points), dtype=torch.int64, device=points.device))
            for _ in range(_ODI_STEPS):
                _, gradient = target.ascend(view, points, anything)
                points = norm.project(points + eps * norm.step(gradient, points), images, eps)
        return points

    def _move(self, points: Tensor, gradient: Tensor, images: Tensor, step: int) -> Tensor:
        norm = NORMS[self.norm]
        moved = points + self.step_length(step) * norm.step(gradient, points)
        return norm.project(moved, images, self.radius)

    def step_length(self, step: int) -> float:
        """Length of a step, on the [0, 1] scale. Steps are numbered from 0."""
        return parse_eps(self.step_size) * _SCHEDULES[self.schedule](step / max(1, self.steps))


@dataclass(frozen=True, eq=False, kw_only=True)
class _WeightedScores(View):
    """The scores times random weights, the same for an image at every step.

    The scores are those of the given view, or the model's if that is no `ScoreView`.
    """

    name: str = "weighted scores"
    view: View
    draws: Draws

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        view = self.view if isinstance(self.view, ScoreView) else SCORES
        read, own = view.read(model, images)
        weights = 2 * self.draws.uniform(read.shape[1], dtype=read.dtype) - 1
        return Look((weights * read).sum(dim=1), own)


@dataclass(kw_only=True)
class _PGDState(Rows):
    """State of one search from one start.

    Attributes:
        points: the current iterates.
        best, best_losses: for each image the broken point, or without one the point of the highest loss, and its loss.
    """

    results: ClassVar[tuple[str, ...]] = ("broken", "best", "best_losses")
    images: Tensor
    labels: Tensor
    goals: Tensor | None
    points: Tensor
    best: Tensor
    best_losses: Tensor

    def note(self, look: Look, early_exit: bool) -> None:
        """Keeps the first broken point of each image, or without early exit the broken one of the highest loss.

        While no point is broken, it keeps the one of the highest loss.
        """
        losses = look.losses.to(self.best_losses.dtype)
        now = torch.zeros_like(self.broken)
        if look.scores is not None:
            now = predicted_classes(look.scores) != self.labels
        wins = (now & ~self.broken) | ((now == self.broken) & (losses > self.best_losses))
        if early_exit:  # the result must not depend on when a broken row is dropped
            wins = wins & ~self.broken
        self.best = torch.where(per_image(wins, self.best), self.points, self.best)
        self.best_losses = torch.where(wins, losses, self.best_losses)
        self.broken = self.broken | now


@dataclass(frozen=True, kw_only=True)
class BIM(PGD):
    """The basic iterative method (Kurakin et al. 2017): PGD with cross-entropy from the image itself.

    Departs: the paper prints a clipped perturbation and the gradient at the image. Here, as in the original, the whole
        iterate is clipped and the gradient is taken at the iterate.
    """

    loss: Loss = "cross_entropy"
    start: Literal["uniform", "image", "odi"] = "image"


@dataclass(frozen=True, kw_only=True)
class FGSM(BIM):
    """The fast gradient sign method (Goodfellow et al. 2015): one step of length eps from the image."""

    steps: int = field(default=1, init=False)
    step_size: float | str = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "step_size", self.eps)
        super().__post_init__()
