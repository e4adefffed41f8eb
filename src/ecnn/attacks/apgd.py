"""Auto-PGD: a gradient attack that finds its own step size (Croce & Hein 2020)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ecnn.attacks.base import Attack, Target
from ecnn.attacks.draws import Draws
from ecnn.attacks.images import per_image
from ecnn.attacks.norms import NORMS, Norm
from ecnn.attacks.turns import Rows, Turn, advance_rows, best_wrong_classes, take_turns
from ecnn.attacks.views import Look, Loss, LossFunction, View, make_view
from ecnn.checks import check_choice, parse_eps
from ecnn.errors import InputError

_MOMENTUM = 0.75  # the paper's alpha, the share of a step that is new
_RISES_WANTED = 0.75  # the paper's rho
_STREAM = 11  # so that other attacks with the same seed start elsewhere


def checkpoints(steps: int) -> tuple[int, ...]:
    """After how many steps the step size is reviewed: 0, then 22 % of them, another 19 %, 16 %, ... never below 6 %."""
    shares, width = [0], 22
    while shares[-1] + width <= 100:
        shares.append(shares[-1] + width)
        width = max(width - 3, 6)
    return tuple(dict.fromkeys(-(-share * steps // 100) for share in shares))


@dataclass(frozen=True, kw_only=True)
class APGD(Attack):
    """Auto-PGD (Croce & Hein 2020): PGD with momentum whose step, 2 eps at first, is halved image by image.

    It is halved at a checkpoint when fewer than three quarters of the steps since the last one raised the loss, or when
    the best loss did not rise at all and the step was not halved last time; the search goes on from the best point.
    With keep="last" the point of the highest loss is returned, which is the paper's output.

    Attributes:
        norm: of the ball and of the steps, "linf" or "l2".
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        steps: of each start; 100 in AutoAttack.
        loss: "cross_entropy", "dlr" (free of the scale of the scores; needs 3 classes, 4 with targets) or "margin".
        targets: 0 moves away from the label; k moves to each of the k best wrong classes in turn (APGD-T; 9 in
            AutoAttack), or to all if there are fewer.
        restarts: independent uniform starts.
        on: where it looks, a name of `VIEWS` or a callable (model, images, labels) -> (batch,) loss to raise.

    Departs: the authors' program scales to the L2 ball and then cuts to [0, 1]; this is the projection onto both that
        the paper asks for. Their program compares the first loss after a review with the last before it, ours with
        that of the point the search went on from, as printed.
    """

    norm: Norm
    eps: float | str
    steps: int
    loss: Loss
    targets: int = 0
    restarts: int = 1
    on: str | LossFunction = "scores"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("norm", self.norm, NORMS)
        parse_eps(self.eps)
        make_view(self.on, self.loss)
        for name, least in (("steps", 1), ("restarts", 1), ("targets", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be from {least} up, not {getattr(self, name)}.")
        if self.keep == "last" and (self.restarts > 1 or self.targets):
            raise InputError('keep="last" returns one point, so it takes one start and no targets.')
        if self.targets and callable(self.on):
            raise InputError("a loss function of your own has no targets: name a view, or use targets=0.")

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        if parse_eps(self.eps) == 0:
            return images.clone()
        goals: list[Tensor | None] = [None]
        if self.targets:
            goals = list(best_wrong_classes(target.scores(images), labels, self.targets).unbind(dim=1))
        draws = draws.fold(_STREAM)

        def turn_of(start: int, rank: int, goal: Tensor | None) -> Turn:
            def turn(part: Target, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                own_draws = draws.fold(start).fold(rank + 1 if self.targets else 0).take(rows)
                own_goal = None if goal is None else goal[rows]
                return self._climb(part, images[rows], labels[rows], own_goal, own_draws)

            return turn

        turns = (
            turn_of(start, rank, goal)
            for start, (rank, goal) in itertools.product(range(self.restarts), enumerate(goals))
        )
        return take_turns(turns, target, images, early_exit=self._drops_rows)

    @property
    def _drops_rows(self) -> bool:
        return self.early_exit and self.keep == "best"

    def _climb(
        self, target: Target, images: Tensor, labels: Tensor, goals: Tensor | None, draws: Draws
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One start: the point kept for each image, whether it is broken, and the loss there."""
        view, eps = make_view(self.on, self.loss), parse_eps(self.eps)
        widths = {now: now - before for before, now in itertools.pairwise(checkpoints(self.steps))}
        points = NORMS[self.norm].random(images, eps, draws)
        look, gradient = target.ascend(view, points, labels, goals)
        climb = _start_climb(images, labels, goals, points, look, gradient, 2 * eps)

        def advance(part: Target, climb: _Climb, step: int) -> None:
            climb.move(self.norm, eps, share=_MOMENTUM if step else 1.0)
            climb.look_around(part, view, last=step == self.steps - 1)
            if step + 1 in widths:
                climb.review(widths[step + 1])

        climb = advance_rows(target, climb, self.steps, advance, early_exit=self._drops_rows)
        if self.keep == "last":
            return climb.best, torch.zeros_like(climb.broken), climb.best_losses
        if look.scores is None:
            # The view does not find out what the model says, so that it is asked in the end.
            broken = target.scores(climb.best).argmax(dim=1) != labels
            return climb.best, broken, climb.best_losses
        points = torch.where(per_image(climb.broken, images), climb.found, climb.best)
        return points, climb.broken, torch.where(climb.broken, climb.found_losses, climb.best_losses)


@dataclass(kw_only=True)
class _Climb(Rows):
    """Where one start of APGD stands; every tensor belongs to the images that are left.

    Attributes:
        points, previous, gradient, losses: the iterate, the one before it, and what is known at the iterate.
        best, best_gradient, best_losses: the point of the highest loss so far.
        found, found_losses: of the broken points, the one of the highest loss.
        step_sizes: (batch,).
        rises: (batch,) steps since the last review that raised the loss.
        reviewed_losses, halved: (batch,) the highest loss at the last review, and whether the step was halved there.
    """

    results: ClassVar[tuple[str, ...]] = ("broken", "best", "best_losses", "found", "found_losses")
    images: Tensor
    labels: Tensor
    goals: Tensor | None
    points: Tensor
    previous: Tensor
    gradient: Tensor
    losses: Tensor
    best: Tensor
    best_gradient: Tensor
    best_losses: Tensor
    found: Tensor
    found_losses: Tensor
    step_sizes: Tensor
    rises: Tensor
    reviewed_losses: Tensor
    halved: Tensor

    def move(self, norm: Norm, eps: float, share: float) -> None:
        """One step up the gradient, mixed with the move before it."""
        stepped = self.points + per_image(self.step_sizes, self.points) * NORMS[norm].steepest(self.gradient)
        moved = NORMS[norm].nearest(stepped, self.images, eps)
        if share < 1:
            mixed = self.points + share * (moved - self.points) + (1 - share) * (self.points - self.previous)
            moved = NORMS[norm].nearest(mixed, self.images, eps)
        self.previous, self.points = self.points, moved

    def look_around(self, target: Target, view: View, *, last: bool) -> None:
        """Asks the model about the new point and remembers what is better than before."""
        if last:
            look, gradient = target.look(view, self.points, self.labels, self.goals), self.gradient
        else:
            look, gradient = target.ascend(view, self.points, self.labels, self.goals)
        losses = look.losses.to(self.losses.dtype)
        self.rises = self.rises + (losses > self.losses)
        self.losses, self.gradient = losses, gradient
        higher = losses > self.best_losses
        self.best = torch.where(per_image(higher, gradient), self.points, self.best)
        self.best_gradient = torch.where(per_image(higher, gradient), gradient, self.best_gradient)
        self.best_losses = torch.where(higher, losses, self.best_losses)
        self.note_broken(look)

    def note_broken(self, look: Look) -> None:
        if look.scores is None:
            return
        broken = look.scores.argmax(dim=1) != self.labels
        better = broken & (~self.broken | (self.losses > self.found_losses))
        self.found = torch.where(per_image(better, self.found), self.points, self.found)
        self.found_losses = torch.where(better, self.losses, self.found_losses)
        self.broken = self.broken | broken

    def review(self, width: int) -> None:
        """Halves the step sizes of the images that make no headway and takes these back to their best point."""
        stuck = ~self.halved & (self.best_losses <= self.reviewed_losses)
        self.halved = stuck | (self.rises < _RISES_WANTED * width)
        self.step_sizes = torch.where(self.halved, self.step_sizes / 2, self.step_sizes)
        back = per_image(self.halved, self.points)
        self.points = torch.where(back, self.best, self.points)
        self.gradient = torch.where(back, self.best_gradient, self.gradient)
        self.losses = torch.where(self.halved, self.best_losses, self.losses)
        self.reviewed_losses, self.rises = self.best_losses, torch.zeros_like(self.rises)


def _start_climb(
    images: Tensor,
    labels: Tensor,
    goals: Tensor | None,
    points: Tensor,
    look: Look,
    gradient: Tensor,
    step: float,
) -> _Climb:
    losses, never = look.losses.to(images.dtype), torch.zeros_like(labels, dtype=torch.bool)
    climb = _Climb(
        images=images,
        labels=labels,
        goals=goals,
        points=points,
        previous=points,
        gradient=gradient,
        losses=losses,
        best=points,
        best_gradient=gradient,
        best_losses=losses,
        found=points,
        found_losses=torch.full_like(losses, -math.inf),
        step_sizes=torch.full_like(losses, step),
        rises=torch.zeros_like(labels),
        reviewed_losses=losses,
        halved=~never,  # the first review asks only how often the loss rose
        broken=never,
    )
    climb.note_broken(look)
    return climb
