"""The state that a model's code keeps outside of the model, in classes, closures and globals: recorded and restored.

A deep copy of a model shares this state with the original. If queries change it, a fresh copy answers as if it had
been queried as well, unless the state is restored.
"""

from __future__ import annotations

import array
import contextlib
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from ecnn.asking import Around, Question
from ecnn.auditing.snapshots import (
    CONSTANTS,
    COUNTERS,
    GENERATORS,
    LARGEST,
    Snapshot,
    Snapshots,
    attributes,
    has_own_values,
    is_library,
    is_library_name,
)

#: Most values in one container, since a larger one is data, not memory; and most objects that are searched in all.
_MOST = 10_000
_DEEPEST = 6  # levels of nesting that are searched
_BOOKKEEPING = vars(nn.Module()).keys()  # attributes that torch gives every module: hooks, names, its mode
_CONTAINERS: tuple[type, ...] = (
    tuple,
    frozenset,
    bytearray,
    array.array,
    types.MethodType,
    functools.partial,
)


@dataclass(frozen=True, eq=False)
class _Place:
    """A place where code keeps a value, such as a global variable.

    Attributes:
        name: for readers.
        get, put: read and replace the value.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], None]


@dataclass(frozen=True, eq=False)
class _Kept:
    """A place, and a snapshot of the value that it held."""

    place: _Place
    held: Snapshot

    def has_changed(self) -> bool:
        return not self.held.is_like(self.place.get())

    def put_back(self) -> None:
        if self.has_changed():
            value = self.held.restored()
            if self.place.get() is not value:
                self.place.put(value)


class Surroundings:
    """A record of the state that a model's code keeps outside of the model, taken when this object is made.

    It covers the attributes of the classes of the model's modules and, for the functions found there, closures,
    attributes, default arguments and global variables. It does not cover libraries, random number generators or files.

    Args:
        model: the model; None records nothing.
        itself: also records the model's own attributes, parameters and buffers, for a model that cannot be copied.
    """

    def __init__(self, model: nn.Module | None = None, *, itself: bool = False) -> None:
        self._kept: tuple[_Kept, ...] = ()
        if model is not None:
            search = _Search()
            with contextlib.suppress(Exception):  # such as from modules that are no Python objects
                search.look_into_parts(model, keeps=itself)
            search.run()
            self._kept = tuple(_keep(search.places))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the recorded places, for readers."""
        return tuple(kept.place.name for kept in self._kept)

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> Surroundings:
        return self  # copies of a model share its surroundings

    def __reduce__(self) -> tuple[Any, ...]:
        return Surroundings, ()  # another process has state of its own, which is not recorded

    def changed(self) -> Surroundings:
        """Only those recorded places whose value has changed since."""
        return self._of(kept for kept in self._kept if _or_false(kept.has_changed))

    def put_back(self) -> None:
        """Restores the recorded values."""
        for kept in self._kept:
            kept.put_back()

    @contextlib.contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Restores the recorded values while the context is open, and the present ones afterwards."""
        now = self._of(_keep(kept.place for kept in self._kept))
        self.put_back()
        try:
            yield
        finally:
            now.put_back()

    @staticmethod
    def _of(kept: Iterable[_Kept]) -> Surroundings:
        made = Surroundings()
        made._kept = tuple(kept)
        return made


class PutBack(Around):
    """A model whose surroundings are restored before and after every question.

    Args:
        model: the model.
        surroundings: what is restored.
    """

    def __init__(self, model: nn.Module, surroundings: Surroundings) -> None:
        super().__init__(model)
        self.surroundings = surroundings

    def ask(self, question: Question, images: Tensor) -> Any:
        self.surroundings.put_back()
        try:
            return question(self.model, images)
        finally:
            self.surroundings.put_back()


class _Search:
    """Searches everything that a model's code can reach for places where it keeps values.

    A value is shared if it lies outside of the model, so that a copy of the model refers to the same one. The model's
    own values are copied with it. They are searched only for the code that they contain.

    Attributes:
        places: those found so far.
        seen: keys of the objects that were searched and of the places that were found.
        waiting: values still to be searched, with their depth of nesting and whether they are shared.
    """

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.seen: set[Any] = set()
        self.waiting: deque[tuple[Any, int, bool]] = deque()

    def run(self) -> None:
        """Searches until nothing is waiting, or `_MOST` objects were seen, as happens inside a library."""
        while self.waiting and len(self.seen) < _MOST:
            value, depth, is_shared = self.waiting.popleft()
            # Reading an attribute may run code of the model, which may raise anything.
            with contextlib.suppress(Exception):
                self._look_into(value, depth, is_shared)

    def look_into_parts(self, model: nn.Module, *, keeps: bool) -> None:
        """Queues the contents of all modules of a network; with `keeps`, their attributes are places to record."""
        if ("network", id(model), keeps) in self.seen:
            return
        self.seen.add(("network", id(model), keeps))
        for part in model.modules():
            if id(part) not in self.seen:
                self.seen.add(id(part))
                self.look_into(type(part), is_shared=True)
                for value in list(vars(part).values()):
                    self.look_into(value, is_shared=keeps)
            if keeps:
                for held in (vars(part), part._parameters, part._buffers):
                    for name in [name for name in held if name not in _BOOKKEEPING]:
                        self._note_item(held, name, f"{type(part).__name__}.{name}")

    def look_into(self, value: Any, depth: int = 0, *, is_shared: bool) -> None:
        """Queues a value, to be searched later by `run`."""
        self.waiting.append((value, depth, is_shared))

    def _look_into(self, value: Any, depth: int, is_shared: bool) -> None:
        if isinstance(value, (*CONSTANTS, Tensor, np.ndarray)) or depth > _DEEPEST:
            return
        if isinstance(value, nn.Module):
            self.look_into_parts(value, keeps=is_shared)
            return
        if (id(value), is_shared) in self.seen:
            return
        self.seen.add((id(value), is_shared))
        if isinstance(value, types.FunctionType):
            self._look_into_function(value)
        elif isinstance(value, type):
            self._look_into_class(value)
        for part in _inner(value):
            self.look_into(part, depth + 1, is_shared=is_shared)

    def _look_into_class(self, kind: type) -> None:
        for owner in kind.__mro__:
            if is_library(owner) or ("class", id(owner)) in self.seen:
                continue
            self.seen.add(("class", id(owner)))
            for name, value in list(vars(owner).items()):
                self.look_into(value, is_shared=True)
                if not name.startswith("__"):
                    get = functools.partial(_of_class, owner, name)
                    put = functools.partial(setattr, owner, name)
                    self._note(f"{owner.__name__}.{name}", get, put, key=(id(owner), name))

    def _look_into_function(self, function: types.FunctionType) -> None:
        if is_library(function):
            return
        name = function.__qualname__
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # an empty cell
                self.look_into(cell.cell_contents, is_shared=True)
                get = functools.partial(getattr, cell, "cell_contents")
                put = functools.partial(setattr, cell, "cell_contents")
                self._note(f"{variable}, in the closure of {name}", get, put, key=id(cell))
        for variable in vars(function):
            self.look_into(vars(function)[variable], is_shared=True)
            self._note_item(vars(function), variable, f"{name}.{variable}")
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.look_into(value, is_shared=True)
            self._note(f"a default of {name}", functools.partial(_itself, value), _nothing, key=id(value))
        names = set(_names_in(function.__code__))
        for variable in sorted(names & function.__globals__.keys()):
            value = function.__globals__[variable]
            if not isinstance(value, types.ModuleType):
                self._note_variable(function.__globals__, variable)
            elif not is_library_name(value.__name__):
                for inner in sorted(names & vars(value).keys()):
                    self._note_variable(vars(value), inner)

    def _note_variable(self, variables: dict[str, Any], name: str) -> None:
        self.look_into(variables[name], is_shared=True)
        self._note_item(variables, name, f"the global variable {name}")

    def _note_item(self, held: dict[str, Any], name: str, shown: str) -> None:
        get, put = functools.partial(held.__getitem__, name), functools.partial(held.__setitem__, name)
        self._note(shown, get, put, key=(id(held), name))

    def _note(self, name: str, get: Callable[[], Any], put: Callable[[Any], None], *, key: Any) -> None:
        if ("place", key) not in self.seen:
            self.seen.add(("place", key))
            self.places.append(_Place(name, get, put))


def _inner(value: Any) -> list[Any]:
    """The values inside an object in which code may be found: elements, attributes, wrapped and bound functions."""
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return list(value.values())[:_MOST]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)[:_MOST]
    wrapped = [getattr(value, "__wrapped__", None)]
    if isinstance(value, type) or not has_own_values(value):
        return wrapped
    return [type(value), *list(attributes(value).values())[:_MOST], *wrapped]


def _keep(places: Iterable[_Place]) -> Iterator[_Kept]:
    """The places with snapshots of what they hold now; those that hold no data are left out."""
    snapshots = Snapshots()
    for place in places:
        with contextlib.suppress(Exception):  # what cannot be recorded cannot be restored
            value = place.get()
            if _is_data(value):
                yield _Kept(place, snapshots.take(value))


def _is_data(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return (value.numel() if isinstance(value, Tensor) else value.size) <= LARGEST
    if isinstance(value, list | dict | set | deque):
        return len(value) <= _MOST
    if isinstance(value, (type, types.ModuleType, types.FunctionType, nn.Module, *GENERATORS)):
        return False
    if isinstance(value, (*CONSTANTS, *COUNTERS, *_CONTAINERS)):
        return True
    return has_own_values(value) and not hasattr(type(value), "__get__")


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Names of the globals and attributes that a function uses, and those of functions defined inside it."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _names_in(part)


def _of_class(owner: type, name: str) -> Any:
    return vars(owner)[name]


def _itself(value: Any) -> Any:
    return value


def _nothing(value: Any) -> None: ...


def _or_false(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except Exception:
        return False
