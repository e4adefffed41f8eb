"""Gradients through what hides them: the same forward pass, differentiated as if nothing in it were rounded or cut.

Athalye, Carlini & Wagner (2018) replace what has no useful derivative by something near that has one, on the way back
only (BPDA), by hand for each defence. Here every call that a model makes is watched instead, wherever in its code it
stands, so that the model need not be known. What is computed stays as it is. Masks, counts and indices stay what they
are too, and carry a soft companion from which gradients come where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ecnn.asking import full_precision
from ecnn.attacks.randomness import forked_generators
from ecnn.attacks.views import Aim, Look, WrappedView, find_view
from ecnn.auditing.soft_calls import (
    CASTS,
    COMPARISONS,
    EQUALITIES,
    REMAINDERS,
    carry,
    has_companion,
    is_in_place,
    is_whole_quotient,
)
from ecnn.auditing.soft_values import (
    Soft,
    add_gradient,
    bucket_values,
    pass_gradient,
    soft_choice,
    soft_equal,
    soft_sign,
    soft_step,
)

_STEPS = ("round", "floor", "ceil", "trunc", "fix", "round_", "floor_", "ceil_", "trunc_")
_SIGNS = ("sign", "sgn", "heaviside", "sign_")
_CHOICES = ("argmax", "argmin", "argsort", "topk", "sort", "kthvalue", "median", "nanmedian", "max", "min")
_LEAVING = ("numpy", "__array__", "tolist", "item")
_ENTERING = ("tensor", "as_tensor", "asarray", "new_tensor", "from_numpy")
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
_LEAK = 0.2  # slope of what is flat, where flat parts get one
_NUMBERS = (
    "item",
    "__float__",
    "__int__",
    "__bool__",
    "__complex__",
    "__index__",
)  # what makes one of Python's
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
        stays_flat: rounding and casting keep their own slope, which is 0: then x - round(x) has that of x.
        batch: how many images are classified: what leaves torch in that number is a batch, anything else one image.
        bridges: stand-ins for what leaves torch and comes back in another shape, by `bridge_key`.
        opaque: modules that no gradient comes through, though it looks as if one did.

    Attributes:
        replaced: how many calls were given another derivative.
        rounded: how many of these round or cast.
        crossings: what left torch and came back in another shape: (key, rows before, rows after).
    """

    def __init__(
        self,
        *,
        cuts_remainders: bool = True,
        leaks: bool = False,
        stays_flat: bool = False,
        batch: int = 0,
        bridges: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        opaque: tuple[nn.Module, ...] = (),
    ) -> None:
        super().__init__()
        self.cuts_remainders, self.leaks, self.stays_flat, self.batch = (
            cuts_remainders,
            leaks,
            stays_flat,
            batch,
        )
        self.bridges, self.opaque = dict(bridges or {}), opaque
        self.replaced = self.rounded = 0
        self.crossings: list[tuple[str, Tensor, Tensor]] = []
        self._left: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        replacement = self._replacement(plain_name(name), func, args, kwargs)
        if replacement is None:
            if (
                name in _NUMBERS and args[0].requires_grad
            ):  # where the model has detached it; torch warns otherwise
                args = (args[0].detach(), *args[1:])
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
        if has_companion(args, kwargs):
            return lambda: self._carry(name, func, args, kwargs)
        if not args or not isinstance(args[0], Tensor):
            return None
        if name == "where" and not args[0].is_floating_point():
            return None
        first: Tensor = args[0]
        if name == "searchsorted" and len(args) > 1 and is_followed(args[1]):
            return lambda: Soft(value=bucket_values(args[1], first)).on(func(*args, **kwargs))
        if not is_followed(first):
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
        if name in _STEPS:
            return lambda: _step(func, first, self._rounded(first.clone()), args, kwargs)
        if name in _SIGNS:
            return lambda: _step(func, first, soft_sign(first.clone()), args, kwargs)
        if is_whole_quotient(name, kwargs):
            return lambda: pass_gradient(func(*args, **kwargs), first / args[1])
        if name in REMAINDERS and self.cuts_remainders:
            return lambda: func(*args, **kwargs).detach()
        if name in COMPARISONS and len(args) == 2:
            return lambda: Soft(value=soft_step(first, args[1], COMPARISONS[name])).on(func(*args))
        if name in EQUALITIES and len(args) == 2:
            return lambda: Soft(value=soft_equal(first, args[1], EQUALITIES[name])).on(func(*args))
        if name in _CHOICES:
            return lambda: soft_choice(func(*args, **kwargs), first, name, args[1:], kwargs)
        if name == "bucketize" and len(args) > 1:
            return lambda: Soft(value=bucket_values(first, args[1])).on(func(*args, **kwargs))
        if (whole := _whole_type(name, args, kwargs)) is not None:
            hard = func(*args, **kwargs)
            return lambda: Soft(value=first.clamp(0, 1) if whole is torch.bool else self._rounded(first)).on(
                hard
            )
        if name == "quantize_per_tensor":
            return lambda: Soft(value=first).on(func(first.detach(), *args[1:], **kwargs))
        if name in _LEAKY and self.leaks:
            return lambda: _leak(func, first, args, kwargs)
        return None

    def _rounded(self, values: Tensor) -> Tensor:
        """What stands for rounded values on the way back."""
        self.rounded += 1
        return values.detach() + 0 * values if self.stays_flat else values

    def ignore(self, *given: Any) -> None:
        """In place of something that would have switched gradients off."""
        self.replaced += 1

    # Companions ------------------------------------------------------------------------------------------------------

    def _carry(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call on what has companions: the same result, with their gradient where it can be carried on."""
        try:
            own = Soft.of(args[0]) if args else None
            if name in _LEAVING and own is not None:
                return self._leave(func, own.value, args, kwargs, asked=args[0])
            return carry(name, func, args, kwargs)
        except (RuntimeError, TypeError, IndexError, ValueError):
            return func(*args, **kwargs)

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


def plain_name(name: str) -> str:
    """`__gt__` and `gt` are the same; others keep their underscores."""
    bare = name.strip("_")
    return bare if name.startswith("__") and bare in {*COMPARISONS, *EQUALITIES} else name


class _NoHandle:
    def remove(self) -> None: ...


def is_followed(value: Any) -> bool:
    """Whether it is a floating tensor that gradients go through."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def _keep_gradient(values: Tensor) -> Tensor:
    """What a model calls a new leaf is none here; it finds `.grad` there all the same."""
    values.retain_grad()
    return values


def _step(func: Any, first: Tensor, soft: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Rounding passes the gradient of what stands for it, a sign that of a tanh; in place if it was asked for so."""
    passed = pass_gradient(func(first.detach().clone(), *args[1:], **kwargs), soft)
    return first.copy_(passed) if is_in_place(func.__name__) else passed


def _leak(func: Any, first: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What is flat in places, with a little slope everywhere; in place if it was asked for in place."""
    before, changes_first = first.clone(), is_in_place(func.__name__) or bool(kwargs.get("inplace"))
    hard: Tensor = func(before.clone(), *args[1:], **kwargs)
    passed = add_gradient(hard, _LEAK * before) if hard.shape == before.shape else hard
    return first.copy_(passed) if changes_first else passed


def _whole_type(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The whole-number type that a call casts to, if it does; also the bits of a number seen as a whole one."""
    if name in CASTS:
        return CASTS[name]
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
def _keeping_no_graph(model: nn.Module) -> Iterator[None]:
    """Afterwards no tensor that a module keeps for itself has a graph, unless it had one before.

    What a model detaches and keeps, as a mean over questions, is not detached meanwhile.
    """
    before = {id(value) for _, _, value in _kept_tensors(model) if value.requires_grad}
    try:
        yield
    finally:
        for module, name, value in _kept_tensors(model):
            if value.grad_fn is not None and id(value) not in before:
                setattr(module, name, value.detach())


def _kept_tensors(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Buffers and plain attributes of all modules that are tensors."""
    return [
        (module, name, value)
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for name, value in (*module._buffers.items(), *vars(module).items())
        if isinstance(value, Tensor)
    ]


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
            stack.enter_context(_keeping_no_graph(model))
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
