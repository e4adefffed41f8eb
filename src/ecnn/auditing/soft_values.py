"""Soft companions of masks, counts and indices: floating tensors with the gradient that these types cannot have."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

_SOFTNESS = 0.1  # width of the sigmoid that replaces a comparison, as a share of the mean difference compared
_CHOICE = 0.3  # temperature of the softmax that replaces a choice, in standard deviations of the values to choose from
_MOST_PLACES = 1024  # a choice among more gets no companion
_COMPANION = "_ecnn_soft"


class Soft:
    """The companion of a tensor of whole numbers or booleans, which replaces it in the backward pass.

    Args:
        value: floating tensor of the same shape; None for an index, whose weights give it.
        weights: only of an index: (*shape, place) weights of the places that might have been chosen, or a function
            that returns them when they are first needed. They are large, and most indices never need them.
        source: only of a full sort along the last axis: the sorted values, since sorting their order gives their ranks.
    """

    def __init__(
        self,
        *,
        value: Tensor | None = None,
        weights: Tensor | Callable[[], Tensor] | None = None,
        source: Tensor | None = None,
    ) -> None:
        self._value, self._weights, self.source = value, weights, source

    @cached_property
    def weights(self) -> Tensor | None:
        """(*shape, place) weights of an index; None for a mask or a number."""
        return self._weights() if callable(self._weights) else self._weights

    @cached_property
    def value(self) -> Tensor:
        """Floating tensor of the same shape as the original; for an index, the weighted mean of the places."""
        if self._value is not None:
            return self._value
        assert self.weights is not None
        places = torch.arange(self.weights.shape[-1], device=self.weights.device, dtype=self.weights.dtype)
        return (self.weights * places).sum(dim=-1)

    def on(self, hard: Tensor) -> Tensor:
        """Attaches this companion to a tensor, and returns the tensor."""
        setattr(hard, _COMPANION, self)
        return hard

    @staticmethod
    def of(tensor: Any) -> Soft | None:
        """The companion of a tensor, if it has one."""
        return getattr(tensor, _COMPANION, None) if isinstance(tensor, Tensor) else None


def pass_gradient(hard: Tensor, soft: Tensor) -> Tensor:
    """The values of `hard` with the gradient of `soft` alone (straight through)."""
    return add_gradient(hard.detach(), soft)


def add_gradient(hard: Tensor, soft: Tensor) -> Tensor:
    """The values of `hard`, with its own gradient plus that of `soft`."""
    soft = torch.nan_to_num(soft)
    return hard + (soft - soft.detach()).to(hard.dtype)


def align(soft: Tensor, like: Tensor) -> Tensor:
    """`soft` with axes of length 1 appended if its shape is the beginning of `like`'s; otherwise unchanged."""
    if soft.ndim < like.ndim and soft.shape == like.shape[: soft.ndim]:
        return soft.reshape(*soft.shape, *[1] * (like.ndim - soft.ndim))
    return soft


def _width(sizes: Tensor) -> Tensor:
    """The mean absolute value per image, or of all if there is one axis: it adapts soft steps to any scale."""
    sizes = sizes.detach().abs()
    mean = sizes.mean(dim=tuple(range(1, sizes.ndim)), keepdim=True) if sizes.ndim > 1 else sizes.mean()
    return mean.clamp_min(torch.finfo(sizes.dtype).tiny)


def soft_step(value: Any, bound: Any, sign: float) -> Tensor:
    """A comparison as a sigmoid of the difference, in units of its mean absolute value in each image."""
    lead = sign * (value - bound)
    return torch.sigmoid(lead / (_SOFTNESS * _width(lead)))


def soft_sign(value: Tensor) -> Tensor:
    """A sign as a tanh, so that values far from zero have a smaller gradient."""
    return torch.tanh(value / _width(value))


def soft_equal(value: Any, other: Any, sign: float) -> Tensor:
    """Equality as a peak: 1 at equal values, falling exponentially; inequality (sign -1) as 1 minus that."""
    apart = (value - other).abs()
    near = torch.exp(-apart / _width(apart))
    return near if sign > 0 else 1 - near


def soft_choice(said: Any, first: Tensor, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of argmax, topk, sort, median and the like, with a companion for its indices.

    The companion of an index is a softmax over all places, by how near their values are to the chosen one (SoftSort,
    Prillo & Eisenschlos 2020). For the largest value that is the usual softmax.
    """
    indices = said if isinstance(said, Tensor) else getattr(said, "indices", None)
    if not isinstance(indices, Tensor) or indices.is_floating_point():
        return said  # values without indices have a gradient already
    position = 1 if name in ("topk", "kthvalue") else 0
    dim = kwargs.get("dim", rest[position] if len(rest) > position else None)
    keepdim = indices.ndim == first.ndim
    if dim is None:
        dim = -1
        if name in ("argmax", "argmin"):
            first, keepdim = first.flatten(), False
    if first.shape[dim] > _MOST_PLACES:
        return said
    # A copy: the graph keeps the index that it gathers by. If that index kept the graph, neither would ever be freed.
    kept = indices.detach().clone()
    is_order = name in ("argsort", "sort") and dim in (-1, first.ndim - 1)
    weigh = partial(_weigh_places, first, kept, dim, keepdim=keepdim)
    Soft(weights=weigh, source=first if is_order else None).on(indices)
    return said


def _weigh_places(values: Tensor, indices: Tensor, dim: int, *, keepdim: bool) -> Tensor:
    """(*shape of the indices, place) softmax weights by how near each place's value is to the chosen one."""
    values = values.movedim(dim, -1)  # (*rest, place)
    chosen = indices.movedim(dim, -1) if keepdim else indices[..., None]
    picked = values.gather(-1, chosen)
    spread = values.detach().std(dim=-1, keepdim=True, correction=0).clamp_min(1e-20)[..., None]
    weights = torch.softmax(-(picked[..., None] - values[..., None, :]).abs() / (_CHOICE * spread), dim=-1)
    return weights.movedim(-2, dim if dim >= 0 else dim - 1) if keepdim else weights.squeeze(-2)


def soft_ranks(values: Tensor) -> Tensor:
    """Soft ranks along the last axis: how many values each one exceeds, counted by sigmoids."""
    leads = values[..., :, None] - values[..., None, :]
    return torch.sigmoid(leads / (_SOFTNESS * _width(leads))).sum(dim=-1)


def bucket_values(value: Tensor, bounds: Any) -> Tensor:
    """A soft bucket number: linear in the value, 0 at the lowest bound, 1 more for each mean width of a bucket."""
    if not isinstance(bounds, Tensor) or bounds.numel() < 2:
        return value
    bounds = bounds.to(value)
    width = (bounds.max() - bounds.min()).clamp_min(1e-12) / (bounds.numel() - 1)
    line: Tensor = (value - bounds.min()) / width
    return line


def expectation(ask: Callable[[Tensor], Tensor], index: Tensor, weights: Tensor) -> Tensor:
    """The mean of a lookup's results at all places, weighted by `weights`, (*shape of the index, place)."""
    total: Tensor | None = None
    for place, weight in enumerate(weights.unbind(-1)):
        found = ask(torch.full_like(index, place))
        part = align(weight, found) * found
        total = part if total is None else total + part
    assert total is not None
    return total


def expected_row(table: Tensor, weights: Tensor) -> Tensor:
    """`expectation` for a lookup of whole rows of a table, as one matrix product."""
    rows = table.detach()[: weights.shape[-1]]
    expected: Tensor = torch.tensordot(weights.to(rows.dtype), rows, dims=1)
    return expected


def table_slope(
    ask: Callable[[Tensor], Tensor], index: Tensor, value: Tensor, size: int, hard: Tensor
) -> Tensor:
    """The soft index times the slope of the table around it, measured over an eighth of the table on either side."""
    reach = max(1, size // 8)
    low, high = (index - reach).clamp(0, size - 1), (index + reach).clamp(0, size - 1)
    span = (high - low).clamp_min(1).to(hard.dtype)
    slope = (ask(high) - ask(low)) / align(span, hard)
    return align(value, hard) * slope


def soft_scatter(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The result of a scatter call, with the gradient with respect to its index added."""
    base, dim, index, written = args[:4]
    soft = Soft.of(index)
    assert soft is not None
    before = base.detach().clone()
    hard: Tensor = func(base, dim, index, written, **kwargs)
    weights = soft.weights
    if weights is None or not hard.is_floating_point():
        return hard
    weights = weights.movedim(dim if dim >= 0 else dim - 1, -2)  # (*rest, written, place)
    if weights.shape[-1] != hard.shape[dim]:
        return hard
    if isinstance(written, Tensor) and written.ndim:
        source = written.detach().movedim(dim, -1)[..., : weights.shape[-2]]
        new = (weights * source[..., None]).sum(dim=-2)
    else:
        new = float(written) * weights.sum(dim=-2)
    kept = 1.0 if "add" in name else 1 - weights.sum(dim=-2).clamp(max=1)
    change = new.movedim(-1, dim) + (kept * before.movedim(dim, -1)).movedim(-1, dim)
    change = add_gradient(torch.zeros_like(hard), change)
    return hard.add_(change) if name.endswith("_") else hard + change
