"""Gradient attacks in a ball: FGSM, BIM, PGD."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ecnn.attacks.ball import Norm, check_norm, parse_eps, per_image, project, random_start, steepest
from ecnn.attacks.base import Attack, Target
from ecnn.attacks.draws import Draws
from ecnn.attacks.views import Look, Loss, LossFunction, View, make_view, read_scores
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
        norm: of the ball and of the steps, "linf" or "l2".
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
        check_norm(self.norm)
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
        points, broken = images.clone(), torch.zeros_like(labels, dtype=torch.bool)
        rows = torch.arange(len(images), device=images.device)
        for start in range(self.restarts):
            for rank in range(max(1, self.targets)):
                part = target.narrow(rows) if self.early_exit else target
                goals = self._goals(part, images[rows], labels[rows], rank)
                found, won = _Climb(
                    self, part, images[rows], labels[rows], goals, draws.take(rows).fold(start)
                ).run()
                points[rows] = torch.where(per_image(won & ~broken[rows], found), found, points[rows])
                broken[rows] |= won
                if self.early_exit:
                    rows = torch.nonzero(~broken).squeeze(1)
                    if not len(rows):
                        return points
        return points

    def _goals(self, target: Target, images: Tensor, labels: Tensor, rank: int) -> Tensor | None:
        """(batch,) the best wrong class of the clean image, the second best, and so on."""
        if not self.targets:
            return None
        scores = target.scores(images).scatter(1, labels[:, None], -math.inf)
        return scores.topk(min(rank + 1, scores.shape[1] - 1), dim=1).indices[:, -1]

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
        eps = parse_eps(self.eps)
        if self.start == "image":
            return images.clone()
        points = random_start(images, self.norm, eps, draws)
        if self.start == "odi":
            classes = target.scores(points[:1]).shape[1] if len(points) else 2
            weights = 2 * draws.fold(7).uniform(classes, dtype=points.dtype) - 1
            view = _weighted_scores(weights, self.on)
            for _ in range(_ODI_STEPS):
                _, gradient = target.ascend(view, points, torch.zeros_like(points[:, 0, 0, 0]).long())
                points = project(points + eps * steepest(gradient, self.norm), images, self.norm, eps)
        return points

    def _move(self, points: Tensor, gradient: Tensor, images: Tensor, step: int) -> Tensor:
        length = parse_eps(self.step_size) * _SCHEDULES[self.schedule](step / max(1, self.steps))
        return project(
            points + length * steepest(gradient, self.norm), images, self.norm, parse_eps(self.eps)
        )


def _weighted_scores(weights: Tensor, on: str | LossFunction) -> View:
    """A random direction in score space, the same for an image at every step."""
    place = on if on in ("scores", "linear", "tempered") else "scores"

    def view(model: torch.nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
        read, own = read_scores(model, images, str(place))
        return Look((weights.to(read.dtype) * read).sum(dim=1), own)

    return view


class _Climb:
    """One start of PGD that remembers, for each image, the first broken iterate, or else the highest loss.

    Without early exit a later broken iterate with a higher loss replaces the first: it is further from the border.
    """

    def __init__(
        self, attack: PGD, target: Target, images: Tensor, labels: Tensor, goals: Tensor | None, draws: Draws
    ) -> None:
        self.attack, self.target, self.images, self.labels, self.goals = attack, target, images, labels, goals
        self.points = attack._first(target, images, draws)
        self.best = self.points.clone()
        self.best_losses = torch.full(images.shape[:1], -math.inf, device=images.device, dtype=images.dtype)
        self.broken = torch.zeros_like(labels, dtype=torch.bool)
        self.whole_best, self.whole_broken = self.best, self.broken
        self.rows = torch.arange(len(images), device=images.device)
        self.has_scores = True

    def run(self) -> tuple[Tensor, Tensor]:
        """(batch, ...) the point kept for each image, and whether the model misclassifies it."""
        view = self.attack._view()
        for step in range(self.attack.steps):
            look, gradient = self.target.ascend(view, self.points, self.labels, self.goals)
            self._note(look)
            self.points = self.attack._move(self.points, gradient, self.images, step)
            if self.attack.early_exit and self._compact(step):
                break
        if len(self.rows):
            self._note(self.target.look(view, self.points, self.labels, self.goals))
            if not self.has_scores:
                self.broken = self.target.scores(self.best).argmax(dim=1) != self.labels
        self._store()
        return self.whole_best, self.whole_broken

    def _note(self, look: Look) -> None:
        if look.scores is None:
            self.has_scores = False
            now = torch.zeros_like(self.broken)
        else:
            now = look.scores.argmax(dim=1) != self.labels
        higher = look.losses > self.best_losses
        if self.attack.early_exit:
            wins = ~self.broken & (now | higher)
        else:
            wins = (now & ~self.broken) | ((now == self.broken) & higher)
        self.best = torch.where(per_image(wins, self.best), self.points, self.best)
        self.best_losses = torch.where(wins, look.losses.to(self.best_losses.dtype), self.best_losses)
        self.broken = self.broken | now

    def _compact(self, step: int) -> bool:
        """Drops broken rows when there are enough of them; True when none is left."""
        if self.images.is_cuda and step % 10:
            return False  # counting makes the device wait
        alive = int((~self.broken).sum())
        if alive == 0:
            self._store()
            self.rows = self.rows[:0]
            return True
        if alive <= 0.75 * len(self.rows):
            self._store()
            kept = torch.nonzero(~self.broken).squeeze(1)
            self.target, self.rows = self.target.narrow(kept), self.rows[kept]
            self.points, self.images, self.labels = self.points[kept], self.images[kept], self.labels[kept]
            self.goals = None if self.goals is None else self.goals[kept]
            self.best, self.best_losses, self.broken = (
                self.best[kept],
                self.best_losses[kept],
                self.broken[kept],
            )
        return False

    def _store(self) -> None:
        if len(self.rows) == len(self.whole_broken):
            self.whole_best, self.whole_broken = self.best, self.broken
        else:
            self.whole_best[self.rows], self.whole_broken[self.rows] = self.best, self.broken


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
