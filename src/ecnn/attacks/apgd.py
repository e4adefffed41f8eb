"""Auto-PGD: a gradient attack that finds its own step size (Croce & Hein 2020), in L1 also how many pixels to move."""

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
from ecnn.attacks.norms import NORMS, Norm, share_step
from ecnn.attacks.turns import Rows, Turn, advance_rows, best_wrong_classes, take_turns
from ecnn.attacks.views import Look, Loss, LossFunction, View, make_view
from ecnn.checks import check_choice, parse_eps
from ecnn.errors import InputError

_MOMENTUM = 0.75  # the paper's alpha, the share of a step that is new
_RISES_WANTED = 0.75  # the paper's rho
_WIDE = (3, 2)  # times eps, the radii of the balls that a wide start passes through
_WIDE_SHARE = 30  # per cent of the steps spent in each
_SPARSE_DIVISOR, _SPARSE_LEAST = 1.5, 0.1  # of the step in L1 when it shrinks, and its smallest size in eps
_FEWER = 0.95  # of the changed pixels; when fewer are left, the step in L1 grows again
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

    In L1 (Croce & Hein 2021) there is no momentum and the step, eps at first, moves only the pixels of the largest
    gradients: two thirds as many as the best point has changed. At every 4 % of the steps it shrinks to two thirds, to
    eps / 10 at least, or, when the best point has come to change fewer pixels, is eps again from there.

    Attributes:
        norm: of the ball and of the steps, a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        steps: of each start; 100 in AutoAttack.
        loss: "cross_entropy", "dlr" (free of the scale of the scores; needs 3 classes, 4 with targets) or "margin".
        targets: 0 moves away from the label; k moves to each of the k best wrong classes in turn (APGD-T; 9 in
            AutoAttack), or to all if there are fewer.
        restarts: independent starts: uniform points; in L1 noise projected to the ball, so that few pixels are changed.
        wide_start: 30 % of the steps are made in a ball of three times the radius, then 30 % in one of twice, the rest
            in the ball itself, each part from the best point of the one before. By default in L1 alone, as published.
        on: where it looks, a name of `VIEWS` or a callable (model, images, labels) -> (batch,) loss to raise.

    Departs: the authors' program scales to the L2 ball and then cuts to [0, 1]; this is the projection onto both that
        the paper asks for. Their program compares the first loss after a review with the last before it, ours with
        that of the point the search went on from, as printed. In L1 pixels at an end of [0, 1] that would leave it take
        no part in a step, and the number of pixels is rounded down: rounded up, it never comes from two to one.
    """

    norm: Norm
    eps: float | str
    steps: int
    loss: Loss
    targets: int = 0
    restarts: int = 1
    wide_start: bool | None = None
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
        eps, kind = parse_eps(self.eps), _CLIMBS[self.norm]
        wide_steps = self.steps * _WIDE_SHARE // 100
        is_wide = wide_steps and (kind.wide_start if self.wide_start is None else self.wide_start)
        radii = [*(factor * eps for factor in _WIDE if is_wide), eps]
        points = kind.first(images, self.norm, radii[0], draws)
        for radius, next_radius in itertools.pairwise(radii):
            wide, _ = self._ascend(
                target, images, labels, goals, points, radius, wide_steps, early_exit=False
            )
            points = NORMS[self.norm].nearest(wide.best, images, next_radius)
        steps, early_exit = self.steps - wide_steps * (len(radii) - 1), self._drops_rows
        climb, look = self._ascend(target, images, labels, goals, points, eps, steps, early_exit=early_exit)
        if self.keep == "last":
            return climb.best, torch.zeros_like(climb.broken), climb.best_losses
        if look.scores is None:
            # The view does not find out what the model says, so that it is asked in the end.
            broken = target.scores(climb.best).argmax(dim=1) != labels
            return climb.best, broken, climb.best_losses
        points = torch.where(per_image(climb.broken, images), climb.found, climb.best)
        return points, climb.broken, torch.where(climb.broken, climb.found_losses, climb.best_losses)

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
    ) -> tuple[_Climb, Look]:
        """So many steps in the ball of one radius: where they end, and what the view showed at first."""
        view, kind = make_view(self.on, self.loss), _CLIMBS[self.norm]
        widths = {now: now - before for before, now in itertools.pairwise(kind.checkpoints(steps))}
        look, gradient = target.ascend(view, points, labels, goals)
        climb = _start_climb(kind, images, labels, goals, points, look, gradient, eps)

        def advance(part: Target, climb: _Climb, step: int) -> None:
            climb.move(self.norm, eps, share=_MOMENTUM if step else 1.0)
            climb.look_around(part, view, last=step == steps - 1)
            if step + 1 in widths:
                climb.review(widths[step + 1], eps)

        return advance_rows(target, climb, steps, advance, early_exit=early_exit), look


@dataclass(kw_only=True)
class _Climb(Rows):
    """Where one start of APGD stands in Linf or L2; every tensor belongs to the images that are left.

    Attributes:
        points, previous, gradient, losses: the iterate, the one before it, and what is known at the iterate.
        best, best_gradient, best_losses: the point of the highest loss so far.
        found, found_losses: of the broken points, the one of the highest loss.
        step_sizes: (batch,).
        rises: (batch,) steps since the last review that raised the loss.
        reviewed_losses, halved: (batch,) the highest loss at the last review, and whether the step was halved there.
        changed: (batch,) pixel values in which the best point differed from the image at the last review; for L1.
        first_step, wide_start: the step at first, in radii; whether balls that are too wide come first.
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

    def review(self, width: int, eps: float) -> None:
        """Halves the step sizes of the images that make no headway and takes these back to their best point."""
        stuck = ~self.halved & (self.best_losses <= self.reviewed_losses)
        self.halved = stuck | (self.rises < _RISES_WANTED * width)
        self.step_sizes = torch.where(self.halved, self.step_sizes / 2, self.step_sizes)
        self.go_back(self.halved)
        self.reviewed_losses, self.rises = self.best_losses, torch.zeros_like(self.rises)

    def go_back(self, rows: Tensor) -> None:
        """Takes some images (a mask) back to their best point."""
        back = per_image(rows, self.points)
        self.points = torch.where(back, self.best, self.points)
        self.gradient = torch.where(back, self.best_gradient, self.gradient)
        self.losses = torch.where(rows, self.best_losses, self.losses)


class _SparseClimb(_Climb):
    """Where one start of APGD stands in L1: steps of few pixels, fewer as the best point comes to need fewer."""

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
        """One step of the pixels of the largest gradients, two thirds as many as are changed; `share` is not used."""
        step = share_step(self.gradient, self.points, 2 * self.changed // 3)
        stepped = self.points + per_image(self.step_sizes, self.points) * step
        self.previous, self.points = self.points, NORMS[norm].nearest(stepped, self.images, eps)

    def review(self, width: int, eps: float) -> None:
        """Where fewer pixels have come to do, a long step from the best point; elsewhere a shorter step."""
        changed = _count_changed(self.best, self.images)
        fewer = changed < _FEWER * self.changed
        shorter = (self.step_sizes / _SPARSE_DIVISOR).clamp_min(_SPARSE_LEAST * eps)
        self.step_sizes = torch.where(fewer, eps, shorter)
        self.go_back(fewer)
        self.changed = changed


_CLIMBS: dict[str, type[_Climb]] = {"linf": _Climb, "l2": _Climb, "l1": _SparseClimb}


def _count_changed(points: Tensor, images: Tensor) -> Tensor:
    """(batch,) pixel values that differ."""
    return (points != images).flatten(1).sum(dim=1)


def _start_climb(
    kind: type[_Climb],
    images: Tensor,
    labels: Tensor,
    goals: Tensor | None,
    points: Tensor,
    look: Look,
    gradient: Tensor,
    eps: float,
) -> _Climb:
    losses, never = look.losses.to(images.dtype), torch.zeros_like(labels, dtype=torch.bool)
    climb = kind(
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
        step_sizes=torch.full_like(losses, kind.first_step * eps),
        rises=torch.zeros_like(labels),
        reviewed_losses=losses,
        halved=~never,  # the first review asks only how often the loss rose
        changed=_count_changed(points, images),
        broken=never,
    )
    climb.note_broken(look)
    return climb
