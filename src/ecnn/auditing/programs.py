"""A model as a list of steps that can be bounded over sets of images; `trace` makes it from a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Relative rounding error of one float32 operation, times 8 for the different ways in which libraries add up products.
_UNIT = 8 * 2.0**-24
_TINY = 1e-30


@dataclass(frozen=True, eq=False, kw_only=True)
class Affine:
    """A step that is linear in its inputs, plus a constant. Tensors are (1, ...), in float64.

    Attributes:
        parents: numbers of the steps whose values are its inputs.
        apply: computes the step.
        spread: the same with the absolute value of every factor and no constant; maps radii of intervals to a radius.
        sizes: `spread` plus the absolute values of all constants; maps absolute inputs to the magnitude that rounding
            errors are relative to.
        terms: how many products are added up for one value; the bound of the rounding error grows with it.
        work: multiplications for one image.
    """

    parents: tuple[int, ...]
    apply: Callable[..., Tensor]
    spread: Callable[..., Tensor]
    sizes: Callable[..., Tensor]
    terms: int
    work: int

    def error(self, *largest: Tensor) -> Tensor:
        """Bound of the step's rounding error in float32, for inputs of at most these absolute values."""
        return (self.terms + 4) * _UNIT * self.sizes(*largest) + _TINY


@dataclass(frozen=True, eq=False, kw_only=True)
class Curve:
    """A step that applies one non-decreasing function to every value.

    Attributes:
        parents: number of the step whose values are its input.
        apply: the function.
        slope: its derivative; between two points it is never less than the smaller of the derivatives at these points.
        is_convex: whether the function is convex, so that its chords lie above it.
        rounding: bound of its error in float32, relative to 1 + |value|.
    """

    parents: tuple[int, ...]
    apply: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    is_convex: bool
    rounding: float

    def error(self, low: Tensor, high: Tensor) -> Tensor:
        """Bound of the step's rounding error in float32, for inputs from `low` to `high`."""
        return self.rounding * (1 + torch.maximum(self.apply(low).abs(), self.apply(high).abs()))


@dataclass(frozen=True, eq=False, kw_only=True)
class MaxPool:
    """A step of max pooling.

    Attributes:
        parents: number of the step whose values are its input.
        window: arguments of `max_pool2d` after the images.
    """

    parents: tuple[int, ...]
    window: tuple[Any, ...]


Step = Affine | Curve | MaxPool


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """The steps by which a model computes its scores.

    Attributes:
        steps: in their order. Step 0 is the images and has no entry, so that `steps[0]` is step 1.
        result: number of the step whose values are the scores, the last one.
        shapes: (1, ...) of the values of every step, the images first.
        least_margin: lead that a score needs to stay the largest after a final softmax; 0 if the model has none.
        constants: all constants, to compare two traces.
        device: where the constants are.
    """

    steps: tuple[Step, ...]
    result: int
    shapes: tuple[torch.Size, ...]
    least_margin: float
    constants: tuple[Tensor, ...]
    device: torch.device

    @property
    def work(self) -> int:
        """Multiplications for one image."""
        return sum(step.work for step in self.steps if isinstance(step, Affine))

    def units(self, number: int) -> int:
        """How many values a step has for one image."""
        return self.shapes[number].numel()

    def is_same(self, other: Program) -> bool:
        """Whether both have steps of the same kinds, inputs, shapes and constants."""
        return (
            self.shapes == other.shapes
            and [type(step) for step in self.steps] == [type(step) for step in other.steps]
            and [step.parents for step in self.steps] == [step.parents for step in other.steps]
            and len(self.constants) == len(other.constants)
            and all(
                torch.equal(mine, yours) for mine, yours in zip(self.constants, other.constants, strict=True)
            )
        )
