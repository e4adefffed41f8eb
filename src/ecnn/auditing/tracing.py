"""The program that a model computes, found by showing it an image that notes what is done with it.

Every operation that a traced image meets below Python is either in the tables here or ends the trace, so that nothing
is overlooked: a model that rounds, draws random numbers, asks numpy or branches on a value is not traced.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ecnn.auditing.programs import Affine, Curve, MaxPool, Program, Step

aten: Any = torch.ops.aten
_SMOOTH_ERROR = 1e-6  # of tanh and its like in float32


class UnknownStepError(Exception):
    """The model does something whose effect on a set of images is not known; the text says what."""


def trace(model: nn.Module, images: Tensor) -> Program:
    """What the model, in eval mode, does with one image; raises `UnknownStepError` where that is not known.

    It is traced on two different images, so that a constant which follows from an image, from the time or from numbers
    drawn outside torch is noticed.

    Args:
        images: (batch, channel, height, width) a few in [0, 1], of which the first is used.
    """
    first = _trace(model, images[:1])
    second = _trace(model, 1 - images[:1] / 2)
    if not first.is_same(second):
        raise UnknownStepError("its operations differ from image to image")
    return first


def _trace(model: nn.Module, image: Tensor) -> Program:
    recorder = _Recorder(image.shape)
    try:
        with torch.no_grad():
            scores = model(_Traced(image.detach(), recorder, 0))
    except UnknownStepError:
        raise
    except Exception as error:  # a model may do anything with what is not a plain tensor
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnknownStepError(f"it cannot be traced ({reason[:120]})") from error
    if recorder.has_left_its_thread:
        raise UnknownStepError("it computes in another thread")
    if not isinstance(scores, _Traced) or scores.number is None:
        raise UnknownStepError("its scores do not come from known operations on the image")
    if scores.number != len(recorder.steps) or scores.ndim != 2:
        raise UnknownStepError("it does not end with its scores")
    if scores.number == 0:
        raise UnknownStepError("it does nothing with the image")
    return Program(
        steps=tuple(recorder.steps),
        result=scores.number,
        shapes=tuple(recorder.shapes),
        least_margin=recorder.least_margin,
        constants=tuple(recorder.constants),
        device=image.device,
    )


class _Recorder:
    """The steps so far, in the thread that asks.

    A thread of the model's that met an error of ours might end, and the model wait for it for ever: it gets plain
    numbers, and the trace is worth nothing.
    """

    def __init__(self, shape: torch.Size) -> None:
        self.thread = threading.get_ident()
        self.has_left_its_thread = False
        self.steps: list[Step] = []
        self.shapes = [shape]
        self.constants: list[Tensor] = []
        self.least_margin = 0.0

    def add(self, step: Step, value: Tensor) -> _Traced:
        if self.least_margin:
            raise UnknownStepError("something follows its softmax")
        self.steps.append(step)
        self.shapes.append(value.shape)
        return _Traced(value, self, len(self.steps))

    def constant(self, value: Any) -> Any:
        """An argument as the steps keep it: floating tensors in float64; traced ones are refused."""
        if isinstance(value, _Traced):
            raise UnknownStepError("it multiplies what it makes of an image with another such value")
        if isinstance(value, list | tuple):
            return type(value)(self.constant(part) for part in value)
        if isinstance(value, Tensor):
            self.constants.append(value.detach().clone())
            return value.detach().double() if value.is_floating_point() else value.detach().clone()
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.constants.append(torch.tensor(float(value), dtype=torch.float64, device="cpu"))
        return value


class _Traced(Tensor):
    """An image, or what the model makes of it, that notes every operation it goes through.

    Attributes:
        value: (1, ...) the number for the image that is traced.
        number: of the step that it is the result of; None for a result that nothing may be made of.
        has_twin: another tensor may show the same memory, so that it must not be changed in place.
    """

    value: Tensor
    recorder: _Recorder
    number: int | None
    has_twin: bool

    @staticmethod
    def __new__(cls, value: Tensor, recorder: _Recorder, number: int | None) -> _Traced:
        made: _Traced = torch.Tensor._make_wrapper_subclass(
            cls, value.shape, dtype=value.dtype, device=value.device, strides=value.stride()
        )
        made.value, made.recorder, made.number, made.has_twin = value, recorder, number, False
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        traced = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, _Traced)]
        recorder = traced[0].recorder
        if threading.get_ident() != recorder.thread:
            recorder.has_left_its_thread = True
            return func(*_plain(args), **{name: _plain(value) for name, value in kwargs.items()})
        if any(value.number is None for value in traced):
            raise UnknownStepError(f"it uses a second result of an operation in {func}")
        if func in _IN_PLACE:
            return _change(_IN_PLACE[func], args, kwargs)
        if func in _SHARING:
            args[0].has_twin = True
        result = func(*_plain(args), **{name: _plain(value) for name, value in kwargs.items()})
        value, *rest = result if isinstance(result, tuple) else (result,)
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float64):
            raise UnknownStepError(f"it computes something else than float32 or float64 numbers by {func}")
        known = _KNOWN.get(func)
        if known is None:
            raise UnknownStepError(f"it uses {func}")
        made = known(recorder, func, args, kwargs, value)
        made.has_twin = func in _SHARING
        # What else an operation returns, such as indices, must not be used.
        return (made, *(_Traced(extra, recorder, None) for extra in rest)) if rest else made


def _change(func: Any, args: Any, kwargs: Any) -> _Traced:
    """The same tensor after an operation in place."""
    changed = args[0]
    if not isinstance(changed, _Traced) or changed.has_twin:
        raise UnknownStepError("it changes memory that something else may read")
    result: _Traced = func(*args, **kwargs)
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
    return value.value if isinstance(value, _Traced) else value


# The operations ------------------------------------------------------------------------------------------------------


def _number(value: Any) -> int:
    number = value.number
    assert isinstance(number, int)
    return number


def _same(recorder: _Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> _Traced:
    """A copy, or a change of type between float32 and float64."""
    return _Traced(value, recorder, _number(args[0]))


def _literal(recorder: _Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> _Traced:
    """An operation on one traced value that moves, repeats, drops, adds up or averages numbers."""
    if kwargs.get("dtype") is not None:
        raise UnknownStepError(f"it changes the type of its numbers in {func}")
    source, *rest = args
    rest = [recorder.constant(argument) for argument in rest]

    def apply(values: Tensor) -> Tensor:
        made: Tensor = func(values, *rest, **kwargs)
        return made

    terms = -(-source.numel() // max(1, value.numel())) if func in _SUMS else 0
    if func is aten.avg_pool2d.default:
        terms = math.prod(args[1])
    step = Affine(
        parents=(_number(source),), apply=apply, spread=apply, sizes=apply, terms=terms, work=value.numel()
    )
    return recorder.add(step, value)


def _padded(recorder: _Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> _Traced:
    source, widths, *fill = args
    if any(fill):
        raise UnknownStepError("it pads with another number than zero")
    return _literal(recorder, func, (source, widths), kwargs, value)


def _joined(recorder: _Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> _Traced:
    """Several values side by side."""
    parts, *rest = args
    if not all(isinstance(part, _Traced) for part in parts):
        raise UnknownStepError("it joins what it makes of an image with constants")

    def apply(*values: Tensor) -> Tensor:
        made: Tensor = func(list(values), *rest, **kwargs)
        return made

    parents = tuple(_number(part) for part in parts)
    step = Affine(parents=parents, apply=apply, spread=apply, sizes=apply, terms=0, work=0)
    return recorder.add(step, value)


def _sum(recorder: _Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> _Traced:
    """a + alpha b, or minus; one of them may be a constant."""
    first, second = args[:2] if func is not aten.rsub.Scalar else (args[1], args[0])
    alpha = float(kwargs.get("alpha", args[2] if len(args) > 2 else 1))
    if func is aten.rsub.Scalar and alpha != 1:
        raise UnknownStepError("it subtracts with a factor")
    sign = -alpha if func in (aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar) else alpha
    sources = [part for part in (first, second) if isinstance(part, _Traced)]
    factors = [factor for part, factor in ((first, 1.0), (second, sign)) if isinstance(part, _Traced)]
    shape = value.shape
    offset = torch.zeros(shape, dtype=torch.float64, device=value.device)
    for part, factor in ((first, 1.0), (second, sign)):
        if not isinstance(part, _Traced):
            offset = offset + factor * recorder.constant(part)

    def weigh(values: tuple[Tensor, ...], weights: list[float], constant: Tensor) -> Tensor:
        total = constant
        for part, factor in zip(values, weights, strict=True):
            total = total + factor * part
        return total

    absolute = [abs(factor) for factor in factors]
    step = Affine(
        parents=tuple(_number(part) for part in sources),
        apply=lambda *values: weigh(values, factors, offset),
        spread=lambda *values: weigh(values, absolute, torch.zeros_like(offset)),
        sizes=lambda *values: weigh(values, absolute, offset.abs()),
        terms=2,
        work=value.numel(),
    )
    return recorder.add(step, value)


def _scaled(recorder: _Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> _Traced:
    """Times a constant, divided by one, or with the sign changed."""
    other: Any
    if func is aten.neg.default:
        source, other = args[0], -1.0
    elif func in (aten.div.Tensor, aten.div.Scalar):
        if kwargs.get("rounding_mode") is not None or not isinstance(args[0], _Traced):
            raise UnknownStepError(f"it uses {func} other than to divide by a constant")
        source, other = (
            args[0],
            1 / torch.as_tensor(recorder.constant(args[1]), dtype=torch.float64, device=value.device),
        )
    else:
        source, other = args if isinstance(args[0], _Traced) else (args[1], args[0])
        other = recorder.constant(other)
    factor = torch.as_tensor(other, dtype=torch.float64, device=value.device)
    if not bool(factor.isfinite().all()):
        raise UnknownStepError("it divides by zero")
    shape = value.shape

    def apply(values: Tensor) -> Tensor:
        return (values * factor).expand(shape)

    def spread(values: Tensor) -> Tensor:
        return (values * factor.abs()).expand(shape)

    step = Affine(
        parents=(_number(source),), apply=apply, spread=spread, sizes=spread, terms=2, work=value.numel()
    )
    return recorder.add(step, value)


def _product(recorder: _Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> _Traced:
    """A product of matrices, of which one is constant, plus a constant."""
    if kwargs or len(args) != (3 if func is aten.addmm.default else 2):
        raise UnknownStepError(f"it uses {func} with factors")
    bias = recorder.constant(args[0]) if func is aten.addmm.default else None
    left, right = args[1:] if bias is not None else args
    multiply = torch.bmm if func is aten.bmm.default else torch.mm
    is_left = isinstance(left, _Traced)
    source, matrix = (left, recorder.constant(right)) if is_left else (right, recorder.constant(left))

    def with_matrix(matrix: Tensor, constant: Tensor | None) -> Callable[[Tensor], Tensor]:
        def apply(values: Tensor) -> Tensor:
            made = multiply(values, matrix) if is_left else multiply(matrix, values)
            return made if constant is None else made + constant

        return apply

    step = Affine(
        parents=(_number(source),),
        apply=with_matrix(matrix, bias),
        spread=with_matrix(matrix.abs(), None),
        sizes=with_matrix(matrix.abs(), None if bias is None else bias.abs()),
        terms=matrix.shape[-2] if is_left else matrix.shape[-1],
        work=value.numel() * (matrix.shape[-2] if is_left else matrix.shape[-1]),
    )
    return recorder.add(step, value)


def _convolution(recorder: _Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> _Traced:
    source, weight, bias, *rest = args
    if not isinstance(source, _Traced):
        raise UnknownStepError("it makes the weights of a convolution from an image")
    weight = recorder.constant(weight)
    bias = None if bias is None else recorder.constant(bias)
    rest = [recorder.constant(argument) for argument in rest]

    def with_weight(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        def apply(values: Tensor) -> Tensor:
            made: Tensor = func(values, weight, bias, *rest)
            return made

        return apply

    terms = weight[0].numel()
    step = Affine(
        parents=(_number(source),),
        apply=with_weight(weight, bias),
        spread=with_weight(weight.abs(), None),
        sizes=with_weight(weight.abs(), None if bias is None else bias.abs()),
        terms=terms,
        work=value.numel() * terms,
    )
    return recorder.add(step, value)


def _batch_norm(recorder: _Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> _Traced:
    """Batch norm by its kept statistics, as a scale and a shift of each channel."""
    source, weight, bias, mean, variance = args[:5]
    trains, eps = (False, args[6]) if "no_training" in str(func) else (args[5], args[7])
    if trains or mean is None or variance is None:
        raise UnknownStepError("it normalises by the statistics of the batch")
    mean, variance = recorder.constant(mean), recorder.constant(variance)
    scale = (variance + recorder.constant(eps)).rsqrt()
    scale = scale if weight is None else scale * recorder.constant(weight)
    bias = torch.zeros_like(mean) if bias is None else recorder.constant(bias)
    form = (1, -1, *([1] * (value.ndim - 2)))
    scale, mean, bias = (table.view(form) for table in (scale, mean, bias))
    step = Affine(
        parents=(_number(source),),
        apply=lambda values: (values - mean) * scale + bias,
        spread=lambda values: values * scale.abs(),
        sizes=lambda values: (values + mean.abs()) * scale.abs() + bias.abs(),
        terms=4,
        work=value.numel(),
    )
    return recorder.add(step, value)


def _softmax(recorder: _Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> _Traced:
    """Softmax of the scores, or its logarithm: keeps their order, if the lead is more than rounding."""
    source, dim = args[0], args[1]
    if source.ndim != 2 or dim not in (1, -1):
        raise UnknownStepError("it has a softmax before its end")
    recorder.least_margin = 1e-3
    return _Traced(value, recorder, _number(source))


def _curve(
    make: Callable[..., tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], bool, float]],
) -> Callable[..., _Traced]:
    def record(recorder: _Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> _Traced:
        source, *rest = args
        rest = [recorder.constant(argument) for argument in rest]
        apply, slope, is_convex, rounding = make(*rest, **kwargs)
        parents = (_number(source),)
        step = Curve(parents=parents, apply=apply, slope=slope, is_convex=is_convex, rounding=rounding)
        return recorder.add(step, value)

    return record


def _relu() -> Any:
    return torch.relu, lambda values: (values > 0).to(values.dtype), True, 0.0


def _leaky(slope: float = 0.01) -> Any:
    if not 0 <= slope <= 1:
        raise UnknownStepError(f"it has a leaky ReLU of slope {slope}")
    return (
        lambda values: torch.where(values > 0, values, slope * values),
        lambda values: torch.where(values > 0, 1.0, slope).to(values.dtype),
        True,
        0.0 if slope == 0 else _SMOOTH_ERROR,
    )


def _elu(alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    if (alpha, scale, input_scale) != (1.0, 1.0, 1.0):
        raise UnknownStepError("it has an ELU of unusual scale")
    return (
        torch.nn.functional.elu,
        lambda values: values.clamp(max=0).exp(),
        True,
        _SMOOTH_ERROR,
    )


def _clamp(low: float | None = None, high: float | None = None) -> Any:
    def apply(values: Tensor) -> Tensor:
        return values.clamp(low, high)

    def slope(values: Tensor) -> Tensor:
        inside = torch.ones_like(values, dtype=torch.bool)
        inside = inside if low is None else inside & (values > low)
        return (inside if high is None else inside & (values < high)).to(values.dtype)

    # With one end it is convex (max) or neither (min); two ends make it an S.
    return apply, slope, high is None, 0.0


def _smooth(apply: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Any:
    return lambda: (apply, slope, False, _SMOOTH_ERROR)


def _max_pool(recorder: _Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> _Traced:
    source, *window = args
    if kwargs:
        raise UnknownStepError("it pools with unusual options")
    window = [recorder.constant(argument) for argument in window]
    return recorder.add(MaxPool(parents=(_number(source),), window=tuple(window)), value)


_SUMS = (
    aten.mean.dim,
    aten.mean.default,
    aten.sum.dim_IntList,
    aten.sum.default,
    aten.avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
)
_MOVES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.flip.default,
    aten.roll.default,
)
_COPIES = (aten.clone.default, aten.detach.default, aten.alias.default, aten._to_copy.default)
#: May return the memory that they were given.
_SHARING = (*_MOVES, *_COPIES)
_IN_PLACE = {
    aten.relu_.default: aten.relu.default,
    aten.leaky_relu_.default: aten.leaky_relu.default,
    aten.elu_.default: aten.elu.default,
    aten.hardtanh_.default: aten.hardtanh.default,
    aten.clamp_.default: aten.clamp.default,
    aten.tanh_.default: aten.tanh.default,
    aten.sigmoid_.default: aten.sigmoid.default,
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
}
_KNOWN: dict[Any, Callable[..., _Traced]] = {
    **dict.fromkeys((*_SUMS, *_MOVES), _literal),
    **dict.fromkeys(_COPIES, _same),
    aten.constant_pad_nd.default: _padded,
    aten.cat.default: _joined,
    **dict.fromkeys(
        (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar), _sum
    ),
    **dict.fromkeys(
        (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default), _scaled
    ),
    **dict.fromkeys((aten.mm.default, aten.addmm.default, aten.bmm.default), _product),
    aten.convolution.default: _convolution,
    **dict.fromkeys(
        (
            aten.native_batch_norm.default,
            aten.cudnn_batch_norm.default,
            aten._native_batch_norm_legit_no_training.default,
        ),
        _batch_norm,
    ),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _softmax),
    aten.relu.default: _curve(_relu),
    aten.leaky_relu.default: _curve(_leaky),
    aten.elu.default: _curve(_elu),
    aten.clamp.default: _curve(_clamp),
    aten.hardtanh.default: _curve(lambda low=-1.0, high=1.0: _clamp(low, high)),
    aten.clamp_min.default: _curve(lambda low: _clamp(low, None)),
    aten.tanh.default: _curve(_smooth(torch.tanh, lambda values: 1 - torch.tanh(values) ** 2)),
    aten.sigmoid.default: _curve(
        _smooth(torch.sigmoid, lambda values: torch.sigmoid(values) * torch.sigmoid(-values))
    ),
    aten.max_pool2d_with_indices.default: _max_pool,
}
