"""What a model computes, as a list of steps whose effect on sets of images is known; `trace` makes it of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Rounding of one float32 operation, with room for the ways in which libraries multiply and add.
_UNIT = 8 * 2.0**-24
_TINY = 1e-30


@dataclass(frozen=True, eq=False, kw_only=True)
class Affine:
    """A step that is linear in its inputs, up to a constant; tensors are (1, ...), in float64.

    Attributes:
        parents: the steps that it reads.
        apply: the step itself.
        spread: the same with the absolute value of every factor and no constant: radii to radii.
        sizes: like `spread`, of absolute inputs, with the absolute values of all constants added: what rounding is
            relative to.
        terms: how many products are added up, for rounding.
        work: multiplications.
    """

    parents: tuple[int, ...]
    apply: Callable[..., Tensor]
    spread: Callable[..., Tensor]
    sizes: Callable[..., Tensor]
    terms: int
    work: int

    def error(self, *largest: Tensor) -> Tensor:
        """How far the step in float32 may be from the exact one when the inputs are at most so large."""
        return (self.terms + 4) * _UNIT * self.sizes(*largest) + _TINY


@dataclass(frozen=True, eq=False, kw_only=True)
class Curve:
    """A step that is one growing function of each value.

    Attributes:
        parents: the step that it reads.
        apply: the function.
        slope: its derivative, which between two points is nowhere below the smaller of those at these points.
        is_convex: whether a chord lies above it.
        rounding: how far float32 may be off, as a share of 1 plus the value.
    """

    parents: tuple[int, ...]
    apply: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    is_convex: bool
    rounding: float

    def error(self, low: Tensor, high: Tensor) -> Tensor:
        """How far the step in float32 may be from the exact one between two ends."""
        return self.rounding * (1 + torch.maximum(self.apply(low).abs(), self.apply(high).abs()))


@dataclass(frozen=True, eq=False, kw_only=True)
class MaxPool:
    """A step that takes the largest of some values at each place.

    Attributes:
        parents: the step that it reads.
        window: arguments of `max_pool2d` after the images.
    """

    parents: tuple[int, ...]
    window: tuple[Any, ...]


Step = Affine | Curve | MaxPool


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """What a model computes.

    Attributes:
        steps: in their order; step 0 is the images and has no entry, so that `steps[0]` is step 1.
        result: the step whose values are the scores; the last of the steps.
        shapes: (1, ...) of every step, the images first.
        least_margin: by how much a score must lead to be the largest after the softmax that follows, if one does.
        constants: all constants, to tell whether another trace is of the same computation.
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
        """Whether both do the same with the same constants."""
        return (
            self.shapes == other.shapes
            and [type(step) for step in self.steps] == [type(step) for step in other.steps]
            and [step.parents for step in self.steps] == [step.parents for step in other.steps]
            and len(self.constants) == len(other.constants)
            and all(
                torch.equal(mine, yours) for mine, yours in zip(self.constants, other.constants, strict=True)
            )
        )
