"""Gradients through what hides them: the same forward pass, differentiated as if nothing in it were rounded or cut.

Athalye, Carlini & Wagner (2018) replace what has no useful derivative by something near that has one, on the way back
only (BPDA), by hand for each defence. Here every call that a model makes is watched instead, wherever in its code it
stands, so that the model need not be known. What is computed stays as it is. Masks, counts and indices stay what they
are too, and carry a soft companion from which gradients come where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ecnn.attacks.draws import forked_generators
from ecnn.attacks.views import Aim, Look, WrappedView, find_view
from ecnn.auditing.soft_values import (
    Soft,
    add_gradient,
    align,
    bucket_values,
    expectation,
    pass_gradient,
    soft_choice,
    soft_equal,
    soft_ranks,
    soft_scatter,
    soft_sign,
    soft_step,
    table_slope,
)
from ecnn.backbones import full_precision

_STEPS = ("round", "floor", "ceil", "trunc", "fix", "round_", "floor_", "ceil_", "trunc_")
_SIGNS = ("sign", "sgn", "heaviside", "sign_")
_COMPARISONS = {"gt": 1.0, "ge": 1.0, "lt": -1.0, "le": -1.0, "greater": 1.0, "greater_equal": 1.0}
_COMPARISONS |= {"less": -1.0, "less_equal": -1.0}
_EQUALITIES = {"eq": 1.0, "ne": -1.0, "not_equal": -1.0}
_QUOTIENTS = ("floor_divide", "__floordiv__")
_REMAINDERS = ("remainder", "__mod__", "fmod", "frac")
_CHOICES = ("argmax", "argmin", "argsort", "topk", "sort", "kthvalue", "median", "nanmedian", "max", "min")
_LOOKUPS = ("embedding", "__getitem__", "gather", "take_along_dim", "index_select", "take", "select")
_SCATTERS = ("scatter", "scatter_", "scatter_add", "scatter_add_")
_LEAVING = ("numpy", "__array__", "tolist", "item")
_ENTERING = ("tensor", "as_tensor", "asarray", "new_tensor", "from_numpy")
_UNCHANGED = ("detach", "clone", "contiguous", "cpu", "cuda", "__get__", "requires_grad_", "data")
_SHAPES = (
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
_LEAKY: tuple[str, ...] = (
    "relu",
    "relu_",
    "relu6",
    "clamp",
    "clip",
    "clamp_",
    "clamp_min",
    "clamp_max",
    "hardtanh",
)
_LEAKY += ("hardsigmoid", "threshold", "sigmoid", "tanh")
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_CASTS = {
    "byte": torch.uint8,
    "char": torch.int8,
    "short": torch.int16,
    "int": torch.int32,
    "long": torch.int64,
    "bool": torch.bool,
}
_LEAK = 0.2  # slope of what is flat, where flat parts get one
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class StraightThrough(TorchFunctionMode):
    """While it is on, what hides derivatives gives what it always gives, but passes gradients.

    Rounding, casting and detaching pass them as if they were not there; a comparison as a soft step; the place of the
    largest, of the k largest or of the median as a softmax over all places; a look into a table as the slope of the
    table, or as the mean over the places that might have been chosen; what leaves torch and comes back in the same
    shape as if it had stayed. `torch.no_grad` and `torch.inference_mode` have no effect, and neither have hooks on
    gradients. Gradients that the model takes itself are constants.

    Args:
        cuts_remainders: x % q has no slope, so that x - x % q has that of x; otherwise it has slope 1.
        leaks: flat parts of ReLU, clamp, sigmoid and tanh have a small slope.
        batch: how many images are classified: what leaves torch in that number is a batch, anything else one image.
        bridges: stand-ins for what leaves torch and comes back in another shape, by `bridge_key`.
        opaque: modules that no gradient comes through, though it looks as if one did.

    Attributes:
        replaced: how many calls were given another derivative.
        crossings: what left torch and came back in another shape: (key, rows before, rows after).
    """

    def __init__(
        self,
        *,
        cuts_remainders: bool = True,
        leaks: bool = False,
        batch: int = 0,
        bridges: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        opaque: tuple[nn.Module, ...] = (),
    ) -> None:
        super().__init__()
        self.cuts_remainders, self.leaks, self.batch = cuts_remainders, leaks, batch
        self.bridges, self.opaque = dict(bridges or {}), opaque
        self.replaced = 0
        self.crossings: list[tuple[str, Tensor, Tensor]] = []
        self._left: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        replacement = self._replacement(_plain_name(name), func, args, kwargs)
        if replacement is None:
            return func(*args, **kwargs)
        self.replaced += 1
        return replacement()

    def _replacement(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        if name == "_set_grad_enabled" and not args[0]:
            return lambda: None
        if name in _ENTERING and self._left:
            return lambda: self.enter(func(*args, **kwargs))
        if name == "grad" and getattr(func, "__module__", "") == "torch.autograd":
            return lambda: func(*args, **{**kwargs, "retain_graph": True})
        soft = _companions(args, kwargs)
        if soft:
            return lambda: self._carry(name, func, args, kwargs)
        if not args or not isinstance(args[0], Tensor):
            return None
        if name == "where" and not args[0].is_floating_point():
            return None
        first: Tensor = args[0]
        if name == "searchsorted" and len(args) > 1 and _is_followed(args[1]):
            return lambda: Soft(value=bucket_values(args[1], first)).on(func(*args, **kwargs))
        if not _is_followed(first):
            return None
        return self._of_floats(name, func, first, args, kwargs)

    def _of_floats(
        self, name: str, func: Any, first: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """The replacement of a call whose first argument is a floating tensor with a gradient."""
        if name in ("register_hook", "register_post_accumulate_grad_hook"):
            return lambda: _NoHandle()
        if name == "backward":
            return lambda: func(*args, **{**kwargs, "retain_graph": True})
        if name == "requires_grad_" and not first.is_leaf:
            return lambda: _keep_gradient(first)
        if name in ("detach", "detach_") or (name == "__get__" and func == _GET_DATA):
            return lambda: first.clone()
        if name in _LEAVING:
            return lambda: self._leave(func, first, args, kwargs)
        if name in _STEPS or name in _SIGNS:
            return lambda: _step(name, func, first, args, kwargs)
        if name in _QUOTIENTS or (name in ("div", "divide") and kwargs.get("rounding_mode")):
            return lambda: pass_gradient(func(*args, **kwargs), first / args[1])
        if name in _REMAINDERS and self.cuts_remainders:
            return lambda: func(*args, **kwargs).detach()
        if name in _COMPARISONS and len(args) == 2:
            return lambda: Soft(value=soft_step(first, args[1], _COMPARISONS[name])).on(func(*args))
        if name in _EQUALITIES and len(args) == 2:
            return lambda: Soft(value=soft_equal(first, args[1], _EQUALITIES[name])).on(func(*args))
        if name in _CHOICES:
            return lambda: soft_choice(func(*args, **kwargs), first, name, args[1:], kwargs)
        if name == "bucketize" and len(args) > 1:
            return lambda: Soft(value=bucket_values(first, args[1])).on(func(*args, **kwargs))
        if (whole := _whole_type(name, args, kwargs)) is not None:
            hard = func(*args, **kwargs)
            return lambda: Soft(value=first.clamp(0, 1) if whole is torch.bool else first).on(hard)
        if name == "quantize_per_tensor":
            return lambda: Soft(value=first).on(func(first.detach(), *args[1:], **kwargs))
        if name in _LEAKY and self.leaks:
            return lambda: _leak(func, first, args, kwargs)
        return None

    def ignore(self, *given: Any) -> None:
        """In place of something that would have switched gradients off."""
        self.replaced += 1

    # Companions ------------------------------------------------------------------------------------------------------

    def _carry(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that takes masks, counts or indices with companions: the same result, with their gradient."""
        try:
            return self._carried(name, func, args, kwargs)
        except (RuntimeError, TypeError, IndexError, ValueError):
            return func(*args, **kwargs)  # what it cannot be carried through goes on without it

    def _carried(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first: Any = args[0] if args else None
        own = Soft.of(first)
        if name in _LEAVING and own is not None:
            return self._leave(func, own.value, args, kwargs, asked=first)
        if name == "dequantize" and own is not None:
            return pass_gradient(func(*args, **kwargs), own.value)
        if name in ("argsort", "sort") and own is not None and own.source is not None:
            ranks = func(*args, **kwargs)
            Soft(value=soft_ranks(own.source)).on(ranks if isinstance(ranks, Tensor) else ranks.indices)
            return ranks
        if name == "where" and own is not None:
            return _where(own.value, *_as_floats(args[1:]), hard=func(*args, **kwargs))
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
        if _is_in_place(name):
            return func(first, *_as_floats(args[1:]), **kwargs) if own is None else func(*args, **kwargs)
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

    # What leaves torch and comes back --------------------------------------------------------------------------------

    def _leave(
        self, func: Any, soft: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Any = None
    ) -> Any:
        """NumPy, PIL and lists take what has no gradient; what left is remembered until something comes back."""
        self._left.append(soft)
        return func((soft if asked is None else asked).detach(), *args[1:], **kwargs)

    def enter(self, values: Any) -> Any:
        """What comes into torch from outside, with the gradient of what left: the oldest of its shape, or a bridge."""
        if not isinstance(values, Tensor) or values.requires_grad or not self._left:
            return values
        with torch._C.DisableTorchFunction():  # hooks and `from_numpy` come here while the mode is on
            return self._enter(values)

    def _enter(self, values: Tensor) -> Tensor:
        for place, left in enumerate(self._left):
            if (same := _in_shape(left, values)) is not None:
                del self._left[place]
                return _with_gradient(values, same)
        left = self._left[0]
        rows, after = _rows(left, self.batch), _rows(values, self.batch)
        if left.numel() < 2 or len(rows) != len(after):
            return values
        key = bridge_key(rows, after)
        self.crossings.append((key, rows.detach(), after.detach().to(rows.dtype)))
        del self._left[0]
        if key not in self.bridges:  # what is made of it depends on the images all the same
            return _with_gradient(values, (0 * rows.sum()).expand(values.shape))
        return _with_gradient(values, self.bridges[key](rows).view(values.shape))

    def hear_module(self, module: nn.Module, given: tuple[Any, ...], said: Any) -> Any:
        """A forward hook: what a module makes of images without a gradient, though they had one."""
        inputs = [value for value in given if isinstance(value, Tensor) and value.requires_grad]
        if not inputs or not isinstance(said, Tensor) or not said.is_floating_point():
            return None
        if module not in self.opaque and (said.requires_grad or Soft.of(said) is not None):
            return None
        self.replaced += 1
        self._left.insert(0, inputs[0])
        with torch._C.DisableTorchFunction():
            return self._enter(said.detach())


def bridge_key(before: Tensor, after: Tensor) -> str:
    """A name for what makes rows of one shape of rows of another."""
    return f"{'x'.join(map(str, before.shape[1:]))}-to-{'x'.join(map(str, after.shape[1:]))}"


def _rows(values: Tensor, batch: int) -> Tensor:
    return values if values.ndim > 1 and len(values) == batch else values[None]


def _with_gradient(values: Tensor, soft: Tensor) -> Tensor:
    if values.is_floating_point():
        return pass_gradient(values, soft.to(values))
    Soft(value=soft).on(values)
    return values


def _in_shape(left: Tensor, values: Tensor) -> Tensor | None:
    """What left, in the shape of what came: the same, without axes of length 1, or with channels last or first."""
    if left.numel() != values.numel():
        return None
    short = [size for size in left.shape if size != 1], [size for size in values.shape if size != 1]
    if short[0] == short[1]:
        return left.reshape(values.shape)
    for moved in ([*range(left.ndim - 3), -2, -1, -3], [*range(left.ndim - 3), -1, -3, -2]):
        if left.ndim >= 3 and left.permute(moved).shape == values.shape:
            return left.permute(moved)
    return None


def _plain_name(name: str) -> str:
    """`__gt__` and `gt` are the same; others keep their underscores."""
    bare = name.strip("_")
    return bare if name.startswith("__") and bare in {*_COMPARISONS, *_EQUALITIES} else name


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in ("__iadd__", "__imul__", "__isub__")


class _NoHandle:
    def remove(self) -> None: ...


def _is_followed(value: Any) -> bool:
    """Whether it is a floating tensor that gradients go through."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def _keep_gradient(values: Tensor) -> Tensor:
    """What a model calls a new leaf is none here; it finds `.grad` there all the same."""
    values.retain_grad()
    return values


def _step(name: str, func: Any, first: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Rounding passes the gradient as it is, a sign as a tanh; in place if it was asked for in place."""
    hard, before = func(first.detach().clone(), *args[1:], **kwargs), first.clone()
    passed = pass_gradient(hard, soft_sign(before) if name in _SIGNS else before)
    return first.copy_(passed) if _is_in_place(name) else passed


def _leak(func: Any, first: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What is flat in places, with a little slope everywhere; in place if it was asked for in place."""
    before, is_in_place = first.clone(), _is_in_place(func.__name__) or bool(kwargs.get("inplace"))
    hard: Tensor = func(before.clone(), *args[1:], **kwargs)
    passed = add_gradient(hard, _LEAK * before) if hard.shape == before.shape else hard
    return first.copy_(passed) if is_in_place else passed


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (tuple, list)):
            yield from value
        else:
            yield value


def _companions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(Soft.of(value) is not None for value in _flat(args, kwargs))


def _as_floats(values: Any) -> Any:
    """The same arguments with floating tensors in place of masks, counts and indices that have companions."""
    if isinstance(values, (tuple, list)):
        return type(values)(_as_floats(value) for value in values)
    soft = Soft.of(values)
    return values if soft is None else pass_gradient(values.to(soft.value.dtype), soft.value)


def _where(soft: Tensor, yes: Any, no: Any, *, hard: Tensor) -> Tensor:
    """What a mask chooses, with the gradient of the choice."""
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
    """values[mask] = value, or values[rows, index] = value."""
    first, key, value = args
    soft = Soft.of(key)
    before = first.detach().clone()
    func(first, key, _as_floats(value) if first.is_floating_point() else value)
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
    """0 and 1 stay whole numbers: a companion says how near each place was."""
    if soft.weights is not None and soft.weights.shape == hard.shape:
        near = soft.weights
    else:
        places = torch.arange(hard.shape[-1], device=values.device, dtype=soft.value.dtype)
        near = torch.softmax(-((soft.value[..., None] - places) ** 2), dim=-1)
    return Soft(value=near).on(hard)


def _index_of(name: str, args: tuple[Any, ...]) -> tuple[int, int | None] | None:
    """Where the index with a companion stands among the arguments of a lookup, and in which place of a tuple."""
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
    """A look into a table, with the gradient of the place that is looked at."""
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
        return add_gradient(hard, expectation(ask, index, soft.weights))
    return add_gradient(hard, table_slope(ask, index, soft.value, size, hard))


def _carried_weights(
    name: str, func: Any, own: Soft | None, args: tuple[Any, ...], kwargs: dict[str, Any], hard: Tensor
) -> Tensor | None:
    """Which places might have been chosen, after a call that moves or copies indices."""
    if own is None or own.weights is None:
        return None
    if name in _UNCHANGED or (name in ("to", "long", "int", "type") and hard.shape == args[0].shape):
        return own.weights
    if name not in _SHAPES and not (name == "__getitem__" and not isinstance(args[1], Tensor)):
        return None
    parts = [func(part, *args[1:], **kwargs) for part in own.weights.unbind(-1)]
    return torch.stack(parts, dim=-1)


def _carried_value(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hard: Tensor) -> Any:
    """The floating stand-in of a call's result."""
    floats: Any = _as_floats(args)
    first: Any = floats[0] if floats else None
    other: Any = floats[1] if len(floats) > 1 else None
    first_soft = Soft.of(args[0]) if args else None
    if first_soft is not None and first_soft.weights is not None and name in ("eq", "ne"):
        hits = expectation(lambda places: func(places, args[1]).to(first_soft.value.dtype), *_spread(args))
        return hits
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
    if name in _QUOTIENTS or (name in ("div", "divide") and kwargs.get("rounding_mode")):
        return first / other
    if name in _REMAINDERS:
        return first if isinstance(first, Tensor) else other
    if name in _COMPARISONS:
        return soft_step(first, other, _COMPARISONS[name])
    if name in _EQUALITIES:
        return soft_equal(first, other, _EQUALITIES[name])
    if name in _CASTS or name in ("to", "type", "float", "double", "half", "type_as"):
        return first
    if name == "view" and len(args) == 2 and isinstance(args[1], torch.dtype):
        return first
    options = {key: _as_floats(value) for key, value in kwargs.items() if key != "dtype"}
    return func(*floats, **options)


def _spread(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """An index and its weights in the shape that a comparison with another tensor has."""
    soft = Soft.of(args[0])
    assert soft is not None
    assert soft.weights is not None
    return args[0], soft.weights


def _whole_type(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The whole-number type that a call casts to, if it does; also the bits of a number seen as a whole one."""
    if name in _CASTS:
        return _CASTS[name]
    if name not in ("to", "type", "view"):
        return None
    named = [*args[1:], *kwargs.values()]
    return next((value for value in named if isinstance(value, torch.dtype) and value in _WHOLE), None)


class _Context:
    """What a custom function's forward may ask of its context, when only the forward is of interest."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def mark_dirty(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


@contextmanager
def _forwards_alone(mode: StraightThrough) -> Iterator[None]:
    """Custom functions are differentiated by what their forward computes; what their backward says is not asked."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        mode.replaced += 1
        if cls.setup_context is not torch.autograd.Function.setup_context:
            return cls.forward(*args, **kwargs)
        return cls.forward(_Context(len(args)), *args, **kwargs)

    # One class below the public one: `apply` may have been taken from a subclass long ago, but still ends up there.
    below: Any = torch.autograd.function._SingleLevelFunction
    below.apply = classmethod(apply)
    try:
        yield
    finally:
        del below.apply


@contextmanager
def _without_backward_hooks(model: nn.Module, mode: StraightThrough) -> Iterator[None]:
    """The hooks that modules put on gradients are taken off for a while."""
    kept = []
    for module in model.modules():
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            if hooks:
                kept.append((hooks, dict(hooks)))
                hooks.clear()
                mode.replaced += 1
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def straight_through(
    model: nn.Module | None = None, *, dead: tuple[str, ...] = (), **options: Any
) -> Iterator[StraightThrough]:
    """Everything computed inside passes gradients; what is computed stays as it is.

    Args:
        model: whose modules' hooks on gradients are taken off meanwhile, and whose modules may be opaque.
        dead: names of its modules that count as opaque.
        options: of `StraightThrough`.
    """
    opaque = () if model is None else tuple(model.get_submodule(name) for name in dead)
    mode = StraightThrough(opaque=opaque, **options)
    from_numpy, inference = torch.from_numpy, torch.autograd.grad_mode.inference_mode
    with ExitStack() as stack:
        stack.enter_context(_forwards_alone(mode))
        stack.enter_context(_replaced(torch, "from_numpy", lambda array: mode.enter(from_numpy(array))))
        for name in ("__enter__", "__exit__"):
            stack.enter_context(_replaced(inference, name, mode.ignore))
        if model is not None:
            stack.enter_context(_without_backward_hooks(model, mode))
            handle = nn.modules.module.register_module_forward_hook(mode.hear_module)
            stack.callback(handle.remove)
        stack.enter_context(mode)
        yield mode


def can_pass_through(model: nn.Module, images: Tensor, **options: Any) -> bool:
    """Whether the model hides a derivative that this finds, and says the same of these images when it is passed.

    Both passes draw the same random numbers.
    """
    points = images.detach().clone().requires_grad_(True)
    # A model may do anything with what it is given here; whatever it raises means no.
    try:
        with torch.no_grad(), forked_generators(images.device, 0):
            plain = model(images)
        straight = straight_through(model, batch=len(images), **options)
        with torch.enable_grad(), forked_generators(images.device, 0), straight as mode:
            passed = model(points)
    except Exception:
        return False
    if not (mode.replaced and isinstance(passed, Tensor) and passed.requires_grad):
        return False
    same = torch.allclose(full_precision(plain), full_precision(passed.detach()), rtol=1e-3, atol=1e-4)
    return bool(same)


@dataclass(frozen=True, kw_only=True)
class Passing(WrappedView):
    """Another view, with the gradient that nothing hides.

    Attributes:
        cuts_remainders, leaks: as `StraightThrough` takes them.
        dead: names of modules that count as opaque.
    """

    name: str = "straight through"
    cuts_remainders: bool = True
    leaks: bool = False
    dead: tuple[str, ...] = ()

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        view = find_view(self.view)
        if not torch.is_grad_enabled():
            return view.look(model, images, aim)
        options = {"cuts_remainders": self.cuts_remainders, "leaks": self.leaks, "batch": len(images)}
        with straight_through(model, dead=self.dead, **options):
            look = view.look(model, images, aim)
        return Look(look.losses, None if look.scores is None else look.scores.detach())
