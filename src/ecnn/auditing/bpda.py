"""Straight-through gradients: the forward pass is unchanged, the backward pass ignores what hides gradients.

Athalye, Carlini & Wagner (2018) replace an operation without a useful derivative by a similar one that has a
derivative, in the backward pass only (BPDA), by hand for each defence. Here a torch function mode intercepts every
torch call of a model instead, so that nothing need be known of its code. Computed values do not change. Masks, counts
and indices do not change either; each carries a soft companion (`Soft`), which supplies the gradient when it is used.
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
_LEAK = 0.2  # slope added to activations, with `leaks`
_NUMBERS = (
    "item",
    "__float__",
    "__int__",
    "__bool__",
    "__complex__",
    "__index__",
)  # calls that turn a tensor into a Python number
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class StraightThrough(TorchFunctionMode):
    """A torch function mode in which calls that hide derivatives return their usual values, but pass gradients.

    - Rounding, casting and `detach` pass the gradient as if they were not there.
    - A comparison has the gradient of a soft step, and a sign that of a tanh.
    - The index of the largest value, of the k largest or of the median has that of a softmax over all places.
    - A table lookup has the slope of the table, or the mean over the places that might have been chosen.
    - A value that leaves torch (for NumPy, PIL or a list) and comes back in the same shape passes the gradient.

    `torch.no_grad`, `torch.inference_mode` and hooks on gradients have no effect. Gradients that the model takes itself
    are constants, unless it takes them with create_graph=True.

    Args:
        cuts_remainders: x % q gets slope 0, so that x - x % q has the slope of x; otherwise x % q has slope 1.
        leaks: adds a slope of 0.2 to ReLU, clamp, sigmoid, tanh and the like, so that flat parts pass a gradient.
        stays_flat: rounding and casting keep their true slope of 0, so that x - round(x) has the slope of x.
        batch: how many images are classified. Values outside torch count as a batch if there are that many, and
            otherwise as one image.
        bridges: stand-ins for computations outside torch that change the shape, by `bridge_key`.
        opaque: modules whose own gradient is not used: they are treated like computations outside torch.

    Attributes:
        replaced: how many calls got another derivative.
        rounded: how many of these round, or cast to integers.
        crossings: computations outside torch that changed the shape: (key, rows before, rows after).
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
            # The model may have detached it, which has no effect here; torch would warn.
            if name in _NUMBERS and args[0].requires_grad:
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
        """The replacement of a call whose first argument is a floating tensor with a gradient; None to leave it."""
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
        """The tensor whose gradient rounded values get: the values themselves, or these with slope 0."""
        self.rounded += 1
        return values.detach() + 0 * values if self.stays_flat else values

    def ignore(self, *given: Any) -> None:
        """Does nothing, in place of a call that would switch gradients off or on again."""
        self.replaced += 1

    # Companions ------------------------------------------------------------------------------------------------------

    def _carry(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call on values with soft companions; its result gets their gradient where `carry` can pass it on."""
        try:
            own = Soft.of(args[0]) if args else None
            if name in _LEAVING and own is not None:
                return self._leave(func, own.value, args, kwargs, asked=args[0])
            return carry(name, func, args, kwargs)
        except (RuntimeError, TypeError, IndexError, ValueError):
            return func(*args, **kwargs)

    # Values that leave torch and come back ---------------------------------------------------------------------------

    def _leave(
        self, func: Any, soft: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Any = None
    ) -> Any:
        """Makes a call that leaves torch on the detached tensor, and remembers `soft` until a value comes back."""
        self._left.append(soft)
        return func((soft if asked is None else asked).detach(), *args[1:], **kwargs)

    def enter(self, values: Any) -> Any:
        """A value that enters torch, with the gradient of one that left: the oldest in its shape, or by a bridge."""
        if not isinstance(values, Tensor) or values.requires_grad or not self._left:
            return values
        with torch._C.DisableTorchFunction():  # called by hooks and `from_numpy` while the mode is on
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
        if key not in self.bridges:  # slope 0, but it stays connected to the images
            return _with_gradient(values, (0 * rows.sum()).expand(values.shape))
        return _with_gradient(values, self.bridges[key](rows).view(values.shape))

    def hear_module(self, module: nn.Module, given: tuple[Any, ...], said: Any) -> Any:
        """A forward hook: reconnects the output of a module to its input if the module is opaque or cut the graph."""
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
    """The name of a bridge, from the shapes of its rows: "3x32x32-to-192" for images to vectors."""
    return f"{'x'.join(map(str, before.shape[1:]))}-to-{'x'.join(map(str, after.shape[1:]))}"


def _rows(values: Tensor, batch: int) -> Tensor:
    return values if values.ndim > 1 and len(values) == batch else values[None]


def _with_gradient(values: Tensor, soft: Tensor) -> Tensor:
    if values.is_floating_point():
        return pass_gradient(values, soft.to(values))
    Soft(value=soft).on(values)
    return values


def _in_shape(left: Tensor, values: Tensor) -> Tensor | None:
    """`left` in the shape of `values`, by axes of length 1 or channels moved last or first; None if neither helps."""
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
    """The name without underscores if it is a comparison (`gt` for `__gt__`); other names stay as they are."""
    bare = name.strip("_")
    return bare if name.startswith("__") and bare in {*COMPARISONS, *EQUALITIES} else name


class _NoHandle:
    def remove(self) -> None: ...


def is_followed(value: Any) -> bool:
    """Whether it is a floating tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def _keep_gradient(values: Tensor) -> Tensor:
    """`requires_grad_` on a tensor that is no leaf here: it stays in the graph, and the model can read its `.grad`."""
    values.retain_grad()
    return values


def _step(func: Any, first: Tensor, soft: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The result of a rounding or sign call, with the gradient of `soft`; in place if the call is."""
    passed = pass_gradient(func(first.detach().clone(), *args[1:], **kwargs), soft)
    return first.copy_(passed) if is_in_place(func.__name__) else passed


def _leak(func: Any, first: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The result of an activation with a slope of `_LEAK` added everywhere; in place if the call is."""
    before, changes_first = first.clone(), is_in_place(func.__name__) or bool(kwargs.get("inplace"))
    hard: Tensor = func(before.clone(), *args[1:], **kwargs)
    passed = add_gradient(hard, _LEAK * before) if hard.shape == before.shape else hard
    return first.copy_(passed) if changes_first else passed


def _whole_type(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The integer or bool type that a call casts to, or reads bits as with `view`; None if it does neither."""
    if name in CASTS:
        return CASTS[name]
    if name not in ("to", "type", "view"):
        return None
    named = [*args[1:], *kwargs.values()]
    return next((value for value in named if isinstance(value, torch.dtype) and value in _WHOLE), None)


class _Context:
    """A stand-in for the context of a custom autograd function of which only the forward runs."""

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
    """Inside, custom autograd functions are differentiated through their forward; their own backward is not called."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        mode.replaced += 1
        if cls.setup_context is not torch.autograd.Function.setup_context:
            return cls.forward(*args, **kwargs)
        return cls.forward(_Context(len(args)), *args, **kwargs)

    # The base class of `Function`: an `apply` that a model has stored long ago still ends up there.
    below: Any = torch.autograd.function._SingleLevelFunction
    below.apply = classmethod(apply)
    try:
        yield
    finally:
        del below.apply


@contextmanager
def _without_backward_hooks(model: nn.Module, mode: StraightThrough) -> Iterator[None]:
    """Inside, the backward hooks of the model's modules are removed."""
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
    """Afterwards detaches tensors that modules hold, unless they required a gradient before.

    `detach` has no effect inside, so what a model detaches and stores, such as a running mean, would keep its graph.
    """
    before = {id(value) for _, _, value in _kept_tensors(model) if value.requires_grad}
    try:
        yield
    finally:
        for module, name, value in _kept_tensors(model):
            if value.grad_fn is not None and id(value) not in before:
                setattr(module, name, value.detach())


def _kept_tensors(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """(module, name, tensor) of all buffers and plain attributes that are tensors, except in TorchScript modules."""
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
    """Inside, everything computed passes gradients, and computed values stay as they are: see `StraightThrough`.

    Args:
        model: the model that is asked inside. Its backward hooks are removed meanwhile, and modules through which no
            gradient comes are bridged; with None neither happens.
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
    """Whether `straight_through` replaces a derivative of the model, yields a gradient and leaves its scores the same.

    Both passes draw the same random numbers.
    """
    points = images.detach().clone().requires_grad_(True)
    # A model may fail in any way on the tensors that it gets here; any error means no.
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
    """Another view with straight-through gradients; values, and passes without a gradient, stay as they are.

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
