"""What a model remembers outside of itself, in its classes, in closures and in global variables: kept and put back.

A deep copy of a model shares all of these with it. So a copy that nobody has asked answers like one that was asked
thousands of questions, unless what they have changed is put back too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "scipy", "sklearn", "PIL", "cv2", "torchvision"}
_LIBRARIES |= {"timm", "torchaudio", "triton", "numba", "tqdm", "ecnn"}
_GENERATORS = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
_MUTABLE = (list, dict, set, deque, bytearray, Tensor, np.ndarray)
_LARGEST = 2**22  # numbers of a tensor or array: what is larger is data, not memory
_MOST = 10_000  # values within one container, likewise; and what is looked through in all
_DEEPEST = 6


@dataclass(frozen=True, eq=False)
class _Place:
    """Where code keeps a value.

    Attributes:
        name: for people.
        get, put: its value.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], None]


@dataclass(frozen=True, eq=False)
class _Kept:
    """What a place held.

    Attributes:
        place: where.
        value: the object itself, which others may hold too.
        copy: of what was in it.
    """

    place: _Place
    value: Any
    copy: Any

    def has_changed(self) -> bool:
        return not _is_same(self.place.get(), self.copy)

    def put_back(self) -> None:
        if not self.has_changed():
            return
        if _is_counter(self.value):
            self.place.put(copy.copy(self.copy))
            return
        if self.place.get() is not self.value:
            self.place.put(self.value)
        _refill(self.value, self.copy)


class Surroundings:
    """What code that a model runs keeps outside of the model, as it was when this was made.

    Looked through are the classes of the model's parts, functions that they hold, and from there closures, default
    arguments and global variables; not what libraries keep, generators of random numbers, or files.

    Args:
        model: the model; None for nothing.
        itself: also what the model itself keeps, as of one that cannot be copied.
    """

    def __init__(self, model: nn.Module | None = None, *, itself: bool = False) -> None:
        self._kept: tuple[_Kept, ...] = ()
        if model is not None:
            search = _Search()
            with contextlib.suppress(Exception):  # as with modules that are no Python objects
                search.look_into_parts(model, keeps=itself)
            search.run()
            self._kept = tuple(_keep(search.places))

    @property
    def names(self) -> tuple[str, ...]:
        """What is kept, for people."""
        return tuple(kept.place.name for kept in self._kept)

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> Surroundings:
        return self  # of copies of a model they are the same

    def __reduce__(self) -> tuple[Any, ...]:
        return Surroundings, ()  # another process has its own

    def changed(self) -> Surroundings:
        """Those that are not what they were."""
        return self._of(kept for kept in self._kept if _or_false(kept.has_changed))

    def put_back(self) -> None:
        """Makes them what they were."""
        for kept in self._kept:
            kept.put_back()

    @contextlib.contextmanager
    def as_they_were(self) -> Iterator[None]:
        """They are what they were for a while, and afterwards what they are now."""
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


class PutBack(nn.Module):
    """A model whose every question finds its surroundings as they were.

    Args:
        model: the model.
        surroundings: to be put back.
    """

    def __init__(self, model: nn.Module, surroundings: Surroundings) -> None:
        super().__init__()
        self.model = model
        self.surroundings = surroundings

    def forward(self, images: Tensor) -> Any:
        self.surroundings.put_back()
        try:
            return self.model(images)
        finally:
            self.surroundings.put_back()


class _Search:
    """Goes through what code can reach, and notes the places where it keeps values.

    Attributes:
        places: found so far.
        seen: by their id, what was gone through, and places that were noted.
        waiting: values that are still to be gone through, and how deep within others they lie.
    """

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.seen: set[Any] = set()
        self.waiting: deque[tuple[Any, int]] = deque()

    def run(self) -> None:
        """Goes on until nothing is waiting, or so much was seen that this is somebody's library."""
        while self.waiting and len(self.seen) < _MOST:
            value, depth = self.waiting.popleft()
            with contextlib.suppress(Exception):  # whatever a model's code does when somebody looks at it
                self._look_into(value, depth)

    def look_into_parts(self, model: nn.Module, *, keeps: bool) -> None:
        """All modules of a network; what they hold are places only if that is to be kept."""
        for part in model.modules():
            if id(part) not in self.seen:
                self.seen.add(id(part))
                self.look_into(type(part))
                for value in list(vars(part).values()):
                    self.look_into(value)
            if keeps:
                self._note_values_of(part)

    def _note_values_of(self, part: nn.Module) -> None:
        for held in (vars(part), part._parameters, part._buffers):
            for name in list(held):
                if name not in ("_modules", "_parameters", "_buffers", "training"):
                    self._note_item(held, name, f"{type(part).__name__}.{name}")

    def look_into(self, value: Any, depth: int = 0) -> None:
        """What a value leads to, when its turn comes."""
        self.waiting.append((value, depth))

    def _look_into(self, value: Any, depth: int) -> None:
        if isinstance(value, (*_PLAIN, Tensor, np.ndarray)) or depth > _DEEPEST or id(value) in self.seen:
            return
        if isinstance(value, nn.Module):
            self.look_into_parts(value, keeps=False)
            return
        self.seen.add(id(value))
        if isinstance(value, types.FunctionType):
            self._look_into_function(value)
        elif isinstance(value, type):
            self._look_into_class(value)
        for part in _inner(value):
            self.look_into(part, depth + 1)

    def _look_into_class(self, kind: type) -> None:
        for owner in kind.__mro__:
            if _is_library(owner) or (owner is not kind and id(owner) in self.seen):
                continue
            self.seen.add(id(owner))
            for name, value in list(vars(owner).items()):
                self.look_into(value)
                if not name.startswith("__"):
                    get = functools.partial(_of_class, owner, name)
                    put = functools.partial(setattr, owner, name)
                    self._note(f"{owner.__name__}.{name}", get, put, key=(id(owner), name))

    def _look_into_function(self, function: types.FunctionType) -> None:
        if _is_library(function):
            return
        name = function.__qualname__
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # an empty cell
                self._look_through(cell.cell_contents)
                get = functools.partial(getattr, cell, "cell_contents")
                put = functools.partial(setattr, cell, "cell_contents")
                self._note(f"{variable}, in the closure of {name}", get, put, key=id(cell))
        for variable in vars(function):
            self._note_item(vars(function), variable, f"{name}.{variable}")
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._look_through(value)
            if isinstance(value, _MUTABLE):
                self._note(f"a default of {name}", functools.partial(_itself, value), _nothing, key=id(value))
        names = set(_names_in(function.__code__))
        for variable in sorted(names & function.__globals__.keys()):
            value = function.__globals__[variable]
            if not isinstance(value, types.ModuleType):
                self._note_variable(function.__globals__, variable)
            elif not _is_library_name(value.__name__):
                for inner in sorted(names & vars(value).keys()):
                    self._note_variable(vars(value), inner)

    def _note_variable(self, variables: dict[str, Any], name: str) -> None:
        self._look_through(variables[name])
        self._note_item(variables, name, f"the global variable {name}")

    def _look_through(self, value: Any) -> None:
        """What a value leads to that code holds beside the model: what networks hold are places here, too."""
        self.look_into(value)
        parts = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, list | tuple)
            else [value]
        )
        for part in list(parts)[:_MOST]:
            if isinstance(part, nn.Module):
                self.look_into_parts(part, keeps=True)

    def _note_item(self, held: dict[str, Any], name: str, shown: str) -> None:
        get, put = functools.partial(held.__getitem__, name), functools.partial(held.__setitem__, name)
        self._note(shown, get, put, key=(id(held), name))

    def _note(self, name: str, get: Callable[[], Any], put: Callable[[Any], None], *, key: Any) -> None:
        if ("place", key) not in self.seen:
            self.seen.add(("place", key))
            self.places.append(_Place(name, get, put))


def _inner(value: Any) -> list[Any]:
    """What something that is no network, function or class holds, as far as code may be in it."""
    if isinstance(value, types.MethodType | staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return list(value.values())[:_MOST]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)[:_MOST]
    held = [] if _is_library(type(value)) or isinstance(value, type) else [type(value)]
    return [*held, getattr(value, "__wrapped__", None)]


def _keep(places: Iterable[_Place]) -> Iterator[_Kept]:
    """What places hold now; those that hold no data are left out."""
    for place in places:
        with contextlib.suppress(Exception):  # whatever cannot be copied is no memory that could be put back
            value = place.get()
            if _is_data(value):
                yield _Kept(place, value, _copy(value))


def _is_data(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return (value.numel() if isinstance(value, Tensor) else value.size) <= _LARGEST
    if isinstance(value, list | dict | set | deque):
        return len(value) <= _MOST
    if isinstance(value, (*_PLAIN, tuple, frozenset, bytearray)):
        return True
    is_code = isinstance(value, type | types.ModuleType | nn.Module | _GENERATORS) or callable(value)
    if is_code or hasattr(type(value), "__get__"):
        return False
    return _is_counter(value) or (not _is_installed(type(value)) and hasattr(value, "__dict__"))


def _is_counter(value: Any) -> bool:
    return type(value).__module__ == "itertools" and type(value).__name__ in ("count", "cycle")


def _copy(value: Any) -> Any:
    """A deep copy, of tensors without their graph. It shares networks, code and generators of random numbers."""
    memo: dict[int, Any] = {}
    _spare(value, memo, 0)
    return copy.deepcopy(value, memo)


def _spare(value: Any, memo: dict[int, Any], depth: int) -> None:
    """Notes for `copy.deepcopy` what is not to be copied."""
    if depth > _DEEPEST or id(value) in memo or isinstance(value, _PLAIN):
        return
    if isinstance(value, Tensor) and not (depth and isinstance(value, nn.Parameter)):
        memo[id(value)] = value.detach().clone()
    elif isinstance(value, nn.Parameter | nn.Module | types.ModuleType | _GENERATORS) or callable(value):
        memo[id(value)] = value
    elif isinstance(value, dict):
        for part in value.values():
            _spare(part, memo, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for part in value:
            _spare(part, memo, depth + 1)
    elif hasattr(value, "__dict__"):
        _spare(vars(value), memo, depth + 1)


def _refill(value: Any, kept: Any) -> None:
    """Puts into an object what was in it; whoever else holds it sees that too."""
    if isinstance(value, Tensor):
        value.data = kept.clone()  # not in place: a graph may hold what was there
    elif isinstance(value, np.ndarray):
        value[...] = kept
    elif isinstance(value, list | bytearray):
        value[:] = _copy(kept)
    elif isinstance(value, deque):
        value.clear()
        value.extend(_copy(kept))
    elif isinstance(value, dict | set):
        value.clear()
        value.update(_copy(kept))
    elif isinstance(value, tuple):
        for part, before in zip(value, kept, strict=True):
            _refill(part, before)
    elif not isinstance(value, (*_PLAIN, frozenset)) and not callable(value) and hasattr(value, "__dict__"):
        vars(value).clear()
        vars(value).update(vars(_copy(kept)))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values say the same, by what is in them."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_alike = one.shape == other.shape and one.dtype == other.dtype
        return is_alike and torch.equal(_numbers(one), _numbers(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and bool(one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, nn.Module | _GENERATORS) or callable(one):
        return one is other
    if isinstance(one, (*_PLAIN, set, frozenset, bytearray)):
        return bool(one == other) or one is other
    if _is_counter(one):
        return repr(one) == repr(other)
    return hasattr(one, "__dict__") and _is_same(vars(one), vars(other))


def _numbers(values: Tensor) -> Tensor:
    """These, with a number in place of what is none."""
    return torch.nan_to_num(values.detach()) if values.is_floating_point() else values.detach()


def _is_installed(kind: type) -> bool:
    """Whether a class comes from a package: what its objects hold is theirs to copy, and may be large."""
    root = kind.__module__.partition(".")[0]
    place = str(getattr(sys.modules.get(root), "__file__", None) or "")
    return _is_library(kind) or any(part in place for part in ("site-packages", "dist-packages"))


def _is_library(value: Any) -> bool:
    return _is_library_name(str(getattr(value, "__module__", None)))


def _is_library_name(name: str) -> bool:
    return name.partition(".")[0] in _LIBRARIES


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Names that a function looks up, and those that functions within it do."""
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
