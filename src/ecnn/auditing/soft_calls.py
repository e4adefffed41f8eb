"""Torch calls on tensors that have a soft companion (`Soft`): the same result, with the companion's gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ecnn.auditing.soft_values import (
    Soft,
    add_gradient,
    align,
    expectation,
    expected_row,
    pass_gradient,
    soft_equal,
    soft_ranks,
    soft_scatter,
    soft_step,
    table_slope,
)

#: Names of comparisons, with the sign of the soft step that replaces each in the backward pass.
COMPARISONS = {"gt": 1.0, "ge": 1.0, "lt": -1.0, "le": -1.0, "greater": 1.0, "greater_equal": 1.0}
COMPARISONS |= {"less": -1.0, "less_equal": -1.0}
EQUALITIES = {"eq": 1.0, "ne": -1.0, "not_equal": -1.0}
REMAINDERS = ("remainder", "__mod__", "fmod", "frac")
CASTS = {
    "byte": torch.uint8,
    "char": torch.int8,
    "short": torch.int16,
    "int": torch.int32,
    "long": torch.int64,
    "bool": torch.bool,
}
_LOOKUPS = ("embedding", "__getitem__", "gather", "take_along_dim", "index_select", "take", "select")
_SCATTERS = ("scatter", "scatter_", "scatter_add", "scatter_add_")
_UNCHANGED = ("detach", "clone", "contiguous", "cpu", "cuda", "__get__", "requires_grad_", "data")
SHAPES = (
    "unsqueeze",
    "squeeze",
    "view",
    "reshape",
    "flatten",
    "expand",
    "permute",
    "transpose",
    "t",
    "repeat",
)


def has_companion(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one of a call's arguments, or a member of a tuple or list among them, has a companion."""
    for value in (*args, *kwargs.values()):
        values = value if isinstance(value, (tuple, list)) else (value,)
        if any(Soft.of(one) is not None for one in values):
            return True
    return False


def is_in_place(name: str) -> bool:
    """Whether a call of this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in ("__iadd__", "__imul__", "__isub__")


def is_whole_quotient(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call is a division that rounds its result to a whole number."""
    rounds = name in ("div", "divide") and kwargs.get("rounding_mode")
    return name in ("floor_divide", "__floordiv__") or bool(rounds)


def carry(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call on masks, counts or indices that have companions, with the gradient of these.

    It may raise an exception if the gradient cannot be carried on. Then the caller makes the call without one.

    Args:
        name: of the function; comparisons without underscores, as `gt` for `__gt__`.
        func, args, kwargs: the function and its arguments.
    """
    first: Any = args[0] if args else None
    own = Soft.of(first)
    if name == "dequantize" and own is not None:
        return pass_gradient(func(*args, **kwargs), own.value)
    if name in ("argsort", "sort") and own is not None and own.source is not None:
        ranks = func(*args, **kwargs)
        Soft(value=soft_ranks(own.source)).on(ranks if isinstance(ranks, Tensor) else ranks.indices)
        return ranks
    if name == "where" and own is not None:
        return _where(own.value, *as_floats(args[1:]), hard=func(*args, **kwargs))
    if name in ("masked_fill", "masked_fill_") and Soft.of(args[1]) is not None:
        return _fill(name, func, args)
    if name == "__setitem__":
        return _set_item(func, args)
    if name == "one_hot" and own is not None:
        return _one_hot(first, own, func(*args, **kwargs))
    if name in _SCATTERS and len(args) > 3 and Soft.of(args[2]) is not None:
        return soft_scatter(name, func, args, kwargs)
    if name in _LOOKUPS and (index := _index_of(name, args)) is not None:
        return _look_up(name, func, args, kwargs, index)
    if is_in_place(name):
        return func(first, *as_floats(args[1:]), **kwargs) if own is None else func(*args, **kwargs)
    hard = func(*args, **kwargs)
    if not isinstance(hard, Tensor):
        return hard
    weights = _carried_weights(name, func, own, args, kwargs, hard)
    value = _carried_value(name, func, args, kwargs, hard)
    if value.shape != hard.shape:
        return hard
    if hard.is_floating_point():
        return pass_gradient(hard, value.to(hard.dtype))
    return Soft(value=value, weights=weights).on(hard)


def as_floats(values: Any) -> Any:
    """The arguments, with tensors that have companions as floats: the same values, with the companion's gradient."""
    if isinstance(values, (tuple, list)):
        return type(values)(as_floats(value) for value in values)
    soft = Soft.of(values)
    return values if soft is None else pass_gradient(values.to(soft.value.dtype), soft.value)


def _where(soft: Tensor, yes: Any, no: Any, *, hard: Tensor) -> Tensor:
    """The result `hard` of `where`, with the gradient with respect to its mask added."""
    if not hard.is_floating_point():
        return hard
    yes, no = (value.detach() if isinstance(value, Tensor) else value for value in (yes, no))
    return add_gradient(hard, soft * (yes - no))


def _fill(name: str, func: Any, args: tuple[Any, ...]) -> Any:
    first, mask, value = args[0], args[1], args[2]
    soft = Soft.of(mask)
    assert soft is not None
    before = first.detach().clone()
    hard = func(first, mask, value)
    if not hard.is_floating_point():
        return hard
    filled = value.detach() if isinstance(value, Tensor) else value
    if isinstance(filled, (int, float)) and not math.isfinite(filled):
        return hard
    change = add_gradient(torch.zeros_like(hard), soft.value * (filled - before))
    return hard.add_(change) if name.endswith("_") else hard + change


def _set_item(func: Any, args: tuple[Any, ...]) -> None:
    """Does values[mask] = value or values[rows, index] = value, with the gradient of the mask or of the index."""
    first, key, value = args
    soft = Soft.of(key)
    before = first.detach().clone()
    func(first, key, as_floats(value) if first.is_floating_point() else value)
    if not first.is_floating_point() or (isinstance(value, Tensor) and value.numel() != 1):
        return
    if soft is not None and key.dtype is torch.bool:
        mask = align(soft.value, first)
        new = value.detach() if isinstance(value, Tensor) else value
        first.add_(add_gradient(torch.zeros_like(first), mask * (new - before)))
    elif isinstance(key, tuple) and len(key) == 2 and (chosen := Soft.of(key[1])) is not None:
        weights = chosen.weights
        if weights is not None and weights.ndim == 2 and weights.shape == first.shape:
            new = value.detach() if isinstance(value, Tensor) else value
            first.add_(add_gradient(torch.zeros_like(first), weights * (new - before)))


def _one_hot(values: Tensor, soft: Soft, hard: Tensor) -> Tensor:
    """The one-hot result, still of whole numbers, with a companion: how near each place was to being chosen."""
    if soft.weights is not None and soft.weights.shape == hard.shape:
        near = soft.weights
    else:
        places = torch.arange(hard.shape[-1], device=values.device, dtype=soft.value.dtype)
        near = torch.softmax(-((soft.value[..., None] - places) ** 2), dim=-1)
    return Soft(value=near).on(hard)


def _index_of(name: str, args: tuple[Any, ...]) -> tuple[int, int | None] | None:
    """Which argument of a lookup is the index with a companion, and its position if the argument is a tuple."""
    places = (0,) if name == "embedding" else (1,) if name in ("__getitem__", "take") else (2, 1)
    for place in places:
        if place < len(args):
            if Soft.of(args[place]) is not None:
                return place, None
            if isinstance(args[place], tuple):
                for inner, value in enumerate(args[place]):
                    if Soft.of(value) is not None:
                        return place, inner
    return None


def _look_up(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], at: tuple[int, int | None]
) -> Any:
    """The result of a table lookup, with the gradient with respect to the index."""
    place, inner = at
    index = args[place] if inner is None else args[place][inner]
    soft = Soft.of(index)
    assert soft is not None
    hard = func(*args, **kwargs)
    if index.dtype is torch.bool or not isinstance(hard, Tensor) or not hard.is_floating_point():
        return hard

    def ask(other: Tensor) -> Tensor:
        changed = list(args)
        if inner is None:
            changed[place] = other
        else:
            changed[place] = (*args[place][:inner], other, *args[place][inner + 1 :])
        found: Tensor = func(*changed, **kwargs)
        return found.detach()

    table = args[1] if name == "embedding" else args[0]
    axis = 0 if name in ("embedding", "__getitem__", "take") else int(args[1])
    size = table.numel() if name == "take" else table.shape[inner or axis]
    if soft.weights is not None and soft.weights.shape[-1] <= size:
        if inner is None and name in ("embedding", "__getitem__") and table.is_floating_point():
            return add_gradient(hard, expected_row(table, soft.weights))
        return add_gradient(hard, expectation(ask, index, soft.weights))
    return add_gradient(hard, table_slope(ask, index, soft.value, size, hard))


def _carried_weights(
    name: str, func: Any, own: Soft | None, args: tuple[Any, ...], kwargs: dict[str, Any], hard: Tensor
) -> Tensor | None:
    """(*shape, place) the weights of an index after a call that moves or copies it; None after any other call."""
    if own is None or own.weights is None:
        return None
    if name in _UNCHANGED or (name in ("to", "long", "int", "type") and hard.shape == args[0].shape):
        return own.weights
    if name not in SHAPES and not (name == "__getitem__" and not isinstance(args[1], Tensor)):
        return None
    parts = [func(part, *args[1:], **kwargs) for part in own.weights.unbind(-1)]
    return torch.stack(parts, dim=-1)


def _carried_value(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hard: Tensor) -> Any:
    """The floating value of the companion of a call's result: the call made on floats, softened where it is a step."""
    floats: Any = as_floats(args)
    first: Any = floats[0] if floats else None
    other: Any = floats[1] if len(floats) > 1 else None
    first_soft = Soft.of(args[0]) if args else None
    if first_soft is not None and first_soft.weights is not None and name in ("eq", "ne"):
        dtype, weights = first_soft.value.dtype, first_soft.weights
        return expectation(lambda places: func(places, args[1]).to(dtype), args[0], weights)
    if name in _UNCHANGED or name == "int_repr":
        return first
    if name in ("__and__", "bitwise_and", "logical_and"):
        return first * other if hard.dtype is torch.bool else first
    if name in ("__or__", "bitwise_or", "logical_or"):
        return first + other - first * other if hard.dtype is torch.bool else first
    if name in ("__xor__", "bitwise_xor", "logical_xor"):
        return first + other - 2 * first * other if hard.dtype is torch.bool else first
    if name in ("__invert__", "bitwise_not", "logical_not"):
        return 1 - first if hard.dtype is torch.bool else -first
    if name in ("any", "all"):
        return (first.amax if name == "any" else first.amin)(*args[1:], **kwargs)
    if name in ("__rshift__", "bitwise_right_shift"):
        return first / 2**other
    if name in ("__lshift__", "bitwise_left_shift"):
        return first * 2**other
    if is_whole_quotient(name, kwargs):
        return first / other
    if name in REMAINDERS:
        return first if isinstance(first, Tensor) else other
    if name in COMPARISONS:
        return soft_step(first, other, COMPARISONS[name])
    if name in EQUALITIES:
        return soft_equal(first, other, EQUALITIES[name])
    if name in CASTS or name in ("to", "type", "float", "double", "half", "type_as"):
        return first
    if name == "view" and len(args) == 2 and isinstance(args[1], torch.dtype):
        return first
    options = {key: as_floats(value) for key, value in kwargs.items() if key != "dtype"}
    return func(*floats, **options)
