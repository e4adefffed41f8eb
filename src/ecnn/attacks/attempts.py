"""Several attempts at the same images (restarts, targets), and loops that drop images once they are broken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from ecnn.attacks.base import BallAttack, Target
from ecnn.attacks.images import copies_at_once, per_image
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import Loss, LossFunction, View, find_view
from ecnn.checks import check_count
from ecnn.errors import InputError

# On CUDA counting the broken rows makes the CPU wait for the GPU, and every new batch size costs time.
_CUDA_STEPS_BETWEEN_COUNTS = 10
_CUDA_SHARE_WORTH_DROPPING = 0.25


@dataclass(frozen=True, kw_only=True)
class ClimbingAttack(BallAttack):
    """An attack that raises a loss by gradient steps, from one or more starts and towards one or more wrong classes.

    `PGD` explains the settings.
    """

    steps: int
    loss: Loss
    on: str | View | LossFunction = "scores"
    restarts: int = 1
    targets: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        find_view(self.on).check_loss(self.loss)
        check_count("steps", self.steps, least=0)
        check_count("restarts", self.restarts)
        check_count("targets", self.targets, least=0)
        if self.keep == "last" and (self.restarts > 1 or self.targets):
            raise InputError('keep="last" returns one point, so it takes one start and no targets.')
        if self.targets and not find_view(self.on).has_goals:
            raise InputError("this loss cannot be targeted: choose another on=, or use targets=0.")

    def num_climbs(self, num_classes: int) -> int:
        """How many searches an image that does not break gets: restarts times targets (1 without targets)."""
        return self.restarts * max(1, min(self.targets, num_classes - 1))

    def goals(self, target: Target, images: Tensor, labels: Tensor) -> list[Tensor | None]:
        """For each target rank (batch,) wrong classes to move to, highest score first; [None] without targets.

        With None an attack only moves away from the label. One forward pass if there are targets.
        """
        if not self.targets:
            return [None]
        return list(best_wrong_classes(target.scores(images), labels, self.targets).unbind(dim=1))


@dataclass(kw_only=True)
class Rows:
    """Per-image state of a search. Every field is a tensor whose first dimension is the image, or None.

    Attributes:
        results: names of the fields that are kept for rows that drop out; the other fields of such rows are lost.
        broken: (batch,) True for images that need no more work.
    """

    results: ClassVar[tuple[str, ...]] = ("broken",)
    broken: Tensor

    def take(self, rows: Tensor) -> Self:
        """The state of the images at these positions."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            values[field.name] = None if value is None else value[rows]
        return type(self)(**values)

    def put(self, rows: Tensor, part: Self) -> None:
        """Copies the `results` of `part` into these rows. Tensors are replaced, not written to: they may be shared."""
        for name in self.results:
            setattr(self, name, getattr(self, name).index_copy(0, rows, getattr(part, name)))

    def hold(self, before: Self) -> None:
        """Restores the `results` of the rows that were broken in `before`."""
        for name in self.results:
            now, then = getattr(self, name), getattr(before, name)
            setattr(self, name, torch.where(per_image(before.broken, now), then, now))


AnyRows = TypeVar("AnyRows", bound=Rows)
Setting = TypeVar("Setting")


def iterate_rows(
    target: Target, whole: AnyRows, steps: int, *, early_exit: bool
) -> Iterator[tuple[int, Target, AnyRows]]:
    """Yields (step, target, rows) for each step; with early exit broken rows are dropped, and it may end sooner.

    The body of the loop updates the rows that it gets. After the last step `whole` holds the results of all rows. Do
    not break out of the loop: results would be lost.
    """
    rows, part = torch.arange(len(whole.broken), device=whole.broken.device), whole
    for step in range(steps):
        kept = _standing(part.broken, step) if early_exit else None
        if kept is not None:
            if part is not whole:
                whole.put(rows, part)
            rows, part, target = rows[kept], part.take(kept), target.narrow(kept)
        if not len(rows):
            return
        before = copy(part)
        yield step, target, part
        if (
            early_exit and part.broken.is_cuda
        ):  # broken rows that are not yet dropped must not change any more
            part.hold(before)
    if part is not whole:
        whole.put(rows, part)


def _standing(broken: Tensor, step: int) -> Tensor | None:
    """(n,) positions of the rows that are not broken, or None when dropping the others would not pay."""
    if broken.is_cuda and step % _CUDA_STEPS_BETWEEN_COUNTS:
        return None
    kept = torch.nonzero(~broken).squeeze(1)
    most = len(broken) * (1 - _CUDA_SHARE_WORTH_DROPPING) if broken.is_cuda else len(broken) - 1
    return kept if len(kept) <= most else None


class Attempts:
    """Runs several attempts at the same images (restarts, targets, attacks) and keeps the best point of each image.

    With early exit that is the first misclassified point, otherwise the misclassified point of highest worth. For an
    image that nothing breaks it is the point of highest worth. The attack defines the worth, such as the final loss.

    Attributes:
        points: the best points so far; the images themselves before the first attempt.
    """

    def __init__(self, target: Target, images: Tensor, *, early_exit: bool) -> None:
        self.points = images.clone()
        self._target, self._early_exit = target, early_exit
        self._broken = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        self._worth = torch.full((len(images),), -math.inf, dtype=images.dtype, device=images.device)
        self._rows = torch.arange(len(images), device=images.device)

    def each(self, settings: Iterable[Setting]) -> Iterator[tuple[Setting, Target, Tensor]]:
        """Yields (setting, target, rows) for each attempt, until no image is left. Call `keep` after each attempt.

        The rows (n,) are the positions of the images to attack: all of them, or with early exit the unbroken ones.
        """
        for setting in settings:
            if not len(self._rows):
                return
            is_whole = len(self._rows) == len(self.points)
            yield setting, self._target if is_whole else self._target.narrow(self._rows), self._rows

    def several(self, settings: Iterable[Setting]) -> Iterator[tuple[list[Setting], Target, Tensor]]:
        """Yields (settings, target, rows) like `each`, but several attempts in one batch if `together` allows it.

        The rows are those of the first setting, then those of the second, and so on. The first attempt runs alone,
        because it breaks the most images.
        """
        left, count = list(settings), 1
        while left and len(self._rows):
            now, left = left[:count], left[count:]
            rows = self._rows if len(now) == 1 else self._rows.repeat(len(now))
            is_whole = len(now) == 1 and len(rows) == len(self.points)
            yield now, self._target if is_whole else self._target.narrow(rows), rows
            count = copies_at_once(len(self._rows), self.points[:1].numel())

    def keep(self, found: Tensor, broken: Tensor, worth: Tensor) -> None:
        """Keeps the points of the last attempt that are better than those so far.

        Several attempts in one batch are compared in their order, as if they had been made one after the other.

        Args:
            found: (n, ...) points, in the order of the rows that were yielded.
            broken: (n,) whether they are misclassified.
            worth: (n,) higher is better.
        """
        rows = self._rows
        for points, wrong, gain in zip(
            *(torch.split(part, len(rows)) for part in (found, broken, worth)), strict=True
        ):
            before = self._broken[rows]
            better = (wrong & ~before) | ((wrong == before) & (gain > self._worth[rows]))
            if self._early_exit:
                better = better & ~before
            self.points[rows] = torch.where(per_image(better, points), points, self.points[rows])
            self._worth[rows] = torch.where(better, gain.to(self._worth.dtype), self._worth[rows])
            self._broken[rows] = before | wrong
        if self._early_exit:
            self._rows = torch.nonzero(~self._broken).squeeze(1)


def spread(settings: Sequence[tuple[Draws, Tensor | None]], rows: Tensor) -> tuple[Draws, Tensor | None]:
    """The draws and goals of several attempts in one batch, one entry per row; goals are None if no attempt has any.

    Args:
        settings: for each attempt the draws of all images, and their goals (batch,) or None.
        rows: as yielded by `Attempts.several`.
    """
    parts = torch.split(rows, len(rows) // len(settings))
    keys = [draws.keys[part] for (draws, _), part in zip(settings, parts, strict=True)]
    goals = [goal[part] for (_, goal), part in zip(settings, parts, strict=True) if goal is not None]
    return Draws(torch.cat(keys)), torch.cat(goals) if goals else None


def best_wrong_classes(scores: Tensor, labels: Tensor, count: int) -> Tensor:
    """(batch, count) the wrong classes with the highest scores, highest first; fewer columns if there are fewer."""
    wrong = scores.scatter(1, labels[:, None], -math.inf)
    return wrong.topk(min(count, scores.shape[1] - 1), dim=1).indices
