"""Gradient attacks in a ball: FGSM, BIM, PGD."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ecnn.attacks.base import Attack, Target
from ecnn.attacks.draws import Draws
from ecnn.attacks.images import per_image
from ecnn.attacks.norms import NORMS, Norm
from ecnn.attacks.turns import Rows, Turn, advance_rows, best_wrong_classes, take_turns
from ecnn.attacks.views import SCORE_VIEWS, Look, Loss, LossFunction, View, make_view, read_scores
from ecnn.checks import check_choice, parse_eps
from ecnn.errors import InputError

_ODI_STEPS = 2
_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


@dataclass(frozen=True, kw_only=True)
class PGD(Attack):
    """Projected gradient descent (Madry et al. 2018): steps up the gradient, projected to the ball.

    Called with a generator inside a training step it can be captured in a CUDA graph: then no shape and no branch
    depends on the data.

    Attributes:
        norm: of the ball and of the steps, a name of `NORMS`. In L1 a step moves 1 % of the pixels.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        steps: gradient steps of each start.
        step_size: length of each, on the [0, 1] scale.
        loss: "margin" (best wrong score minus true score), "cross_entropy" or "dlr" (Croce & Hein's, free of scale).
        on: where it looks, a name of `VIEWS` or a callable (model, images, labels) -> (batch,) loss to raise.
        loss_slack: the margin is not pushed beyond this, the paper's c.
        start: a "uniform" point of the ball, the "image", or a point that the scores disperse to from a uniform one
            ("odi", Tashiro et al. 2020).
        restarts: independent starts; with "image" only the first one differs from nothing.
        targets: 0 moves away from the label; k tries each of the k best wrong classes in turn, from every start.
        schedule: the step size stays ("constant") or falls to zero ("linear", "cosine").
    """

    norm: Norm
    eps: float | str
    steps: int
    step_size: float | str
    loss: Loss = "margin"
    on: str | LossFunction = "scores"
    loss_slack: float = math.inf
    start: Literal["uniform", "image", "odi"] = "uniform"
    restarts: int = 1
    targets: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("norm", self.norm, NORMS)
        for length in (self.eps, self.step_size):
            parse_eps(length)
        make_view(self.on, self.loss, self.loss_slack)
        for name, least in (("steps", 0), ("restarts", 1), ("targets", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be from {least} up, not {getattr(self, name)}.")
        for name, known in (("start", ("uniform", "image", "odi")), ("schedule", tuple(_SCHEDULES))):
            if getattr(self, name) not in known:
                raise InputError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}.")
        if self.keep == "last" and (self.restarts > 1 or self.targets):
            raise InputError('keep="last" returns one iterate, so it takes one start and no targets.')
        if self.targets and callable(self.on):
            raise InputError("a loss function of your own has no targets: name a view, or use targets=0.")

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        if self.keep == "last":
            return self._last_iterate(target, images, labels, draws.fold(0))
        goals: list[Tensor | None] = [None]
        if self.targets:
            goals = list(best_wrong_classes(target.scores(images), labels, self.targets).unbind(dim=1))

        def turn_of(start: int, goal: Tensor | None) -> Turn:
            def turn(part: Target, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                own_goal = None if goal is None else goal[rows]
                return self._climb(part, images[rows], labels[rows], own_goal, draws.fold(start).take(rows))

            return turn

        turns = (turn_of(start, goal) for start in range(self.restarts) for goal in goals)
        return take_turns(turns, target, images, early_exit=self.early_exit)

    def _climb(
        self, target: Target, images: Tensor, labels: Tensor, goals: Tensor | None, draws: Draws
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One start: the point kept for each image, whether it is broken, and the loss there."""
        view, points = self._view(), self._first(target, images, draws)
        climb = _Climb(
            images=images,
            labels=labels,
            goals=goals,
            points=points,
            best=points,
            best_losses=torch.full(images.shape[:1], -math.inf, device=images.device, dtype=images.dtype),
            broken=torch.zeros_like(labels, dtype=torch.bool),
        )

        def advance(part: Target, climb: _Climb, step: int) -> None:
            if step == self.steps:
                climb.note(part.look(view, climb.points, climb.labels, climb.goals), self.early_exit)
                return
            look, gradient = part.ascend(view, climb.points, climb.labels, climb.goals)
            climb.note(look, self.early_exit)
            climb.points = self._move(climb.points, gradient, climb.images, step)

        climb = advance_rows(target, climb, self.steps + 1, advance, early_exit=self.early_exit)
        if callable(self.on):  # the view did not find out what the model says, so that it is asked in the end
            climb.broken = target.scores(climb.best).argmax(dim=1) != labels
        return climb.best, climb.broken, climb.best_losses

    def _last_iterate(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        view = self._view()
        points = self._first(target, images, draws)
        for step in range(self.steps):
            _, gradient = target.ascend(view, points, labels)
            points = self._move(points, gradient, images, step)
        return points

    def _view(self) -> View:
        return make_view(self.on, self.loss, self.loss_slack)

    def _first(self, target: Target, images: Tensor, draws: Draws) -> Tensor:
        eps, norm = parse_eps(self.eps), NORMS[self.norm]
        if self.start == "image":
            return images.clone()
        points = norm.random(images, eps, draws)
        if self.start == "odi":
            view = _weighted_scores(draws.fold(7), self.on)
            anything = torch.zeros(len(points), dtype=torch.int64, device=points.device)
            for _ in range(_ODI_STEPS):
                _, gradient = target.ascend(view, points, anything)
                points = norm.project(points + eps * norm.step(gradient, points), images, eps)
        return points

    def _move(self, points: Tensor, gradient: Tensor, images: Tensor, step: int) -> Tensor:
        length = parse_eps(self.step_size) * _SCHEDULES[self.schedule](step / max(1, self.steps))
        norm = NORMS[self.norm]
        return norm.project(points + length * norm.step(gradient, points), images, parse_eps(self.eps))


def _weighted_scores(draws: Draws, on: str | LossFunction) -> View:
    """A random direction in score space, the same for an image at every step."""
    place = on if on in SCORE_VIEWS else "scores"

    def view(model: torch.nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
        read, own = read_scores(model, images, str(place))
        weights = 2 * draws.uniform(read.shape[1], dtype=read.dtype) - 1
        return Look((weights * read).sum(dim=1), own)

    return view


@dataclass(kw_only=True)
class _Climb(Rows):
    """Where one start of PGD stands.

    Attributes:
        best, best_losses: of each image the broken point, or else the one of the highest loss.
    """

    results: ClassVar[tuple[str, ...]] = ("broken", "best", "best_losses")
    images: Tensor
    labels: Tensor
    goals: Tensor | None
    points: Tensor
    best: Tensor
    best_losses: Tensor

    def note(self, look: Look, early_exit: bool) -> None:
        """Remembers the first broken point, or without early exit the broken one of the highest loss."""
        losses = look.losses.to(self.best_losses.dtype)
        now = torch.zeros_like(self.broken)
        if look.scores is not None:
            now = look.scores.argmax(dim=1) != self.labels
        wins = (now & ~self.broken) | ((now == self.broken) & (losses > self.best_losses))
        if early_exit:  # whenever a broken row is dropped, it has the same result
            wins = wins & ~self.broken
        self.best = torch.where(per_image(wins, self.best), self.points, self.best)
        self.best_losses = torch.where(wins, losses, self.best_losses)
        self.broken = self.broken | now


@dataclass(frozen=True, kw_only=True)
class BIM(PGD):
    """The basic iterative method (Kurakin et al. 2017): PGD with cross-entropy from the image itself.

    Departs: the paper prints a clipped perturbation and the gradient at the image; as in the original, the whole
        iterate is clipped and the gradient taken there.
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
