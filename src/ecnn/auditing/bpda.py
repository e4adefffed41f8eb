"""Gradients through what hides them: the same forward pass, differentiated as if nothing in it were rounded or cut.

Athalye, Carlini & Wagner (2018) replace what has no useful derivative by something near that has one, on the way back
only (BPDA), by hand for each defence. Here every call that a model makes is watched instead, wherever in its code it
stands, so that the model need not be known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ecnn.attacks.views import Aim, Look, WrappedView, find_view
from ecnn.backbones import full_precision

_SOFTNESS = (
    0.1  # width of the step that stands for a comparison on the way back, in units of what is compared
)
_STEPS = ("round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "heaviside")
_COMPARISONS = {"gt": 1.0, "ge": 1.0, "lt": -1.0, "le": -1.0}
_COMPARISONS |= {f"__{name}__": sign for name, sign in _COMPARISONS.items()}
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_CASTS = {
    "byte": torch.uint8,
    "char": torch.int8,
    "short": torch.int16,
    "int": torch.int32,
    "long": torch.int64,
}


class StraightThrough(TorchFunctionMode):
    """While it is on, rounding, detaching, comparing and casting to whole numbers give what they always give, but pass
    gradients: rounding and detaching as if they were not there, a comparison as a soft step.

    `torch.no_grad` has no effect, and neither have hooks on gradients. What was cast to whole numbers stays a floating
    tensor of whole values, so a model that uses it as an index fails; `can_pass_through` finds out.

    Attributes:
        replaced: how many calls were given another derivative.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replaced = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        replacement = self._replacement(name, func, args, kwargs)
        if replacement is None:
            return func(*args, **kwargs)
        self.replaced += 1
        return replacement()

    def _replacement(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        if name == "_set_grad_enabled" and not args[0]:
            return lambda: None
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return None
        first: Tensor = args[0]
        if name == "register_hook":
            return lambda: _NoHandle()
        if name == "detach" or (name == "__get__" and func == _GET_DATA):
            return lambda: first.clone()
        if name in _STEPS:
            return lambda: _pass(func(*args, **kwargs), first)
        if name in _COMPARISONS and len(args) == 2:
            return lambda: _soften(func(*args), first, args[1], _COMPARISONS[name])
        if (whole := _whole_type(name, args, kwargs)) is not None:
            return lambda: _pass(first.detach().to(whole).to(first.dtype), first)
        if name == "one_hot":
            return lambda: _one_hot(first, *args[1:], **kwargs)
        if name == "where" and len(args) == 3:
            return lambda: _where(first, args[1], args[2])
        return None


_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class _NoHandle:
    def remove(self) -> None: ...


def _pass(hard: Tensor, soft: Tensor) -> Tensor:
    """The values of one and the gradient of the other."""
    return hard.detach() + (soft - soft.detach())


def _soften(hard: Tensor, value: Tensor, bound: Any, sign: float) -> Tensor:
    """A comparison with the derivative of a sigmoid, whose width fits each image: what is compared has any scale."""
    lead = sign * (value - bound)
    sizes = lead.detach().abs()
    mean = sizes.mean(dim=tuple(range(1, sizes.ndim)), keepdim=True) if sizes.ndim > 1 else sizes.mean()
    width = _SOFTNESS * mean.clamp_min(torch.finfo(lead.dtype).tiny)
    return _pass(hard.to(value.dtype), torch.sigmoid(lead / width))


def _whole_type(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The whole-number type that a call casts to, if it does."""
    if name in _CASTS:
        return _CASTS[name]
    if name not in ("to", "type"):
        return None
    named = [*args[1:], *kwargs.values()]
    return next((value for value in named if isinstance(value, torch.dtype) and value in _WHOLE), None)


def _one_hot(values: Tensor, num_classes: int = -1) -> Tensor:
    hard = torch.nn.functional.one_hot(values.detach().long(), num_classes).to(values.dtype)
    places = torch.arange(hard.shape[-1], device=values.device, dtype=values.dtype)
    return _pass(hard, (1 - (values[..., None] - places).abs()).clamp_min(0))


def _where(condition: Tensor, yes: Any, no: Any) -> Tensor:
    """What a mask chooses; the mask is a floating tensor here and gets the gradient of the choice."""
    hard: Tensor = torch.where(condition.detach() > 0.5, yes, no)
    yes, no = (value.detach() if isinstance(value, Tensor) else value for value in (yes, no))
    chosen: Tensor = hard + (condition - condition.detach()) * (yes - no)
    return chosen


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
def straight_through() -> Iterator[StraightThrough]:
    """Everything computed inside passes gradients; what is computed stays as it is."""
    mode = StraightThrough()
    with _forwards_alone(mode), mode:
        yield mode


def can_pass_through(model: nn.Module, images: Tensor) -> bool:
    """Whether the model hides a derivative that this finds, and says the same of these images when it is passed."""
    with torch.no_grad():
        plain = model(images)
    points = images.detach().clone().requires_grad_(True)
    # A model may do anything with what it is given here; whatever it raises means no.
    try:
        with torch.enable_grad(), straight_through() as mode:
            passed = model(points)
    except Exception:
        return False
    if not (mode.replaced and isinstance(passed, Tensor) and passed.requires_grad):
        return False
    same = torch.allclose(full_precision(plain), full_precision(passed.detach()), rtol=1e-4, atol=1e-5)
    return bool(same)


@dataclass(frozen=True, kw_only=True)
class Passing(WrappedView):
    """Another view, with the gradient that nothing hides."""

    name: str = "straight through"

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        view = find_view(self.view)
        if not torch.is_grad_enabled():
            return view.look(model, images, aim)
        with straight_through():
            look = view.look(model, images, aim)
        return Look(look.losses, None if look.scores is None else look.scores.detach())
