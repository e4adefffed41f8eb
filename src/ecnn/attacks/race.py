"""Wrong classes race for each image, and the effort goes to those that come nearest: AutoAttack's verdicts for less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ecnn.attacks.apgd import APGD
from ecnn.attacks.attempts import best_wrong_classes
from ecnn.attacks.base import BallAttack, Cost, Target
from ecnn.attacks.norms import NORMS
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import Aim, Loss, View, find_score_view, find_view
from ecnn.checks import check_count
from ecnn.errors import InputError

_FIRST_STEPS = 20  # away from the label, on the margin: enough for most that fall
_ROUNDS = ((9, 10), (3, 30))  # how many wrong classes, and steps to each; the best of a round are in the next
_LAST_CLASSES, _LAST_STEPS = 3, 100
_NEAR = 0.25  # of the clean margin: an image of which more is left has no last round
_STREAM = 23


@dataclass(frozen=True, kw_only=True)
class Race(BallAttack):
    """Short searches to many wrong classes, longer ones to the few that come nearest, the longest only near the border.

    Each image is first moved away from its label. What stands is moved a few steps towards each of the nine best wrong
    classes, then further towards the three that came nearest. Where the margin is by then down to a quarter of that of
    the clean image, these get 100 steps each on the DLR loss; elsewhere the image is given up. On honest networks this
    finds what AutoAttack finds for a small part of its passes; it has no answer to masked gradients.

    After Liu et al. 2022, who give up hopeless images too. They also learn starts from earlier images; here, as in
    every attack, an image's search depends on itself alone. Learnt starts would save less than 1 % (docs/log.md):
    nearly all passes are spent on images that stand.

    Attributes:
        norm: of the ball, a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        on: where it looks, "scores", "linear", "tempered" or another `ScoreView`.
        effort: factor of all steps; in L1 they are twice as many.
    """

    has_last_iterate: ClassVar[bool] = False

    on: str | View = "scores"
    effort: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        find_score_view(self.on)
        check_count("effort", self.effort)
        if self.keep == "last":
            raise InputError('Race keeps what breaks an image: keep="last" has no meaning here.')

    @property
    def _factor(self) -> int:
        """Of all steps: twice as many where APGD begins in wider balls."""
        return self.effort * (2 if NORMS[self.norm].is_sparse else 1)

    def cost(self, num_classes: int) -> Cost:
        """As for an image that comes near the border; most are given up before the last round."""
        most = num_classes - 1
        steps = [_FIRST_STEPS]
        for classes, length in (*_ROUNDS, (_LAST_CLASSES, _LAST_STEPS)):
            steps += [length] * min(classes, most)
        total = sum(steps) * self._factor
        return Cost(3 + total + len(steps), total)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        if self.radius == 0 or not len(images):
            return images.clone()
        draws = draws.fold(_STREAM)
        clean = target.look(find_view(self.on), images, Aim(labels, None, "margin"))
        scores = target.scores(images) if clean.scores is None else clean.scores
        state = _Race(target, images, labels, draws, early_exit=self._drops_rows)
        state.climb(self._climber("margin", _FIRST_STEPS), None)
        classes = best_wrong_classes(scores, labels, _ROUNDS[0][0])
        for count, steps in _ROUNDS:
            classes = state.race(self._climber("margin", steps), classes[:, :count])
        state.give_up(state.losses < _NEAR * clean.losses)
        last = self._climber("dlr" if scores.shape[1] >= 4 else "margin", _LAST_STEPS)
        state.race(last, classes[:, :_LAST_CLASSES])
        return state.points

    def _climber(self, loss: Loss, steps: int) -> APGD:
        return APGD(
            norm=self.norm,
            eps=self.eps,
            steps=steps * self._factor,
            loss=loss,
            on=self.on,
            early_exit=self._drops_rows,
        )


class _Race:
    """Where the race stands.

    Attributes:
        points: the best point of each image so far.
        losses: (batch,) the margin by which a wrong class leads at the best point, below zero while none does.
    """

    def __init__(
        self, target: Target, images: Tensor, labels: Tensor, draws: Draws, *, early_exit: bool
    ) -> None:
        self.target, self.images, self.labels = target, images, labels
        self.draws, self.early_exit, self.climbs = draws, early_exit, 0
        self.points = images.clone()
        self.losses = torch.full((len(images),), -torch.inf, dtype=images.dtype, device=images.device)
        self.broken = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        self.given_up = self.broken.clone()

    def climb(self, climber: APGD, goals: Tensor | None) -> Tensor:
        """(batch,) the loss that one more search reached; minus infinity for images that have none."""
        self.climbs += 1
        reached = torch.full_like(self.losses, -torch.inf)
        left = ~self.given_up & ~self.broken if self.early_exit else ~self.given_up
        rows = torch.nonzero(left).squeeze(1)
        if not len(rows):
            return reached
        part = self.target if len(rows) == len(self.images) else self.target.narrow(rows)
        points, broken, losses = climber.climb(
            part,
            self.images[rows],
            self.labels[rows],
            None if goals is None else goals[rows],
            self.draws.fold(self.climbs).take(rows),
        )
        reached[rows] = losses.to(reached.dtype)
        if climber.loss == "margin":
            better = broken & ~self.broken[rows] | (broken == self.broken[rows]) & (
                losses > self.losses[rows]
            )
            self.losses[rows] = torch.where(better, losses.to(reached.dtype), self.losses[rows])
        else:
            better = broken & ~self.broken[rows]
        shape = (-1, *([1] * (points.ndim - 1)))
        self.points[rows] = torch.where(better.view(shape), points, self.points[rows])
        self.broken[rows] |= broken
        return reached

    def race(self, climber: APGD, classes: Tensor) -> Tensor:
        """(batch, class) the wrong classes that were run to, the one that came nearest first."""
        reached = [self.climb(climber, classes[:, place]) for place in range(classes.shape[1])]
        order = torch.stack(reached, dim=1).argsort(dim=1, descending=True, stable=True)
        return classes.gather(1, order)

    def give_up(self, hopeless: Tensor) -> None:
        """No more effort for these images, a mask."""
        self.given_up |= hopeless
