"""An image that notes what is done with it: a tensor that records every operation that it goes through."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ecnn.auditing.programs import Step


class UnknownStepError(Exception):
    """The model does something whose effect on a set of images is not known; the text says what."""


@dataclass(frozen=True)
class Operations:
    """What is known of the operations of torch; any other ends a trace.

    Attributes:
        records: by operation, what adds its step: (recorder, operation, args, kwargs, value) -> Traced.
        in_place: by operation in place, the same one that returns something new.
        sharing: operations that may return the memory that they were given.
    """

    records: Mapping[Any, Callable[..., Traced]]
    in_place: Mapping[Any, Any]
    sharing: Collection[Any]


class Recorder:
    """The steps so far, in the thread that asks.

    Args:
        shape: of the image.
        operations: what is known of operations.

    A thread of the model's that met an error of ours might end, and the model wait for it for ever: it gets plain
    numbers, and the trace is worth nothing.
    """

    def __init__(self, shape: torch.Size, operations: Operations) -> None:
        self.operations = operations
        self.thread = threading.get_ident()
        self.has_left_its_thread = False
        self.steps: list[Step] = []
        self.shapes = [shape]
        self.constants: list[Tensor] = []
        self.least_margin = 0.0

    def add(self, step: Step, value: Tensor) -> Traced:
        if self.least_margin:
            raise UnknownStepError("something follows its softmax")
        self.steps.append(step)
        self.shapes.append(value.shape)
        return Traced(value, self, len(self.steps))

    def constant(self, value: Any) -> Any:
        """An argument as the steps keep it: floating tensors in float64; traced ones are refused."""
        if isinstance(value, Traced):
            raise UnknownStepError("it multiplies what it makes of an image with another such value")
        if isinstance(value, list | tuple):
            return type(value)(self.constant(part) for part in value)
        if isinstance(value, Tensor):
            self.constants.append(value.detach().clone())
            return value.detach().double() if value.is_floating_point() else value.detach().clone()
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.constants.append(torch.tensor(float(value), dtype=torch.float64, device="cpu"))
        return value


class Traced(Tensor):
    """An image, or what the model makes of it, that notes every operation it goes through.

    Attributes:
        value: (1, ...) the number for the image that is traced.
        number: of the step that it is the result of; None for a result that nothing may be made of.
        has_twin: another tensor may show the same memory, so that it must not be changed in place.
    """

    value: Tensor
    recorder: Recorder
    number: int | None
    has_twin: bool

    @staticmethod
    def __new__(cls, value: Tensor, recorder: Recorder, number: int | None) -> Traced:
        made: Traced = torch.Tensor._make_wrapper_subclass(
            cls, value.shape, dtype=value.dtype, device=value.device, strides=value.stride()
        )
        made.value, made.recorder, made.number, made.has_twin = value, recorder, number, False
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        traced = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, Traced)]
        recorder = traced[0].recorder
        if threading.get_ident() != recorder.thread:
            recorder.has_left_its_thread = True
            return func(*_plain(args), **{name: _plain(value) for name, value in kwargs.items()})
        if any(value.number is None for value in traced):
            raise UnknownStepError(f"it uses a second result of an operation in {func}")
        known = recorder.operations
        if func in known.in_place:
            return _change(known.in_place[func], args, kwargs)
        if func in known.sharing:
            args[0].has_twin = True
        result = func(*_plain(args), **{name: _plain(value) for name, value in kwargs.items()})
        value, *rest = result if isinstance(result, tuple) else (result,)
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float64):
            raise UnknownStepError(f"it computes something else than float32 or float64 numbers by {func}")
        if func not in known.records:
            raise UnknownStepError(f"it uses {func}")
        made = known.records[func](recorder, func, args, kwargs, value)
        made.has_twin = func in known.sharing
        # What else an operation returns, such as indices, must not be used.
        return (made, *(Traced(extra, recorder, None) for extra in rest)) if rest else made


def _change(func: Any, args: Any, kwargs: Any) -> Traced:
    """The same tensor after an operation in place."""
    changed = args[0]
    if not isinstance(changed, Traced) or changed.has_twin:
        raise UnknownStepError("it changes memory that something else may read")
    result: Traced = func(*args, **kwargs)
    if result.shape != changed.shape:
        raise UnknownStepError("it changes the shape of what it changes in place")
    changed.value, changed.number = result.value, result.number
    return changed


def _flat(values: Any) -> list[Any]:
    found = []
    for value in values:
        found += _flat(value) if isinstance(value, list | tuple) else [value]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_plain(part) for part in value)
    return value.value if isinstance(value, Traced) else value
