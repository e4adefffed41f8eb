"""Intercepts the decisions of a model: comparisons with thresholds, and choices of the largest of a few values.

Each comparison of values that depend on the images gets costs: how far these values are from each outcome. Results of
logic on comparisons, and choices of the largest of a few values, get costs too. When the model uses a decision, its
outcome can be replaced by another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ecnn.attacks.images import per_image
from ecnn.auditing.bpda import is_followed, plain_name
from ecnn.auditing.order import ORDERED, Slopes, with_slopes
from ecnn.auditing.soft_calls import CASTS, COMPARISONS, EQUALITIES, SHAPES, as_floats
from ecnn.auditing.soft_values import Soft

#: Pairs of a decision's number, in the order of use, and the outcome that is forced upon it for all images.
Forced = tuple[tuple[int, bool], ...]
_SLACK = 0.1  # how far past a threshold an outcome still costs, in units of the usual distance from it
_NEVER = 1e3  # the cost of an outcome that is impossible
_APART = 1e-3  # the smallest unit for costs of equalities: equal values have no distance
_MOST_OPTIONS = 64  # an index among more values does not count as a choice
_CHOICES = {"argmax": 1.0, "argmin": -1.0, "max": 1.0, "min": -1.0}
_EXTREMES = {"amax": True, "max": True, "amin": False, "min": False}
_NOT = ("__invert__", "bitwise_not", "logical_not")
_AND = ("__and__", "bitwise_and", "logical_and")
_OR = ("__or__", "bitwise_or", "logical_or")
_CASTS = (
    *CASTS,
    "to",
    "type",
    "float",
    "double",
    "half",
    "type_as",
    "clone",
    "contiguous",
    "detach",
    "view_as",
)
_ASIDE = (
    "__get__",
    "size",
    "dim",
    "numel",
    "__len__",
    "is_floating_point",
    "stride",
)  # calls that do not read the values


class StrayedError(Exception):
    """The model has made other decisions than those that were noted, so that it cannot be held to them."""


@dataclass(frozen=True, eq=False)
class Costs:
    """What each outcome of some decisions costs, in units of the usual distance from the threshold.

    An outcome costs 0 if the compared values are already far enough on its side.

    Attributes:
        yes, no: costs of True and of False, in the shape of the decisions, 0 or more.
    """

    yes: Tensor
    no: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> Costs:
        return Costs(change(self.yes), change(self.no))

    def inverted(self) -> Costs:
        return Costs(self.no, self.yes)

    def both(self, other: Costs) -> Costs:
        return Costs(self.yes + other.yes, torch.minimum(self.no, other.no))

    def either(self, other: Costs) -> Costs:
        return self.inverted().both(other.inverted()).inverted()

    def all(self, dims: tuple[int, ...], *, keepdim: bool) -> Costs:
        return Costs(self.yes.sum(dim=dims, keepdim=keepdim), self.no.amin(dim=dims, keepdim=keepdim))

    def at_least(self, count: int) -> Costs:
        """Costs of the decision whether at least `count` along the last axis are true: the sums of the cheapest."""
        many = self.yes.shape[-1]
        return Costs(_cheapest(self.yes, count), _cheapest(self.no, many - count + 1))


def _cheapest(costs: Tensor, count: int) -> Tensor:
    """(...,) the sum of the `count` lowest along the last axis: 0 if `count` is 0, `_NEVER` if there are fewer."""
    if count > costs.shape[-1]:
        return torch.full_like(costs[..., 0], _NEVER)
    return costs.sort(dim=-1).values[..., : max(0, count)].sum(dim=-1)


@dataclass(frozen=True, eq=False)
class Count:
    """A count of the decisions that are true.

    Attributes:
        costs: of the decisions, along the last axis.
        mask: the decisions, in the shape in which they were counted.
        again: repeats the count for such a mask.
        unit: what one true decision adds: 1, or its share for a mean.
    """

    costs: Costs
    mask: Tensor
    again: Callable[[Tensor], Tensor]
    unit: float


@dataclass(frozen=True, eq=False)
class Choice:
    """The choice of the largest, or smallest, of a few values.

    Attributes:
        costs: (..., option) what it costs that each of them is chosen, 0 or more.
    """

    costs: Tensor

    def of(self, options: Tensor) -> Costs:
        """Costs of the decision whether one of these options is chosen; `options` is a mask (option,)."""
        yes, no = (
            self.costs[..., which].amin(dim=-1)
            if bool(which.any())
            else torch.full_like(self.costs[..., 0], _NEVER)
            for which in (options, ~options)
        )
        return Costs(yes, no)


@dataclass(frozen=True, eq=False)
class Extreme:
    """The largest or smallest of some values. Compared with a threshold, it tells whether one of them, or all, pass it.

    Attributes:
        values: all of these values.
        dims, keepdim: the axes along which they were compared, and whether the result kept these.
        is_largest: True for the largest, False for the smallest.
    """

    values: Tensor
    dims: tuple[int, ...]
    keepdim: bool
    is_largest: bool


_COSTS, _COUNT, _CHOICE = "_ecnn_costs", "_ecnn_count", "_ecnn_choice"
_EXTREME = "_ecnn_extreme"  # no decision until it is compared


class Decisions(TorchFunctionMode):
    """A torch function mode that notes a model's decisions about images, or holds the model to noted decisions.

    A decision is the last result of comparisons before the model uses it, such as whether one of many comparisons is
    true, all are, or more than three. Enter it inside `straight_through`, so that it sees detached values too.

    Args:
        batch: how many images are classified.
        num_classes: of the model. A choice among so many values counts as its answer, not as a decision.
        forced: the outcome of some decisions by their numbers; see `Forced`.
        noted: the mode of an earlier pass on the same images, to whose decisions this pass is held; None only notes.

    Attributes:
        said: the outcomes of the decisions so far, each of any shape.
        scales: one (batch,) per comparison or choice: the mean distance from the threshold, or lead of the chosen
            value, over each image.
        cost: (batch,) the total cost of the outcomes that the images are held to; 0 while decisions are only noted.
        slopes: which gradients the backward pass takes through the largest of many values, and the like.
    """

    def __init__(
        self, batch: int, *, num_classes: int, forced: Mapping[int, bool], noted: Decisions | None = None
    ) -> None:
        super().__init__()
        self.batch, self.num_classes, self.forced, self.noted = batch, num_classes, forced, noted
        self.said: list[Tensor] = []
        self.scales: list[Tensor] = []
        self.cost: Tensor = torch.zeros(batch, device="cpu")
        self.slopes = Slopes()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = plain_name(getattr(func, "__name__", ""))
        involved = [value for value in _tensors((*args, *kwargs.values())) if _has_costs(value)]
        if (name in ORDERED or name in _CHOICES) and not involved and args and is_followed(args[0]):
            return self._find_extreme(name, func, args, kwargs)
        if (name in COMPARISONS or name in EQUALITIES) and len(args) == 2:
            for compare in (self._compare_count, self._compare_choice, self._compare_extreme):
                if (made := compare(name, func, args)) is not None:
                    return made
            if any(is_followed(value) or Soft.of(value) is not None for value in args):
                return self._compare(name, func, args)
        if involved and name not in _ASIDE:
            if args and (made := self._combine(name, func, args, kwargs)) is not None:
                return made
            for value in involved:
                self._hold(value)
        return func(*args, **kwargs)

    # Comparisons, choices and counts ---------------------------------------------------------------------------------

    def _compare(self, name: str, func: Any, args: tuple[Any, ...]) -> Tensor:
        first, second = as_floats(args)
        difference = COMPARISONS.get(name, 1.0) * (first - second)
        said = _plainly(func, *args)
        scale = self._scale_of(difference)
        if name in EQUALITIES:
            apart = difference.abs() / scale.clamp_min(_APART)
            costs = Costs(apart, (_SLACK - apart).clamp_min(0))
            costs = costs if EQUALITIES[name] > 0 else costs.inverted()
        else:
            ahead = difference / scale
            costs = Costs((_SLACK - ahead).clamp_min(0), (_SLACK + ahead).clamp_min(0))
        return _with_costs(said, costs)

    def _scale_of(self, ahead: Tensor) -> Tensor:
        """The unit of a decision's costs: the mean of |ahead| over each image, from the noted pass if there is one."""
        number, many = len(self.scales), max(1, ahead.numel() // self.batch)
        self.scales.append(self._sum(ahead.detach().abs()).clamp_min(1e-12) / many)
        scales = self.scales if self.noted is None else self.noted.scales
        if number >= len(scales):
            raise StrayedError
        return self._share(scales[number], ahead)

    def _find_extreme(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call such as `max` or `argmin`; its results remember the values among which they were found."""
        made = func(*args, **kwargs)
        if name in ORDERED and args[0].numel():
            made = with_slopes(name, made, args, kwargs, self.slopes)
        if name in _CHOICES and (dim := self._options(args, kwargs)) is not None:
            self._choose(name, made, args[0], dim)
        dims = _dims_of(args, kwargs) if name in _EXTREMES else ()
        if dims and 0 not in dims:
            values = made if isinstance(made, Tensor) else made.values
            setattr(values, _EXTREME, Extreme(args[0], dims, values.ndim == args[0].ndim, _EXTREMES[name]))
        return made

    def _compare_extreme(self, name: str, func: Any, args: tuple[Any, ...]) -> Tensor | None:
        """Compares an `Extreme` with a limit, by the costs of each of its values; None if there is none to compare."""
        extreme, limit = getattr(args[0], _EXTREME, None), args[1]
        if not isinstance(extreme, Extreme) or name not in COMPARISONS:
            return None
        if isinstance(limit, Tensor) and limit.numel() > 1:
            if limit.shape != args[0].shape:
                return None
            for dim in () if extreme.keepdim else sorted(extreme.dims):
                limit = limit.unsqueeze(dim)
        costs: Costs = getattr(self._compare(name, func, (extreme.values, limit)), _COSTS)
        needs_all = extreme.is_largest == (COMPARISONS[name] < 0)
        costs = costs if needs_all else costs.inverted()
        costs = costs.all(extreme.dims, keepdim=extreme.keepdim)
        return _with_costs(_plainly(func, *args), costs if needs_all else costs.inverted())

    def _options(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The axis along which the call chooses among a few values of each image; None if it is no such choice."""
        first, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
        if type(dim) is not int:
            return None
        dim %= first.ndim
        is_one_of_few = 1 < first.shape[dim] <= _MOST_OPTIONS and first.shape[dim] != self.num_classes
        return dim if dim and is_one_of_few else None

    def _choose(self, name: str, made: Any, given: Tensor, dim: int) -> None:
        """Attaches a `Choice` to the index of the largest, or smallest, of a few values."""
        values = given.movedim(dim, -1) * _CHOICES[name]
        indices = made if isinstance(made, Tensor) else made.indices
        first, second = values.detach().topk(2, dim=-1).values.unbind(-1)
        scale = self._scale_of(first - second)
        others = [
            torch.cat([values[..., :place], values[..., place + 1 :]], dim=-1).amax(dim=-1)
            for place in range(values.shape[-1])
        ]
        behind = (torch.stack(others, dim=-1) - values) / scale[..., None]
        costs = (_SLACK + behind).clamp_min(0)
        if indices.ndim == given.ndim:  # with keepdim
            costs = costs.unsqueeze(dim)
        setattr(indices, _CHOICE, Choice(costs))

    def _compare_choice(self, name: str, func: Any, args: tuple[Any, ...]) -> Tensor | None:
        """Compares a chosen index with a number; None if it is no such comparison."""
        choice, limit = getattr(args[0], _CHOICE, None), args[1]
        if not isinstance(choice, Choice) or (isinstance(limit, Tensor) and limit.numel() != 1):
            return None
        options = torch.arange(choice.costs.shape[-1], device=choice.costs.device)
        return _with_costs(_plainly(func, *args), choice.of(_plainly(func, options, limit).flatten()))

    def _compare_count(self, name: str, func: Any, args: tuple[Any, ...]) -> Tensor | None:
        """Compares a count with a number; None if it is no such comparison."""
        count = getattr(args[0], _COUNT, None)
        limit = args[1]
        if isinstance(limit, Tensor) and limit.numel() == 1 and not limit.requires_grad:
            limit = limit.item()
        if not isinstance(count, Count) or name not in COMPARISONS or not isinstance(limit, int | float):
            return None
        # A whole count that is > 2.0 or >= 2.5 is at least 3.
        share = round(limit / count.unit, 6)
        is_strict = name in ("gt", "greater", "le", "less_equal")
        needed = math.floor(share) + 1 if is_strict else math.ceil(share)
        costs = count.costs.at_least(needed)
        return _with_costs(_plainly(func, *args), costs if COMPARISONS[name] > 0 else costs.inverted())

    def _combine(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of logic, a cast, a new shape or a reduction of decisions, with costs; None for other calls."""
        first, own = args[0], getattr(args[0], _COSTS, None)
        if isinstance(getattr(first, _COUNT, None), Count) and name in _CASTS:
            return _with_count(_plainly(func, *args, **kwargs), getattr(first, _COUNT))
        if isinstance(choice := getattr(first, _CHOICE, None), Choice) and name in _CASTS:
            return _with_choice(_plainly(func, *args, **kwargs), choice)
        if name in (*_AND, *_OR) and len(args) == 2:
            left, right = (_costs_of(value) for value in args)
            if left is None or right is None:
                return None
            return _with_costs(
                _plainly(func, *args), left.both(right) if name in _AND else left.either(right)
            )
        if own is None:
            return None
        if name in _NOT:
            return _with_costs(_plainly(func, *args), own.inverted())
        if name in _CASTS:
            return _with_costs(_plainly(func, *args, **kwargs), own)
        if name in SHAPES or (name == "__getitem__" and not list(_tensors(args[1:]))):
            made = _plainly(func, *args, **kwargs)
            return _with_costs(made, own.each(lambda part: func(part, *args[1:], **kwargs)))
        if name in ("any", "all", "sum", "mean", "count_nonzero"):
            return self._reduce(name, func, args, kwargs, own)
        return None

    def _reduce(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], own: Costs) -> Any:
        """Reduces decisions within each image; None for a reduction over images: each image is held by itself."""
        first, dims = args[0], _dims_of(args, kwargs)
        keepdim = bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))
        if not dims or 0 in dims:
            return None
        made = _plainly(func, *args, **kwargs)
        if name in ("any", "all"):
            costs = own if name == "all" else own.inverted()
            costs = costs.all(dims, keepdim=keepdim)
            return _with_costs(made, costs if name == "all" else costs.inverted())
        last = range(-len(dims), 0)
        many = math.prod(first.shape[dim] for dim in dims)
        counted = own.each(lambda part: part.movedim(dims, tuple(last)).reshape(*made.shape, many))
        count = Count(
            counted, first, lambda mask: func(mask, *args[1:], **kwargs), 1 / many if name == "mean" else 1.0
        )
        return _with_count(made, count)

    # Holding decisions to an outcome ---------------------------------------------------------------------------------

    def _hold(self, decided: Tensor) -> None:
        """Notes a decision that the model now uses, sets it to its forced or noted outcome, and adds its cost."""
        count = getattr(decided, _COUNT, None)
        if isinstance(count, Count):
            delattr(decided, _COUNT)
            if _has_costs(count.mask):
                self._hold(count.mask)
            decided.copy_(_plainly(count.again, count.mask))
            return
        mark = _CHOICE if hasattr(decided, _CHOICE) else _COSTS
        costs: Choice | Costs = getattr(decided, mark)
        delattr(decided, mark)
        site, said = len(self.said), decided.detach().clone()
        if isinstance(costs, Costs):
            said = _plainly(Tensor.bool, said)
            if site in self.forced:
                said.fill_(self.forced[site])
        self.said.append(said)
        if self.noted is not None:
            if site >= len(self.noted.said) or self.noted.said[site].shape != said.shape:
                raise StrayedError
            said = self.noted.said[site]
            if isinstance(costs, Costs):
                amiss = torch.where(said, costs.yes, costs.no)
            else:
                amiss = costs.costs.gather(-1, said.long()[..., None])[..., 0]
            self.cost = self.cost.to(amiss) + self._sum(amiss)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            decided.copy_(said)

    def _sum(self, values: Tensor) -> Tensor:
        """(batch,) sums per image; a sum that cannot be split by images is shared equally among them."""
        if values.ndim and len(values) and len(values) % self.batch == 0:
            return values.reshape(self.batch, -1).sum(dim=1)
        return (values.sum() / self.batch).expand(self.batch)

    def _share(self, scale: Tensor, like: Tensor) -> Tensor:
        return per_image(scale, like) if like.ndim and len(like) == self.batch else scale.mean()


def _plainly(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes a call outside all torch function modes and without gradients."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, also those inside tuples and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _dims_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """The axes that a call names, counted from the first; empty if it names none."""
    dims = kwargs.get("dim", args[1] if len(args) > 1 else ())
    dims = dims if isinstance(dims, list | tuple) else (dims,)
    return tuple(dim % args[0].ndim for dim in dims) if all(type(dim) is int for dim in dims) else ()


def _has_costs(value: Tensor) -> bool:
    return any(hasattr(value, mark) for mark in (_COSTS, _COUNT, _CHOICE))


def _with_costs(decided: Tensor, costs: Costs) -> Tensor:
    setattr(decided, _COSTS, costs)
    return decided


def _with_count(counted: Tensor, count: Count) -> Tensor:
    setattr(counted, _COUNT, count)
    return counted


def _with_choice(chosen: Tensor, choice: Choice) -> Tensor:
    """A chosen index in another type, with its choice; a bool is a decision: whether it is not the first option."""
    if chosen.dtype is torch.bool:
        return _with_costs(chosen, choice.of(torch.arange(choice.costs.shape[-1], device=chosen.device) > 0))
    setattr(chosen, _CHOICE, choice)
    return chosen


def _costs_of(value: Any) -> Costs | None:
    """The costs of a decision; a bool tensor without costs cannot change, so the other outcome costs `_NEVER`."""
    if hasattr(value, _COSTS):
        return getattr(value, _COSTS)  # type: ignore[no-any-return]
    if isinstance(value, Tensor) and value.dtype is torch.bool:
        fixed = value.float()
        return Costs(_NEVER * (1 - fixed), _NEVER * fixed)
    return None
