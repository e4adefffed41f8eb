"""Bounds on the outputs of a traced model over a ball: intervals, and linear bounds by backward substitution (CROWN).

Both hold for the model as it runs in float32: they include the rounding error of each step, and are themselves
computed in float64. Linear bounds follow Zhang et al. 2018 (CROWN) and Xu et al. 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ecnn.attacks.norms import NORMS, Norm
from ecnn.auditing.programs import Affine, Curve, MaxPool, Program, Step

_VALUES_AT_ONCE = 2**24  # float64 values in the largest tensor of coefficients; more rows are taken in parts


@dataclass(frozen=True, eq=False, kw_only=True)
class Ball:
    """The balls around images, cut to [0, 1].

    Attributes:
        images: (batch, 1, channel, height, width) in float64.
        norm, eps: of the balls; `radius` adds the rounding error that an audit tolerates in a point.
    """

    images: Tensor
    norm: Norm
    eps: float

    @property
    def radius(self) -> float:
        return self.eps + NORMS[self.norm].rounding(self.images[0].numel())

    @property
    def low(self) -> Tensor:
        return (self.images - self.radius).clamp_min(0)

    @property
    def high(self) -> Tensor:
        return (self.images + self.radius).clamp_max(1)

    def least(self, rows: Tensor) -> Tensor:
        """(batch, row) lower bounds over the ball of linear functions with coefficients (batch, row, 1, ...)."""
        factors = rows.flatten(2)
        low, high = self.low.flatten(1)[:, None], self.high.flatten(1)[:, None]
        least = (factors.clamp_min(0) * low + factors.clamp_max(0) * high).sum(dim=2)
        if not NORMS[self.norm].is_box:
            middle = (factors * self.images.flatten(1)[:, None]).sum(dim=2)
            steepest = NORMS[self.norm].dual(factors.flatten(0, 1)).view(middle.shape)
            least = torch.maximum(least, middle - self.radius * steepest)
        return least

    def take(self, rows: Tensor) -> Ball:
        """The balls around some of the images."""
        return Ball(images=self.images[rows], norm=self.norm, eps=self.eps)


@dataclass(eq=False)
class Bounds:
    """Lower and upper bounds of a step's values, each (batch, 1, ...)."""

    low: Tensor
    high: Tensor

    @property
    def largest(self) -> Tensor:
        """Upper bounds of the absolute values."""
        return torch.maximum(self.low.abs(), self.high.abs())

    def meet(self, low: Tensor, high: Tensor) -> None:
        """Tightens these bounds by others that hold too."""
        self.low = torch.maximum(self.low, low)
        # Both pairs hold up to float64 rounding: a lower bound can be above an upper one only by that.
        self.high = torch.maximum(torch.minimum(self.high, high), self.low)


def interval_bounds(program: Program, ball: Ball) -> list[Bounds]:
    """Bounds of every step, the images first, by interval arithmetic: dependencies between values are ignored."""
    found = [Bounds(ball.low, ball.high)]
    for step in program.steps:
        found.append(_through(step, [found[parent] for parent in step.parents]))
    return found


def _through(step: Step, given: list[Bounds]) -> Bounds:
    """Interval bounds of a step's values from bounds of its inputs."""
    if isinstance(step, Affine):
        middle = torch.func.vmap(step.apply)(*((bounds.low + bounds.high) / 2 for bounds in given))
        radius = torch.func.vmap(step.spread)(*((bounds.high - bounds.low) / 2 for bounds in given))
        radius = radius + torch.func.vmap(step.error)(*(bounds.largest for bounds in given))
        return Bounds(middle - radius, middle + radius)
    (bounds,) = given
    if isinstance(step, Curve):
        error = step.error(bounds.low, bounds.high)
        return Bounds(step.apply(bounds.low) - error, step.apply(bounds.high) + error)
    return Bounds(_pool(step, bounds.low), _pool(step, bounds.high))


def _pool(step: MaxPool, values: Tensor) -> Tensor:
    pooled: Tensor = torch.nn.functional.max_pool2d(values.flatten(0, 1), *step.window)
    return torch.unflatten(pooled, 0, values.shape[:2])


def tighten(program: Program, ball: Ball, bounds: list[Bounds]) -> None:
    """Tightens the bounds in place: inputs of nonlinear steps by linear bounds, the rest by intervals from these."""
    bent = {step.parents[0] for step in program.steps if not isinstance(step, Affine)} - {0}
    for number, step in enumerate(program.steps, start=1):
        own = _through(step, [bounds[parent] for parent in step.parents])
        bounds[number].meet(own.low, own.high)
        if number in bent:
            low, high = _unit_bounds(program, ball, bounds, number)
            bounds[number].meet(low, high)


def _unit_bounds(program: Program, ball: Ball, bounds: list[Bounds], number: int) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds, each (batch, 1, ...), of every value of a step, by linear bounds."""
    shape, units, batch = program.shapes[number], program.units(number), len(ball.images)
    largest = max(program.units(step) for step in range(number + 1))
    width = max(1, _VALUES_AT_ONCE // (2 * batch * largest))
    lows, highs = [], []
    for chosen in torch.split(torch.arange(units, device=ball.images.device), width):
        rows = torch.zeros(len(chosen), units, dtype=torch.float64, device=ball.images.device)
        rows[torch.arange(len(chosen), device=rows.device), chosen] = 1
        both = torch.cat([rows, -rows]).view(-1, *shape).expand(batch, -1, *shape)
        low, minus_high = least_of(program, ball, bounds, number, both).chunk(2, dim=1)
        lows.append(low)
        highs.append(-minus_high)
    return tuple(torch.cat(parts, dim=1).view(batch, *shape) for parts in (lows, highs))  # type: ignore[return-value]


def margin_rows(num_classes: int, labels: Tensor) -> Tensor:
    """(batch, class - 1, 1, class) coefficients of the label's score minus that of each other class."""
    others = torch.stack([torch.arange(num_classes, device=labels.device)] * len(labels))
    others = others[others != labels[:, None]].view(len(labels), -1)
    eye = torch.eye(num_classes, dtype=torch.float64, device=labels.device)
    return (eye[labels][:, None] - eye[others])[:, :, None]


def least_margins(program: Program, ball: Ball, bounds: list[Bounds], labels: Tensor) -> Tensor:
    """(batch,) a lower bound over the ball of the margin between the label's score and the best other one.

    In a batch of one image, linear bounds are computed only for classes that the bounds of the scores do not rule out
    already. With many classes these are few.
    """
    rows = margin_rows(program.shapes[program.result][1], labels)
    least = torch.full((len(labels),), torch.inf, dtype=torch.float64, device=labels.device)
    if len(labels) == 1:
        scores = bounds[program.result]
        others = torch.arange(rows.shape[-1], device=labels.device) != labels
        margins = (scores.low.flatten()[labels] - scores.high.flatten())[others]
        is_open = margins <= program.least_margin
        rows, least = rows[:, is_open], torch.where(is_open, least, margins).amin(dim=0, keepdim=True)
    width = max(1, _VALUES_AT_ONCE // (len(labels) * max(map(program.units, range(program.result + 1)))))
    for part in torch.split(rows, width, dim=1) if rows.shape[1] else ():
        least = torch.minimum(least, least_of(program, ball, bounds, program.result, part).amin(dim=1))
    return least


def least_of(program: Program, ball: Ball, bounds: list[Bounds], number: int, rows: Tensor) -> Tensor:
    """(batch, row) lower bounds over the ball of linear functions of a step's values.

    Args:
        bounds: of all steps before it.
        number: of the step.
        rows: (batch, row, 1, ...) the coefficients of its values.
    """
    constant = torch.zeros(rows.shape[:2], dtype=torch.float64, device=rows.device)
    waiting: dict[int, Tensor] = {number: rows}
    for current in range(number, 0, -1):
        if current not in waiting:
            continue
        rows, step = waiting.pop(current), program.steps[current - 1]
        given = [bounds[parent] for parent in step.parents]
        parts, added = _carry_back(program, step, rows, given)
        constant = constant + added
        for parent, part in zip(step.parents, parts, strict=True):
            waiting[parent] = waiting[parent] + part if parent in waiting else part
    least = ball.least(waiting[0]) if 0 in waiting else torch.zeros_like(constant)
    # A reserve for rounding in float64, whose actual error is far smaller.
    return least + constant - 1e-9 * (1 + constant.abs() + least.abs())


def _carry_back(
    program: Program, step: Step, rows: Tensor, given: list[Bounds]
) -> tuple[list[Tensor], Tensor]:
    """Linear functions of a step's inputs that are lower bounds of those of its values: coefficients and constants."""
    if isinstance(step, Affine):
        return _carry_affine(program, step, rows, given)
    (bounds,) = given
    if isinstance(step, Curve):
        lower, upper = _lines(step, bounds)
        above, below = rows.clamp_min(0), rows.clamp_max(0)
        part = above * lower[0][:, None] + below * upper[0][:, None]
        return [part], (above * lower[1][:, None] + below * upper[1][:, None]).flatten(2).sum(dim=2)
    return _carry_pool(step, rows, bounds)


def _carry_affine(
    program: Program, step: Affine, rows: Tensor, given: list[Bounds]
) -> tuple[list[Tensor], Tensor]:
    zeros = tuple(
        torch.zeros(program.shapes[parent], dtype=torch.float64, device=rows.device)
        for parent in step.parents
    )
    offset, pull = torch.func.vjp(step.apply, *zeros)[:2]
    flat: tuple[Tensor, ...] = torch.func.vmap(pull)(rows.flatten(0, 1))
    parts = [torch.unflatten(part, 0, rows.shape[:2]) for part in flat]
    error = torch.func.vmap(step.error)(*(bounds.largest for bounds in given))
    added = (rows * offset).flatten(2).sum(dim=2) - (rows.abs() * error[:, None]).flatten(2).sum(dim=2)
    return parts, added


def _lines(step: Curve, bounds: Bounds) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Two lines (slope, offset) between the bounds, one below the curve and one above it, rounding errors included."""
    low, high = bounds.low, bounds.high
    at_low, at_high = step.apply(low), step.apply(high)
    error = step.error(low, high)
    flat = torch.minimum(step.slope(low), step.slope(high))
    if step.is_convex:
        middle = (low + high) / 2
        below = step.slope(middle)
        lower = step.apply(middle) - below * middle
        width = high - low
        # Where both bounds are equal the chord has no slope, and any line through the point is valid.
        above = torch.where(width > 1e-12, (at_high - at_low) / width.clamp_min(1e-12), below)
        upper = torch.maximum(at_low - above * low, at_high - above * high)
    else:
        below = above = flat
        lower, upper = at_low - flat * low, at_high - flat * high
    return (below, lower - error), (above, upper + error)


def _carry_pool(step: MaxPool, rows: Tensor, bounds: Bounds) -> tuple[list[Tensor], Tensor]:
    """`_carry_back` for max pooling.

    The maximum of a window is at least its leader, the value with the highest lower bound. It equals the leader if no
    other value of the window can exceed it; otherwise it is at most the largest upper bound.
    """
    low, high = bounds.low.flatten(0, 1), bounds.high.flatten(0, 1)
    pooled, places = torch.nn.functional.max_pool2d(low, *step.window, return_indices=True)
    places = places.flatten(2)
    without = high.flatten(2).scatter(2, places, -math.inf).view(high.shape)
    # The largest upper bound without the leader. Where windows overlap, the leader of one may be missing from another
    # as well, so that the comparison proves nothing.
    rival = torch.nn.functional.max_pool2d(without, *step.window)
    alone = (rival <= pooled) & (not _overlaps(step))
    most = torch.nn.functional.max_pool2d(high, *step.window)
    batch, count = rows.shape[:2]
    factors = rows.reshape(batch, count, *pooled.shape[1:])
    above, below = factors.clamp_min(0), factors.clamp_max(0)
    kept = above + below * alone[:, None]
    part = torch.zeros(batch, count, *low.shape[1:], dtype=rows.dtype, device=rows.device).flatten(3)
    part.scatter_add_(3, places[:, None].expand(batch, count, *places.shape[1:]), kept.flatten(3))
    fixed = (below * torch.where(alone, 0.0, most)[:, None]).flatten(2).sum(dim=2)
    return [part.view(batch, count, 1, *low.shape[1:])], fixed


def _overlaps(step: MaxPool) -> bool:
    """Whether two windows may read the same value."""
    size, stride = _pair(step.window[0]), _pair(step.window[1] if len(step.window) > 1 else [])
    dilation = _pair(step.window[3] if len(step.window) > 3 else [1])
    stride = stride or size
    return dilation != [1, 1] or any(side > apart for side, apart in zip(size, stride, strict=True))


def _pair(given: Any) -> list[int]:
    values = list(given) if isinstance(given, list | tuple) else [given]
    return values * 2 if len(values) == 1 else values


def lipschitz_bound(program: Program) -> float:
    """An upper bound of the Lipschitz constant of the scores in L2; infinite after max pooling of overlapping windows.

    The spectral norm of a linear step is bounded by the square root of the product of its largest absolute row and
    column sums. For a small step the norm of its matrix is computed and taken if it is smaller.
    """
    slopes = [1.0]
    for step in program.steps:
        if isinstance(step, Affine):
            slopes.append(_length(program, step, slopes))
        elif isinstance(step, Curve) or not _overlaps(step):
            slopes.append(slopes[step.parents[0]])  # none of the curves is steeper than 1
        else:
            slopes.append(math.inf)
    return slopes[program.result] * (1 + 1e-9)


_SMALL = 2**20  # entries of the largest matrix whose spectral norm is computed


def _length(program: Program, step: Affine, slopes: list[float]) -> float:
    total = 0.0
    for place, parent in enumerate(step.parents):
        zeros = [
            torch.zeros(program.shapes[other], dtype=torch.float64, device=program.device)
            for other in step.parents
        ]

        def alone(values: Tensor, place: int = place, zeros: list[Tensor] = zeros) -> Tensor:
            return step.apply(*(values if other == place else zero for other, zero in enumerate(zeros)))

        def spread(values: Tensor, place: int = place, zeros: list[Tensor] = zeros) -> Tensor:
            return step.spread(*(values if other == place else zero for other, zero in enumerate(zeros)))

        ones = torch.ones_like(zeros[place])
        row_sums, pull = torch.func.vjp(spread, ones)[:2]
        (column_sums,) = pull(torch.ones_like(row_sums))
        length = math.sqrt(float(row_sums.abs().max()) * float(column_sums.abs().max()))
        if ones.numel() * row_sums.numel() <= _SMALL and step.work > 4 * row_sums.numel():
            offset = alone(zeros[place])
            basis = torch.eye(ones.numel(), dtype=torch.float64, device=ones.device)
            columns = torch.func.vmap(alone)(basis.view(-1, *ones.shape)) - offset
            length = min(length, float(torch.linalg.matrix_norm(columns.flatten(1), ord=2)))
        total += slopes[parent] * length
    return total
