"""The torch operations that can be traced: one function per kind, which adds the operation to the program as a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ecnn.auditing.programs import Affine, Curve, MaxPool
from ecnn.auditing.traced import Operations, Recorder, Traced, UnknownStepError

aten: Any = torch.ops.aten
_SMOOTH_ERROR = 1e-6  # of tanh and similar functions in float32, relative to 1 + |value|


def _number(value: Any) -> int:
    number = value.number
    assert isinstance(number, int)
    return number


def _same(recorder: Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> Traced:
    """A copy, or a change of type between float32 and float64."""
    return Traced(value, recorder, _number(args[0]))


def _literal(recorder: Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> Traced:
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


def _padded(recorder: Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> Traced:
    source, widths, *fill = args
    if any(fill):
        raise UnknownStepError("it pads with a number other than zero")
    return _literal(recorder, func, (source, widths), kwargs, value)


def _joined(recorder: Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> Traced:
    """A concatenation of traced values."""
    parts, *rest = args
    if not all(isinstance(part, Traced) for part in parts):
        raise UnknownStepError("it concatenates constants with values that depend on the image")

    def apply(*values: Tensor) -> Tensor:
        made: Tensor = func(list(values), *rest, **kwargs)
        return made

    parents = tuple(_number(part) for part in parts)
    step = Affine(parents=parents, apply=apply, spread=apply, sizes=apply, terms=0, work=0)
    return recorder.add(step, value)


def _sum(recorder: Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> Traced:
    """a + alpha * b or a - alpha * b; one of the two may be a constant."""
    first, second = args[:2] if func is not aten.rsub.Scalar else (args[1], args[0])
    alpha = float(kwargs.get("alpha", args[2] if len(args) > 2 else 1))
    if func is aten.rsub.Scalar and alpha != 1:
        raise UnknownStepError("it subtracts with a factor")
    sign = -alpha if func in (aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar) else alpha
    sources = [part for part in (first, second) if isinstance(part, Traced)]
    factors = [factor for part, factor in ((first, 1.0), (second, sign)) if isinstance(part, Traced)]
    shape = value.shape
    offset = torch.zeros(shape, dtype=torch.float64, device=value.device)
    for part, factor in ((first, 1.0), (second, sign)):
        if not isinstance(part, Traced):
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


def _scaled(recorder: Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> Traced:
    """A traced value multiplied by a constant, divided by one, or negated."""
    other: Any
    if func is aten.neg.default:
        source, other = args[0], -1.0
    elif func in (aten.div.Tensor, aten.div.Scalar):
        if kwargs.get("rounding_mode") is not None or not isinstance(args[0], Traced):
            raise UnknownStepError(f"it uses {func} for something else than division by a constant")
        source, other = (
            args[0],
            1 / torch.as_tensor(recorder.constant(args[1]), dtype=torch.float64, device=value.device),
        )
    else:
        source, other = args if isinstance(args[0], Traced) else (args[1], args[0])
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


def _product(recorder: Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> Traced:
    """A product of a traced matrix and a constant one, plus a constant bias for `addmm`."""
    if kwargs or len(args) != (3 if func is aten.addmm.default else 2):
        raise UnknownStepError(f"it uses {func} with factors")
    bias = recorder.constant(args[0]) if func is aten.addmm.default else None
    left, right = args[1:] if bias is not None else args
    multiply = torch.bmm if func is aten.bmm.default else torch.mm
    is_left = isinstance(left, Traced)
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


def _convolution(recorder: Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> Traced:
    source, weight, bias, *rest = args
    if not isinstance(source, Traced):
        raise UnknownStepError("it computes the weights of a convolution from the image")
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


def _batch_norm(recorder: Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> Traced:
    """Batch norm in eval mode: a scale and a shift of each channel, from the running statistics."""
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


def _softmax(recorder: Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> Traced:
    """A final softmax or log-softmax: adds no step, as it keeps the order of scores that differ by `least_margin`."""
    source, dim = args[0], args[1]
    if source.ndim != 2 or dim not in (1, -1):
        raise UnknownStepError("it computes a softmax before its last operation")
    recorder.least_margin = 1e-3
    return Traced(value, recorder, _number(source))


def _curve(
    make: Callable[..., tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], bool, float]],
) -> Callable[..., Traced]:
    def record(recorder: Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> Traced:
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

    # A lower bound alone makes a convex function (a maximum). With an upper bound it is concave or S-shaped.
    return apply, slope, high is None, 0.0


def _smooth(apply: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Any:
    return lambda: (apply, slope, False, _SMOOTH_ERROR)


def _max_pool(recorder: Recorder, func: Any, args: Any, kwargs: Any, value: Tensor) -> Traced:
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
_RECORDS: dict[Any, Callable[..., Traced]] = {
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
OPERATIONS = Operations(_RECORDS, _IN_PLACE, (*_MOVES, *_COPIES))
