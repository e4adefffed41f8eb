"""Several searches in turn (restarts, targets, attacks), and one search whose rows drop out when they are broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from ecnn.attacks.base import Target
from ecnn.attacks.images import per_image

# On CUDA counting makes the device wait, and a new batch size costs time of its own.
_CUDA_STEPS_BETWEEN_COUNTS = 10
_CUDA_SHARE_WORTH_DROPPING = 0.25

#: (target of these rows, their positions) -> points, whether they are broken, and what breaks a tie: more is better.
Turn = Callable[[Target, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(kw_only=True)
class Rows:
    """What a search knows of each image: tensors whose first dimension is the image, or None.

    Attributes:
        results: names of what is read when the search is over; the rest is forgotten as rows drop out.
        broken: (batch,) these need no more work.
    """

    results: ClassVar[tuple[str, ...]] = ("broken",)
    broken: Tensor

    def take(self, rows: Tensor) -> Self:
        """The same of some of the images, by position."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            values[field.name] = None if value is None else value[rows]
        return type(self)(**values)

    def put(self, rows: Tensor, part: Self) -> None:
        """Takes over the results of some of the images; tensors that others may share are replaced, not changed."""
        for name in self.results:
            setattr(self, name, getattr(self, name).index_copy(0, rows, getattr(part, name)))

    def hold(self, before: Self) -> None:
        """Takes back what has become of the rows that were broken before."""
        for name in self.results:
            now, then = getattr(self, name), getattr(before, name)
            setattr(self, name, torch.where(per_image(before.broken, now), then, now))


AnyRows = TypeVar("AnyRows", bound=Rows)


def advance_rows(
    target: Target,
    state: AnyRows,
    steps: int,
    advance: Callable[[Target, AnyRows, int], None],
    *,
    early_exit: bool,
) -> AnyRows:
    """The state after `advance(target, state, step)` has changed it `steps` times; broken rows drop out on the way."""
    rows = torch.arange(len(state.broken), device=state.broken.device)
    part, whole = state, state
    for step in range(steps):
        kept = _standing(part.broken, step) if early_exit else None
        if kept is not None:
            if part is not whole:
                whole.put(rows, part)
            rows, part, target = rows[kept], part.take(kept), target.narrow(kept)
        if not len(rows):
            return whole
        before = copy(part)
        advance(target, part, step)
        if (
            early_exit and part.broken.is_cuda
        ):  # rows that are broken and not yet dropped must not change any more
            part.hold(before)
    if part is not whole:
        whole.put(rows, part)
    return whole


def _standing(broken: Tensor, step: int) -> Tensor | None:
    """(n,) positions of the rows that are not broken, when it pays to drop the others."""
    if broken.is_cuda and step % _CUDA_STEPS_BETWEEN_COUNTS:
        return None
    kept = torch.nonzero(~broken).squeeze(1)
    most = len(broken) * (1 - _CUDA_SHARE_WORTH_DROPPING) if broken.is_cuda else len(broken) - 1
    return kept if len(kept) <= most else None


def take_turns(turns: Iterable[Turn], target: Target, images: Tensor, *, early_exit: bool) -> Tensor:
    """For each image the first broken point; without early exit the broken one of most worth.

    Images that no turn breaks get their point of most worth.
    """
    points, broken = images.clone(), torch.zeros(len(images), dtype=torch.bool, device=images.device)
    worth = torch.full((len(images),), -math.inf, dtype=images.dtype, device=images.device)
    rows = torch.arange(len(images), device=images.device)
    for turn in turns:
        if not len(rows):
            break
        found, won, value = turn(target if len(rows) == len(images) else target.narrow(rows), rows)
        before = broken[rows]
        better = (won & ~before) | ((won == before) & (value > worth[rows]))
        points[rows] = torch.where(per_image(better, found), found, points[rows])
        worth[rows] = torch.where(better, value.to(worth.dtype), worth[rows])
        broken[rows] = before | won
        if early_exit:
            rows = torch.nonzero(~broken).squeeze(1)
    return points


def best_wrong_classes(scores: Tensor, labels: Tensor, count: int) -> Tensor:
    """(batch, count) the wrong classes by falling score, or as many as there are."""
    wrong = scores.scatter(1, labels[:, None], -math.inf)
    return wrong.topk(min(count, scores.shape[1] - 1), dim=1).indices
