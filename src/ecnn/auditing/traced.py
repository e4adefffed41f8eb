"""A tensor that records every operation applied to it, by which `trace` follows an image through a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ecnn.auditing.programs import Step


class UnknownStepError(Exception):
    """The model does something that cannot be bounded over a set of images; the message names it."""


@dataclass(frozen=True)
class Operations:
    """The torch operations that can be traced; any other ends the trace.

    Attributes:
        records: by operation, the function that adds its step: (recorder, operation, args, kwargs, value) -> Traced.
        in_place: by in-place operation, its counterpart that returns a new tensor.
        sharing: operations whose result may share memory with their input.
    """

    records: Mapping[Any, Callable[..., Traced]]
    in_place: Mapping[Any, Any]
    sharing: Collection[Any]


class Recorder:
    """Collects the steps of one trace, in the thread that makes it.

    If the model computes in another thread, that gets plain tensors, and `has_left_its_thread` makes the trace invalid.
    An error raised there might end the thread, and the model would wait for it for ever.

    Args:
        shape: (1, channel, height, width) of the image.
        operations: those that can be traced.
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
            raise UnknownStepError("it computes something after its softmax")
        self.steps.append(step)
        self.shapes.append(value.shape)
        return Traced(value, self, len(self.steps))

    def constant(self, value: Any) -> Any:
        """An argument as a constant of a step, floating tensors in float64; `UnknownStepError` for a traced one."""
        if isinstance(value, Traced):
            raise UnknownStepError("it combines two values that depend on the image")
        if isinstance(value, list | tuple):
            return type(value)(self.constant(part) for part in value)
        if isinstance(value, Tensor):
            self.constants.append(value.detach().clone())
            return value.detach().double() if value.is_floating_point() else value.detach().clone()
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.constants.append(torch.tensor(float(value), dtype=torch.float64, device="cpu"))
        return value


class Traced(Tensor):
    """An image, or a tensor computed from it, that records every operation applied to it.

    Attributes:
        value: (1, ...) the plain tensor, with the values for the image that is traced.
        recorder: collects the steps.
        number: of the step that computed it, 0 for the image; None for a result that must not be used, such as indices.
        has_twin: another tensor may share its memory, so that it must not be changed in place.
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
            raise UnknownStepError(f"it uses more than the first result of an operation in {func}")
        known = recorder.operations
        if func in known.in_place:
            return _change(known.in_place[func], args, kwargs)
        if func in known.sharing:
            args[0].has_twin = True
        result = func(*_plain(args), **{name: _plain(value) for name, value in kwargs.items()})
        value, *rest = result if isinstance(result, tuple) else (result,)
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float64):
            raise UnknownStepError(f"it computes numbers of another type than float32 or float64 by {func}")
        if func not in known.records:
            raise UnknownStepError(f"it uses {func}")
        made = known.records[func](recorder, func, args, kwargs, value)
        made.has_twin = func in known.sharing
        # Other results of the operation, such as indices, must not be used.
        return (made, *(Traced(extra, recorder, None) for extra in rest)) if rest else made


def _change(func: Any, args: Any, kwargs: Any) -> Traced:
    """The tensor with the result of an in-place operation, computed by its counterpart `func`."""
    changed = args[0]
    if not isinstance(changed, Traced) or changed.has_twin:
        raise UnknownStepError("it changes memory that another operation may read")
    result: Traced = func(*args, **kwargs)
    if result.shape != changed.shape:
        raise UnknownStepError("it changes the shape of a tensor in place")
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
