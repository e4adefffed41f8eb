"""Order statistics such as max, median and top-k with a spread gradient: one that reaches all values close to them.

The gradient of a maximum reaches one value only. An attack that has to bring the largest of a thousand pixels below a
threshold would lower them one by one, in a step each. The spread gradient lowers all that would soon be the largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: How far the spread gradient reaches, as a share of the mean distance of all values from the chosen one.
_REACH = 0.1
_MOST = 2**14  # distances (chosen values times all values) per image; larger calls keep torch's gradient
_OF_SEVERAL = ("sort", "topk")
_OF_ONE = ("amax", "amin", "max", "min", "kthvalue", "median", "nanmedian", "quantile", "nanquantile")
_LONGEST = ("norm", "vector_norm", "linalg_vector_norm")
ORDERED = (*_OF_SEVERAL, *_OF_ONE, *_LONGEST)


@dataclass(eq=False)
class Slopes:
    """A switch: whether backward passes use the spread gradients, or those of torch."""

    are_spread: bool = False


def with_slopes(name: str, made: Any, args: tuple[Any, ...], kwargs: dict[str, Any], slopes: Slopes) -> Any:
    """The result of a call, with values that have both gradients, torch's and the spread one.

    Calls that choose no value by its order, such as a Euclidean norm or max(a, b), and too large ones come back as
    they are.

    Args:
        name: of the function that was called, one of `ORDERED`.
        made: its result.
        args, kwargs: its arguments.
        slopes: decides in each backward pass which of the two gradients is used.
    """
    values, given, dims = made if isinstance(made, Tensor) else made[0], args[0], _axes(name, args, kwargs)
    if name in _LONGEST and _argument(args, kwargs, 1, ("ord", "p"), default=2) not in (math.inf, -math.inf):
        return made
    if dims is None or kwargs.get("out") is not None:
        return made
    is_one = name not in _OF_SEVERAL
    rest = [given.shape[dim] for dim in range(given.ndim) if dim not in dims]
    many = math.prod(given.shape[dim] for dim in dims)
    taken = 1 if is_one else values.shape[dims[0]]
    if many * taken * max(1, math.prod(rest[1:])) > _MOST or (is_one and values.numel() != math.prod(rest)):
        return made
    # `StraightThrough`, if it is on, removes hooks and `detach` from the calls that it sees: here they are needed.
    with torch._C.DisableTorchFunction():
        among = given.abs() if name in _LONGEST else given
        among = among.movedim(dims, tuple(range(-len(dims), 0))).reshape(*rest, many, 1)
        found = values.detach()
        found = found.reshape(*rest, 1, 1) if is_one else found.movedim(dims[0], -1)[..., None, :]
        shares = _closeness((among.detach() - found).abs())
        spread = (shares * among.where(among.isfinite(), 0.0)).sum(dim=-2)
        spread = spread.reshape(values.shape) if is_one else spread.movedim(-1, dims[0])
        known = _with_both(values, spread, slopes)
    return known if isinstance(made, Tensor) else type(made)((known, *made[1:]))


def _with_both(values: Tensor, spread: Tensor, slopes: Slopes) -> Tensor:
    """The values, unchanged; the gradient goes to `values` or to `spread`, as `slopes` says in the backward pass."""
    own, near = values.clone(), spread.clone()
    own.register_hook(lambda slope: torch.zeros_like(slope) if slopes.are_spread else slope)  # type: ignore[no-untyped-call]
    near.register_hook(lambda slope: slope if slopes.are_spread else torch.zeros_like(slope))  # type: ignore[no-untyped-call]
    return own + (near - near.detach())


def _closeness(apart: Tensor) -> Tensor:
    """(..., many, taken) weights that sum to 1 over `many`, fall with the distance and are 0 where it is infinite."""
    is_near = apart.isfinite()
    mean = apart.where(is_near, 0.0).sum(dim=-2, keepdim=True) / is_near.sum(dim=-2, keepdim=True)
    return torch.softmax(-apart / (_REACH * mean).clamp_min(1e-12), dim=-2).nan_to_num(0.0)


def _axes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """The axes along which a call compares values (if it names none, its default); None for calls like max(a, b)."""
    place = 2 if name in ("topk", "kthvalue", "quantile", "nanquantile", *_LONGEST) else 1
    usual = -1 if name in (*_OF_SEVERAL, "kthvalue") else None
    dims = _argument(args, kwargs, place, ("dim", "axis"), default=usual)
    dims = () if dims is None else tuple(dims) if isinstance(dims, list | tuple) else (dims,)
    if "other" in kwargs or not args[0].ndim or not all(type(dim) is int for dim in dims):
        return None
    return tuple(dim % args[0].ndim for dim in dims or range(args[0].ndim))


def _argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, names: tuple[str, ...], *, default: Any
) -> Any:
    named = [kwargs[name] for name in names if name in kwargs]
    return named[0] if named else args[place] if len(args) > place else default
