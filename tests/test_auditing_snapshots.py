"""Snapshots of values: compared by what is in them, put back in place, the same objects before and after."""

from __future__ import annotations

import array
import collections
import copy
import functools
import itertools
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ecnn.auditing.snapshots import Snapshots, TooLargeError


class Holder:
    """Attributes."""

    hook: Any
    inner: Any
    lock: Any
    network: Any
    code: Any

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def add(self, value: int) -> None:
        self.count = getattr(self, "count", 0) + value


class Slotted:
    """Attributes in places that the class reserves."""

    __slots__ = ("__hidden", "empty", "rows")

    def __init__(self) -> None:
        self.rows = [1]
        self.__hidden = 1

    def grow(self) -> None:
        self.rows.append(2)
        self.__hidden += 1
        self.empty = 3

    def told(self) -> tuple[list[int], int, bool]:
        return self.rows, self.__hidden, hasattr(self, "empty")


def change_list(value: list[Any]) -> None:
    value[0].append(5)
    value.reverse()


def change_cycle(value: list[Any]) -> None:
    value.append(value)
    value[0]["own"] = 1


def make_cycle() -> list[Any]:
    value: list[Any] = [{}]
    value[0]["up"] = value
    return value


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    # a value, what changes it, what is in it
    "list": (lambda: [[1], 2], change_list, repr),
    "deque": (lambda: collections.deque([1, 2, 3], maxlen=3), lambda value: value.append(4), repr),
    "dict": (lambda: {"a": [1], "b": 2}, lambda value: value.pop("a").append(2), repr),
    "order": (
        lambda: collections.OrderedDict(a=1, b=2),
        lambda value: value.move_to_end("a"),
        lambda value: list(value),
    ),
    "default": (lambda: collections.defaultdict(list), lambda value: value["x"].append(1), repr),
    "set": (lambda: {1, 2}, lambda value: value.update({3, "x"}), lambda value: sorted(map(str, value))),
    "tuple": (lambda: ([1], 2), lambda value: value[0].append(2), repr),
    "bytes": (lambda: bytearray(b"ab"), lambda value: value.extend(b"c"), repr),
    "numbers": (lambda: array.array("d", [1.0]), lambda value: value.append(2.0), repr),
    "array": (lambda: np.zeros(3), lambda value: value.__setitem__(1, np.nan), repr),
    "tensor": (lambda: torch.zeros(3), lambda value: value.add_(1), repr),
    "to NaN": (lambda: torch.zeros(3), lambda value: value.fill_(torch.nan), repr),
    "from NaN": (lambda: torch.full((3,), torch.nan), lambda value: value[:1].fill_(0.0), repr),
    "to infinity": (lambda: torch.full((3,), 3.4028234663852886e38), lambda value: value.mul_(2), repr),
    "complex": (lambda: torch.full((3,), torch.nan + 1j), lambda value: value[:1].fill_(1.0), repr),
    "object": (
        lambda: Holder(count=1, rows=[[2]]),
        lambda value: (value.add(1), value.rows[0].append(3), vars(value).update(new=1)),
        lambda value: repr(vars(value)),
    ),
    "slots": (Slotted, Slotted.grow, lambda value: repr(value.told())),
    "namespace": (
        lambda: types.SimpleNamespace(count=1),
        lambda value: value.__dict__.update(count=2),
        repr,
    ),
    "method": (
        lambda: Holder(count=1).add,
        lambda value: value(2),
        lambda value: repr(vars(value.__self__)),
    ),
    "partial": (
        lambda: functools.partial(print, [1], sep=[2]),
        lambda value: (value.args[0].append(2), value.keywords["sep"].append(3)),
        lambda value: repr((value.args, value.keywords)),
    ),
    "cycle": (make_cycle, change_cycle, lambda value: (len(value), list(value[0]))),
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_in_a_value_is_put_back_into_the_same_value(name: str) -> None:
    make, change, tell = CASES[name]
    value = make()
    before = tell(value)
    kept = Snapshots().take(value)
    assert kept.is_like(value)
    for _ in range(3):
        change(value)
        assert not kept.is_like(value)
        assert kept.restored() is value
        assert kept.is_like(value)
        assert tell(value) == before


def test_what_is_held_stays_the_same_object() -> None:
    lock, network, code, inner = threading.Lock(), nn.Linear(1, 1), print, [1]
    value = Holder(lock=lock, network=network, code=code, inner=inner, weak=types.MethodType(print, 1))
    kept = Snapshots().take(value)
    value.inner = [1]  # another that says the same
    assert kept.is_like(value)
    inner.append(2)
    vars(value).clear()
    kept.restored()
    assert (value.lock, value.network, value.code, value.inner) == (lock, network, code, [1])
    assert value.inner is inner


def test_tensors_that_share_memory_share_it_again() -> None:
    """In a place of their own each would be another model: one writes the whole, another reads a part."""
    log = torch.zeros(8)
    value = {"log": log, "last": log[-1:], "odd": log.view(2, 4).t()[1:, 1], "own": torch.ones(2)}
    snapshots = Snapshots()
    kept, other = snapshots.take(value), snapshots.take([log])
    holder: list[Any] = [log]
    log += 1
    assert not kept.is_like(value)
    kept.restored()
    assert log.tolist() == [0.0] * 8
    assert other.is_like(holder)
    log[-1], log[5] = 7, 5
    assert value["last"].tolist() == [7]
    assert value["odd"].tolist() == [5, 0, 7]
    assert value["own"].tolist() == [1, 1]


def test_a_counter_that_several_hold_stays_one() -> None:
    counter = itertools.count()
    snapshots = Snapshots()
    value, other = [counter, counter], {"own": counter}
    kept = [snapshots.take(value), snapshots.take(other)]
    next(counter)
    for each in kept:
        each.restored()
    assert value[0] is value[1] is other["own"]
    assert next(value[0]) == 0
    assert not kept[1].is_like(other)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: {"low": float("nan")}, lambda value: value.update(low=float("nan"))),
        (lambda: {-1, -2}, lambda value: (value.clear(), value.update([-2]), value.update([-1]))),
        (lambda: {"graph": torch.eye(2).to_sparse(), "n": [0]}, lambda value: value["n"].__setitem__(0, 0)),
    ],
    ids=["NaN", "set", "sparse"],
)
def test_what_says_the_same_has_not_changed(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    value = make()
    kept = Snapshots().take(value)
    change(value)
    assert kept.is_like(value)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: {torch.zeros(2): 1}, lambda value: value.update({torch.zeros(2): 1})),
        (lambda: {"graph": torch.eye(2).to_sparse(), "n": 0}, lambda value: value.update(n=1)),
        (lambda: [np.zeros(3)], lambda value: value[0].resize(5, refcheck=False)),
        (lambda: [torch.zeros(3)], lambda value: value[0].resize_(5)),
    ],
    ids=["tensors as keys", "beside a sparse tensor", "resized array", "resized tensor"],
)
def test_what_is_odd_to_compare_is_put_back(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    value = make()
    kept = Snapshots().take(value)
    change(value)
    assert not kept.is_like(value)
    kept.restored()
    assert kept.is_like(value)


def test_what_could_not_be_noted_is_not_taken_for_noted() -> None:
    snapshots = Snapshots()
    inner = [1]
    with pytest.raises(TooLargeError):
        snapshots.take([inner, [[0.5 + number] for number in range(60_000)]])
    kept = snapshots.take(inner)
    inner.append(2)
    assert not kept.is_like(inner)


def test_a_handle_of_a_hook_still_removes_it() -> None:
    """It cannot be copied twice: a deep copy ended in an empty object here."""
    network = nn.Linear(1, 1)
    value = Holder(asked=0)
    value.hook = network.register_forward_pre_hook(lambda module, images: value.add(1))
    kept = Snapshots().take(value)
    network(torch.zeros(1, 1))
    kept.restored()
    assert not hasattr(value, "count")
    value.hook.remove()
    network(torch.zeros(1, 1))
    assert not hasattr(value, "count")


@pytest.mark.parametrize("make", [itertools.count, lambda: itertools.cycle("abc"), lambda: iter([1, 2, 3])])
def test_copies_take_the_place_of_what_only_goes_on(make: Callable[[], Any]) -> None:
    value = make()
    before = next(value)
    kept = Snapshots().take(value)
    ahead = [next(value) for _ in range(2)]
    assert not kept.is_like(value)
    for _ in range(2):
        again = kept.restored()
        assert kept.is_like(again)
        assert [next(again) for _ in range(2)] == ahead != [before, before]


def test_generators_of_random_numbers_are_left_alone() -> None:
    for value in (random.Random(0), np.random.default_rng(0), torch.Generator()):
        kept = Snapshots().take([value])
        (value.random if not isinstance(value, torch.Generator) else value.seed)()
        assert kept.is_like([value])


def test_too_much_is_refused_and_not_half_noted() -> None:
    with pytest.raises(TooLargeError):
        Snapshots().take([[0.5 + number] for number in range(60_000)])
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(TooLargeError):
        Snapshots().take(deep)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=1),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=1), inner, max_size=2),
    max_leaves=8,
)


@given(one=values, other=values)
def test_snapshots_are_compared_by_what_they_hold(one: Any, other: Any) -> None:
    kept = Snapshots().take(one)
    assert kept.is_like(copy.deepcopy(one))
    assert kept.is_like(other) == (repr(one) == repr(other))
    holder = [one]
    around = Snapshots().take(holder)
    holder[0] = other
    around.restored()
    assert holder[0] is one
