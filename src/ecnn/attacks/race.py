"""Race: targeted searches that spend most steps on the most promising wrong classes; nearly AutoAttack's verdicts."""

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

_FIRST_STEPS = 20  # away from the label, on the margin: enough for most images that can be broken
_ROUNDS = ((9, 10), (3, 30))  # (wrong classes, steps towards each); the best of a round are in the next
_LAST_CLASSES, _LAST_STEPS = 3, 100
_NEAR = 0.25  # an image whose margin stays above this share of its clean margin has no last round
_STREAM = 23


@dataclass(frozen=True, kw_only=True)
class Race(BallAttack):
    """APGD towards many wrong classes for a few steps, then towards fewer classes for more steps.

    Use it for AutoAttack's figure on honest networks at a small part of its passes. It cannot overcome masked
    gradients. Each image is first moved away from its label. Images that are still classified correctly are moved 10
    steps towards each of the nine best wrong classes, then 30 steps towards the three that came nearest. If the margin
    is then below a quarter of the clean image's, these three classes get 100 steps each on the DLR loss; otherwise the
    image is given up.

    After Liu et al. 2022, who give up hopeless images too. They also learn starts from earlier images; here, as in
    every attack, an image's search depends on that image alone. Learnt starts would save less than 1 % (docs/log.md):
    nearly all passes are spent on images that do not break.

    Attributes:
        norm: of the ball, a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        on: the view that is attacked: "scores", "linear", "tempered" or another `ScoreView`.
        effort: factor on all numbers of steps; in L1 these are doubled besides.
    """

    has_last_iterate: ClassVar[bool] = False

    on: str | View = "scores"
    effort: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        find_score_view(self.on)
        check_count("effort", self.effort)
        if self.keep == "last":
            raise InputError('Race keeps the points that break images: keep="last" has no meaning here.')

    @property
    def _factor(self) -> int:
        """Factor on all numbers of steps: twice `effort` in L1, where APGD begins in wider balls."""
        return self.effort * (2 if NORMS[self.norm].is_sparse else 1)

    def cost(self, num_classes: int) -> Cost:
        """The cost of an image that reaches the last round; most images are given up before."""
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
    """State of the race.

    Attributes:
        points: the best point of each image so far.
        losses: (batch,) the margin loss at that point: the lead of the best wrong class, negative while none leads.
        broken, given_up: (batch,) images that are misclassified, and images that get no more searches.
        climbs: how many searches have been made.
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
        """Runs one more search and keeps better points.

        Returns:
            (batch,) the loss that it reached; -inf for images that were left out.
        """
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
        """Runs one search towards each of the classes (batch, class), and returns them sorted, highest loss first."""
        reached = [self.climb(climber, classes[:, place]) for place in range(classes.shape[1])]
        order = torch.stack(reached, dim=1).argsort(dim=1, descending=True, stable=True)
        return classes.gather(1, order)

    def give_up(self, hopeless: Tensor) -> None:
        """Makes no more searches for the images of this mask (batch,)."""
        self.given_up |= hopeless
