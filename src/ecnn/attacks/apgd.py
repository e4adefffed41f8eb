"""Auto-PGD: a gradient attack that finds its own step size (Croce & Hein 2020)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ecnn.attacks.attempts import Attempts, Rows, best_wrong_classes, iterate_rows
from ecnn.attacks.ball import Norm, check_norm, per_image, random_start, steepest
from ecnn.attacks.base import Attack, Cost, Target
from ecnn.attacks.draws import Draws
from ecnn.attacks.projections import project_to_ball
from ecnn.attacks.views import Look, Loss, LossFunction, View, find_view
from ecnn.checks import check_count, parse_eps
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
        on: where it looks, a name of `VIEWS`, a `View`, or a loss (model, images, labels) -> (batch,) of your own.

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
    on: str | View | LossFunction = "scores"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_norm(self.norm)
        parse_eps(self.eps)
        find_view(self.on).check_loss(self.loss)
        check_count("steps", self.steps)
        check_count("restarts", self.restarts)
        check_count("targets", self.targets, least=0)
        if self.keep == "last" and (self.restarts > 1 or self.targets):
            raise InputError('keep="last" returns one point, so it takes one start and no targets.')
        if self.targets and not find_view(self.on).has_goals:
            raise InputError("this loss has no targets: look elsewhere (on=), or use targets=0.")

    def cost(self, num_classes: int) -> Cost:
        climbs = self.restarts * max(1, min(self.targets, num_classes - 1))
        passes = climbs * find_view(self.on).passes_per_look
        return Cost(2 + passes * (self.steps + 1), passes * self.steps)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        if parse_eps(self.eps) == 0:
            return images.clone()
        goals: list[Tensor | None] = [None]
        if self.targets:
            goals = list(best_wrong_classes(target.scores(images), labels, self.targets).unbind(dim=1))
        draws = draws.fold(_STREAM)
        attempts = Attempts(target, images, early_exit=self._drops_rows)
        settings = itertools.product(range(self.restarts), enumerate(goals))
        for (start, (rank, goal)), part, rows in attempts.each(settings):
            own_draws = draws.fold(start).fold(rank + 1 if self.targets else 0).take(rows)
            own_goals = None if goal is None else goal[rows]
            attempts.keep(*self._climb(part, images[rows], labels[rows], own_goals, own_draws))
        return attempts.points

    def _climb(
        self, target: Target, images: Tensor, labels: Tensor, goals: Tensor | None, draws: Draws
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One start: the point kept for each image, whether it is broken, and the loss there."""
        view, eps = find_view(self.on), parse_eps(self.eps)
        widths = {now: now - before for before, now in itertools.pairwise(checkpoints(self.steps))}
        points = random_start(images, self.norm, eps, draws)
        look, gradient = target.ascend(view, points, labels, goals, loss=self.loss)
        whole = _start(images, labels, goals, points, look, gradient, 2 * eps)
        for step, part, state in iterate_rows(target, whole, self.steps, early_exit=self._drops_rows):
            state.move(self.norm, eps, share=_MOMENTUM if step else 1.0)
            state.look_around(part, view, self.loss, last=step == self.steps - 1)
            if step + 1 in widths:
                state.review(widths[step + 1])
        if self.keep == "last":
            return whole.best, torch.zeros_like(whole.broken), whole.best_losses
        if look.scores is None:
            # The view does not find out what the model says, so that it is asked in the end.
            broken = target.scores(whole.best).argmax(dim=1) != labels
            return whole.best, broken, whole.best_losses
        points = torch.where(per_image(whole.broken, images), whole.found, whole.best)
        return points, whole.broken, torch.where(whole.broken, whole.found_losses, whole.best_losses)


@dataclass(kw_only=True)
class _APGDState(Rows):
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
        stepped = self.points + per_image(self.step_sizes, self.points) * steepest(self.gradient, norm)
        moved = project_to_ball(stepped, self.images, norm, eps)
        if share < 1:
            mixed = self.points + share * (moved - self.points) + (1 - share) * (self.points - self.previous)
            moved = project_to_ball(mixed, self.images, norm, eps)
        self.previous, self.points = self.points, moved

    def look_around(self, target: Target, view: View, loss: Loss, *, last: bool) -> None:
        """Asks the model about the new point and remembers what is better than before."""
        where = (view, self.points, self.labels, self.goals)
        if last:
            look, gradient = target.look(*where, loss=loss), self.gradient
        else:
            look, gradient = target.ascend(*where, loss=loss)
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


def _start(
    images: Tensor,
    labels: Tensor,
    goals: Tensor | None,
    points: Tensor,
    look: Look,
    gradient: Tensor,
    step: float,
) -> _APGDState:
    losses, never = look.losses.to(images.dtype), torch.zeros_like(labels, dtype=torch.bool)
    state = _APGDState(
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
    state.note_broken(look)
    return state
