"""Auto-PGD (Croce & Hein 2020): PGD that adapts its step size, and in L1 also how many pixels a step moves."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ecnn.attacks.attempts import Attempts, ClimbingAttack, Rows, iterate_rows, spread
from ecnn.attacks.base import Cost, Target
from ecnn.attacks.images import per_image
from ecnn.attacks.norms import NORMS, Norm, share_step
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import Aim, Look, Loss, View, find_view
from ecnn.checks import check_count
from ecnn.objectives import predicted_classes

_MOMENTUM = 0.75  # the paper's alpha: weight of the new step, the rest is the previous move
_RISES_WANTED = 0.75  # the paper's rho
_WIDE = (3, 2)  # radii of the wider balls of a wide start, in units of eps
_WIDE_SHARE = 30  # per cent of the steps spent in each of them
_SPARSE_DIVISOR, _SPARSE_LEAST = 1.5, 0.1  # L1 steps shrink by this divisor, to this many eps at least
_FEWER = 0.95  # an L1 step is eps again if the best point changes less than this share of the pixels before
_STREAM = 11  # own random stream, so that other attacks with the same seed start elsewhere


def checkpoints(steps: int) -> tuple[int, ...]:
    """After how many steps the step size is reviewed: 0, then 22 % of all, 19 % more, 16 % more, ... at least 6 %."""
    shares, width = [0], 22
    while shares[-1] + width <= 100:
        shares.append(shares[-1] + width)
        width = max(width - 3, 6)
    return tuple(dict.fromkeys(-(-share * steps // 100) for share in shares))


@dataclass(frozen=True, kw_only=True)
class APGD(ClimbingAttack):
    """Auto-PGD (Croce & Hein 2020): PGD with momentum and a step size that starts at 2 eps and is halved per image.

    At checkpoints an image's step is halved if fewer than three quarters of the steps since the last one raised the
    loss, or if the best loss did not rise at all and the step was not halved at the last one. The search then goes on
    from the best point. With keep="last" the point of the highest loss is returned, which is the paper's output.

    In L1 (Croce & Hein 2021) there is no momentum. A step, of length eps at first, moves only the pixels of the largest
    gradients: two thirds as many as the best point changes. After every 4 % of the steps the step shrinks to two
    thirds, but not below eps / 10. If the best point now changes fewer pixels than before, the step is eps again and
    the search goes on from the best point.

    Attributes:
        norm: of the ball and of the steps, a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        steps: gradient steps from each start; 100 in AutoAttack.
        loss: "cross_entropy", "dlr" (scale of the scores has no effect; needs 3 classes, 4 with targets) or "margin".
        targets: 0 moves away from the label; k moves to each of the k best wrong classes in turn (APGD-T; 9 in
            AutoAttack), or to all if there are fewer.
        restarts: how many random starts: uniform points of the ball; in L1 Gaussian noise projected onto the ball,
            which changes few pixels.
        wide_start: 30 % of the steps are made in a ball of three times the radius, then 30 % in one of twice the
            radius, the rest in the ball itself. Each part starts at the best point of the one before. The default is
            True in L1 and False in other norms, as published.
        on: the view that is attacked: a name of `VIEWS`, a `View`, or a loss of your own, (model, images, labels) ->
            (batch,).

    Departs: the authors' program scales to the L2 ball and then cuts to [0, 1]; this is the projection onto both that
        the paper asks for. Their program compares the first loss after a review with the last before it; this compares
        it with the loss of the point the search went on from, as printed. In L1 a pixel at 0 or 1 that a step would
        move out of [0, 1] takes no part in it, and the number of pixels is rounded down: rounded up, it would never
        fall from two to one.
    """

    wide_start: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("steps", self.steps)

    def cost(self, num_classes: int) -> Cost:
        passes = self.num_climbs(num_classes) * find_view(self.on).passes_per_look
        return Cost(2 + passes * (self.steps + len(self._stages())), passes * self.steps)

    def _stages(self) -> list[tuple[float, int]]:
        """(radius, steps) of each ball that a start searches, the widest first."""
        eps, wide_steps = self.radius, self.steps * _WIDE_SHARE // 100
        is_wide = _state_for(self.norm).wide_start if self.wide_start is None else self.wide_start
        if not (is_wide and wide_steps):
            return [(eps, self.steps)]
        wide = [(factor * eps, wide_steps) for factor in _WIDE]
        return [*wide, (eps, self.steps - wide_steps * len(wide))]

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        if self.radius == 0:
            return images.clone()
        goals = self.goals(target, images, labels)
        draws = draws.fold(_STREAM)
        attempts = Attempts(target, images, early_exit=self._drops_rows)
        settings = [
            (draws.fold(start).fold(rank + 1 if self.targets else 0), goal)
            for start, (rank, goal) in itertools.product(range(self.restarts), enumerate(goals))
        ]
        for several, part, rows in attempts.several(settings):
            own_draws, own_goals = spread(several, rows)
            attempts.keep(*self.climb(part, images[rows], labels[rows], own_goals, own_draws))
        return attempts.points

    def climb(
        self, target: Target, images: Tensor, labels: Tensor, goals: Tensor | None, draws: Draws
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One start: the best point of each image, (batch,) whether it is broken, and its loss.

        A point is best if it is broken, and among broken or unbroken ones if its loss is highest. With keep="last" the
        point of the highest loss is returned, and none counts as broken.

        Args:
            goals: (batch,) the wrong class of each image to move to; None moves away from the label.
        """
        stages, norm = self._stages(), NORMS[self.norm]
        points = _state_for(self.norm).first(images, self.norm, stages[0][0], draws)
        for (radius, steps), (next_radius, _) in itertools.pairwise(stages):
            wide, _ = self._ascend(target, images, labels, goals, points, radius, steps, early_exit=False)
            points = norm.nearest(wide.best, images, next_radius)
        eps, steps = stages[-1]
        early_exit = self._drops_rows
        whole, look = self._ascend(target, images, labels, goals, points, eps, steps, early_exit=early_exit)
        if self.keep == "last":
            return whole.best, torch.zeros_like(whole.broken), whole.best_losses
        if look.scores is None:
            # The view returns no scores: one more pass finds out what is broken.
            broken = predicted_classes(target.scores(whole.best)) != labels
            return whole.best, broken, whole.best_losses
        points = torch.where(per_image(whole.broken, images), whole.found, whole.best)
        return points, whole.broken, torch.where(whole.broken, whole.found_losses, whole.best_losses)

    def _ascend(
        self,
        target: Target,
        images: Tensor,
        labels: Tensor,
        goals: Tensor | None,
        points: Tensor,
        eps: float,
        steps: int,
        *,
        early_exit: bool,
    ) -> tuple[_APGDState, Look]:
        """The state after a search in the ball of radius `eps`, and the look at its first points."""
        view, kind = find_view(self.on), _state_for(self.norm)
        widths = {now: now - before for before, now in itertools.pairwise(kind.checkpoints(steps))}
        look, gradient = target.ascend(view, points, Aim(labels, goals, self.loss))
        whole = _start(kind, images, labels, goals, points, look, gradient, eps)
        for step, part, state in iterate_rows(target, whole, steps, early_exit=early_exit):
            state.move(self.norm, eps, share=_MOMENTUM if step else 1.0)
            state.look_around(part, view, self.loss, last=step == steps - 1)
            if step + 1 in widths:
                state.review(widths[step + 1], eps)
        return whole, look


@dataclass(kw_only=True)
class _APGDState(Rows):
    """State of one search from one start; in L1 a `_SparseState`.

    Attributes:
        points, previous: the iterate and the one before it.
        gradient, losses: at the iterate.
        best, best_gradient, best_losses: the point of the highest loss so far, with its gradient and loss.
        found, found_losses: the broken point of the highest loss, and its loss.
        step_sizes: (batch,) current step lengths, on the [0, 1] scale.
        rises: (batch,) steps since the last review that raised the loss.
        reviewed_losses, halved: (batch,) the highest loss at the last review, and whether the step was halved there.
        changed: (batch,) pixel values in which the best point differed from the image at the last review; for L1.
        first_step: length of the first step, in units of the radius.
        wide_start: whether wider balls are searched first by default.
    """

    first_step: ClassVar[float] = 2.0
    wide_start: ClassVar[bool] = False

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
    changed: Tensor

    @staticmethod
    def first(images: Tensor, norm: Norm, eps: float, draws: Draws) -> Tensor:
        return NORMS[norm].random(images, eps, draws)

    @staticmethod
    def checkpoints(steps: int) -> tuple[int, ...]:
        return checkpoints(steps)

    def move(self, norm: Norm, eps: float, share: float) -> None:
        """One projected step up the gradient; with `share` below 1 mixed with the previous move (momentum)."""
        stepped = self.points + per_image(self.step_sizes, self.points) * NORMS[norm].steepest(self.gradient)
        moved = NORMS[norm].nearest(stepped, self.images, eps)
        if share < 1:
            mixed = self.points + share * (moved - self.points) + (1 - share) * (self.points - self.previous)
            moved = NORMS[norm].nearest(mixed, self.images, eps)
        self.previous, self.points = self.points, moved

    def look_around(self, target: Target, view: View, loss: Loss, *, last: bool) -> None:
        """Evaluates the new points and updates the best and the broken ones; the last look takes no gradient."""
        aim = Aim(self.labels, self.goals, loss)
        if last:
            look, gradient = target.look(view, self.points, aim), self.gradient
        else:
            look, gradient = target.ascend(view, self.points, aim)
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
        broken = predicted_classes(look.scores) != self.labels
        better = broken & (~self.broken | (self.losses > self.found_losses))
        self.found = torch.where(per_image(better, self.found), self.points, self.found)
        self.found_losses = torch.where(better, self.losses, self.found_losses)
        self.broken = self.broken | broken

    def review(self, width: int, eps: float) -> None:
        """Halves the steps of images that make too little progress, and moves these back to their best point.

        Args:
            width: steps since the last review.
        """
        stuck = ~self.halved & (self.best_losses <= self.reviewed_losses)
        self.halved = stuck | (self.rises < _RISES_WANTED * width)
        self.step_sizes = torch.where(self.halved, self.step_sizes / 2, self.step_sizes)
        self.go_back(self.halved)
        self.reviewed_losses, self.rises = self.best_losses, torch.zeros_like(self.rises)

    def go_back(self, rows: Tensor) -> None:
        """Moves the images of a mask (batch,) back to their best point."""
        back = per_image(rows, self.points)
        self.points = torch.where(back, self.best, self.points)
        self.gradient = torch.where(back, self.best_gradient, self.gradient)
        self.losses = torch.where(rows, self.best_losses, self.losses)


class _SparseState(_APGDState):
    """State of one search in L1. A step moves two thirds as many pixels as the best point changes."""

    first_step = 1.0
    wide_start = True

    @staticmethod
    def first(images: Tensor, norm: Norm, eps: float, draws: Draws) -> Tensor:
        noise = draws.normal(*images.shape[1:], dtype=images.dtype)
        return NORMS[norm].nearest(images + noise, images, eps)

    @staticmethod
    def checkpoints(steps: int) -> tuple[int, ...]:
        return tuple(range(0, steps + 1, max(1, steps * 4 // 100)))

    def move(self, norm: Norm, eps: float, share: float) -> None:
        """One projected step of the pixels with the largest gradients, two thirds of `changed`; `share` is not used."""
        step = share_step(self.gradient, self.points, 2 * self.changed // 3)
        stepped = self.points + per_image(self.step_sizes, self.points) * step
        self.previous, self.points = self.points, NORMS[norm].nearest(stepped, self.images, eps)

    def review(self, width: int, eps: float) -> None:
        """Sets the step to eps, from the best point, if that changes fewer pixels than before; otherwise shrinks it."""
        changed = _count_changed(self.best, self.images)
        fewer = changed < _FEWER * self.changed
        shorter = (self.step_sizes / _SPARSE_DIVISOR).clamp_min(_SPARSE_LEAST * eps)
        self.step_sizes = torch.where(fewer, eps, shorter)
        self.go_back(fewer)
        self.changed = changed


def _state_for(norm: Norm) -> type[_APGDState]:
    return _SparseState if NORMS[norm].is_sparse else _APGDState


def _count_changed(points: Tensor, images: Tensor) -> Tensor:
    """(batch,) number of pixel values in which the points differ from the images."""
    return (points != images).flatten(1).sum(dim=1)


def _start(
    kind: type[_APGDState],
    images: Tensor,
    labels: Tensor,
    goals: Tensor | None,
    points: Tensor,
    look: Look,
    gradient: Tensor,
    eps: float,
) -> _APGDState:
    losses, never = look.losses.to(images.dtype), torch.zeros_like(labels, dtype=torch.bool)
    state = kind(
        images=images,
        labels=labels,
        goals=goals,
        **dict.fromkeys(("points", "previous", "best", "found"), points),
        **dict.fromkeys(("gradient", "best_gradient"), gradient),
        **dict.fromkeys(("losses", "best_losses", "reviewed_losses"), losses),
        found_losses=torch.full_like(losses, -math.inf),
        step_sizes=torch.full_like(losses, kind.first_step * eps),
        rises=torch.zeros_like(labels),
        halved=~never,  # so that the first review counts only how often the loss rose
        changed=_count_changed(points, images),
        broken=never,
    )
    state.note_broken(look)
    return state
