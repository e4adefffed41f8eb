"""Snapshots of Python values: their contents are recorded, compared later, and restored in the same objects.

Since a list, an array or an object stays the same object, all other code that refers to it sees the restored contents
too. A deep copy would replace it by a new object, and fails at the first value that cannot be copied.
"""

from __future__ import annotations

import array
import contextlib
import copy
import functools
import itertools
import random
import sys
import types
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Random number generators: their state does not count as memory of a model.
GENERATORS: tuple[type, ...] = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
#: Immutable values.
CONSTANTS: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, np.generic)
#: Iterators that can only advance: a copy takes their place when they are restored.
COUNTERS: tuple[type, ...] = (
    *(itertools.count, itertools.cycle),
    *(type(iter(few)) for few in (list[int](), (), range(0), "", b"")),
)
#: Most numbers of a tensor or array that is recorded; a larger one is data, not memory of a model.
LARGEST = 2**22
_BYTES = 8 * LARGEST
_CODE: tuple[type, ...] = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, nn.Module)
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "scipy", "sklearn", "PIL", "cv2", "torchvision"}
_LIBRARIES |= {"timm", "torchaudio", "triton", "numba", "tqdm", "ecnn"}
#: Modules of Python whose objects hold values of other code, such as `types.SimpleNamespace`.
_HOLDERS = {"types", "argparse", "collections", "queue"}
_MOST = 100_000  # values inside one
_DEEPEST = 100  # levels of nesting


class TooLargeError(Exception):
    """A value contains too many values, or too deeply nested ones, to be recorded."""


class Snapshot(ABC):
    """The recorded contents of a value.

    Attributes:
        value: the object itself, to which other code may refer too.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @abstractmethod
    def is_like(self, now: Any) -> bool:
        """Whether the value `now` has the recorded contents."""

    @abstractmethod
    def restored(self) -> Any:
        """The object, with the recorded contents put back into it."""


def is_library(value: Any) -> bool:
    """Whether a function or class comes with Python, torch or a well-known library that builds on them."""
    return is_library_name(str(getattr(value, "__module__", None)))


def is_library_name(name: str) -> bool:
    return name.partition(".")[0] in _LIBRARIES


def has_own_values(value: Any) -> bool:
    """Whether a value has attributes to record; objects of installed packages are left out, as they may be large."""
    if type(value).__module__ in _HOLDERS:
        return hasattr(value, "__dict__")
    return not _is_installed(type(value)) and (hasattr(value, "__dict__") or bool(_slots(type(value))))


def _is_installed(kind: type) -> bool:
    root = kind.__module__.partition(".")[0]
    place = str(getattr(sys.modules.get(root), "__file__", None) or "")
    return is_library(kind) or any(part in place for part in ("site-packages", "dist-packages"))


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object by name, in slots and in `__dict__`."""
    found = {}
    for name, slot in _slots(type(value)).items():
        with contextlib.suppress(AttributeError):  # the slot is empty
            found[name] = slot.__get__(value)
    return {**found, **getattr(value, "__dict__", {})}


def _slots(kind: type) -> dict[str, Any]:
    """Descriptors of the `__slots__` of a class and its bases, by name."""
    owners = [vars(owner) for owner in kind.__mro__ if "__slots__" in vars(owner)]
    return {
        name: value
        for owner in owners
        for name, value in owner.items()
        if isinstance(value, types.MemberDescriptorType)
    }


class Snapshots:
    """Takes snapshots of values and of all values inside them; each object has one, however often it is met.

    So values that shared an object, and tensors that shared memory, share it again after they are restored.
    """

    def __init__(self) -> None:
        self._made: dict[int, Snapshot] = {}
        self._memories: dict[int, _Memory] = {}
        self._count = 0

    def take(self, value: Any) -> Snapshot:
        """A snapshot of a value and of all values inside it: containers, objects, tensors, objects of bound methods.

        Of networks, code and random number generators only the identity is recorded, not the contents.
        """
        before = set(self._made)
        self._count = 0
        try:
            # Inside another value a parameter is left to the network that it belongs to.
            if isinstance(value, nn.Parameter):
                return self._note(value, _Numbers)
            return self._make(value, 0)
        except BaseException:
            for key in set(self._made) - before:  # they may be incomplete
                del self._made[key]
            raise

    def _make(self, value: Any, depth: int) -> Snapshot:
        if id(value) in self._made:
            return self._made[id(value)]
        self._count += 1
        if self._count > _MOST or depth > _DEEPEST:
            raise TooLargeError(f"more than {_MOST} values, or values nested more than {_DEEPEST} deep")
        snapshot = self._note(value, next(kind for fits, kind in _KINDS if fits(value)))
        if isinstance(snapshot, _Held):
            snapshot.parts = {key: self._make(part, depth + 1) for key, part in snapshot.read(value).items()}
        return snapshot

    def _note(self, value: Any, kind: type[Snapshot]) -> Snapshot:
        self._made[id(value)] = snapshot = kind(value)
        if isinstance(snapshot, _Numbers) and _lies_in_memory(value):
            storage = value.untyped_storage()
            if storage._cdata not in self._memories:
                self._memories[storage._cdata] = _Memory(storage)
            snapshot.memory = self._memories[storage._cdata]
            snapshot.memory.add(value)
        return snapshot


class _Same(Snapshot):
    """A value of which only the identity counts, or the value itself if it is immutable."""

    def is_like(self, now: Any) -> bool:
        if now is self.value:
            return True
        if not isinstance(self.value, CONSTANTS) or type(now) is not type(self.value):
            return False
        return bool(now == self.value) or bool(now != now and self.value != self.value)  # both are NaN

    def restored(self) -> Any:
        return self.value


class _Memory:
    """The recorded contents of a tensor storage, and the tensors that lie in it, as a whole or as views.

    Args:
        storage: of one of these tensors.
    """

    def __init__(self, storage: Any) -> None:
        self.storage, self.kept = storage, storage.clone()
        self.layouts: list[tuple[Tensor, torch.dtype, int, torch.Size, tuple[int, ...]]] = []

    def add(self, tensor: Tensor) -> None:
        layout = (int(tensor.storage_offset()), tensor.shape, tensor.stride())
        self.layouts.append((tensor, tensor.dtype, *layout))

    def restore(self) -> None:
        """Makes the tensors share a copy of the recorded storage. An autograd graph may still need the present one."""
        storage = self.kept.clone()
        for tensor, dtype, *layout in self.layouts:  # the recorded dtype: the tensor may have been cast since
            tensor.data = torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, *layout)


def _lies_in_memory(value: Tensor) -> bool:
    """Whether the storage of a tensor can be recorded as a whole: it is small enough, and the tensor a plain one."""
    is_plain = type(value) in (Tensor, nn.Parameter) and not (
        value.is_quantized or value.is_conj() or value.is_neg()
    )
    return is_plain and value.untyped_storage().nbytes() <= _BYTES


class _Numbers(Snapshot):
    """A tensor.

    Attributes:
        memory: its storage, perhaps shared with other tensors; None if that cannot be recorded as a whole.
    """

    def __init__(self, value: Tensor) -> None:
        super().__init__(value)
        self.kept = value.detach().clone()
        self.memory: _Memory | None = None

    def is_like(self, now: Any) -> bool:
        if not isinstance(now, Tensor) or (now.shape, now.dtype) != (self.kept.shape, self.kept.dtype):
            return False
        return _are_equal(now.detach(), self.kept.detach())

    def restored(self) -> Any:
        if not self.is_like(self.value):
            if self.memory is None:
                self.value.data = self.kept.clone()
            else:
                self.memory.restore()
        return self.value


class _Array(Snapshot):
    """A NumPy array; Python objects in it are compared by identity."""

    def __init__(self, value: np.ndarray) -> None:
        super().__init__(value)
        self.kept = value.copy()

    def is_like(self, now: Any) -> bool:
        is_alike = isinstance(now, np.ndarray) and (now.shape, now.dtype) == (
            self.kept.shape,
            self.kept.dtype,
        )
        return is_alike and bool(now.tobytes() == self.kept.tobytes())

    def restored(self) -> Any:
        if not self.is_like(self.value):
            if self.value.shape != self.kept.shape:
                self.value.resize(self.kept.shape, refcheck=False)
            self.value[...] = self.kept
        return self.value


class _Bytes(Snapshot):
    """A bytearray or an `array.array`."""

    def __init__(self, value: bytearray | array.array[Any]) -> None:
        super().__init__(value)
        self.kept = copy.copy(value)

    def is_like(self, now: Any) -> bool:
        return type(now) is type(self.kept) and bool(now == self.kept)

    def restored(self) -> Any:
        if not self.is_like(self.value):
            self.value[:] = self.kept
        return self.value


class _Counter(Snapshot):
    """An iterator that can only advance, so that a copy takes its place when it is restored."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.kept = _copy_counter(value)

    def is_like(self, now: Any) -> bool:
        return type(now) is type(self.kept) and _state_of(now) == _state_of(self.kept)

    def restored(self) -> Any:
        if not self.is_like(self.value):
            self.value = _copy_counter(self.kept)  # one copy for all places that held the iterator
        return self.value


def _copy_counter(value: Any) -> Any:
    with warnings.catch_warnings():
        # From Python 3.14 on iterators of itertools cannot be copied; then they are not recorded.
        warnings.simplefilter("ignore", DeprecationWarning)
        # A cycle contains another iterator.
        return copy.deepcopy(value) if isinstance(value, itertools.cycle) else copy.copy(value)


def _state_of(value: Any) -> str | tuple[Any, ...]:
    """The position of an iterator, as a value that can be compared."""
    if isinstance(value, tuple):
        return tuple(map(_state_of, value))
    if isinstance(value, itertools.count) or not isinstance(value, COUNTERS):
        return repr(value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return tuple(map(_state_of, value.__reduce__()[1:]))


class _Held(Snapshot):
    """A value that contains other values.

    Attributes:
        parts: snapshots of these by index, key or name.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.parts: dict[Any, Snapshot] = {}
        self._busy = False

    @abstractmethod
    def read(self, value: Any) -> dict[Any, Any]:
        """The values inside such a value, by index, key or name."""

    @abstractmethod
    def fill(self, parts: dict[Any, Any]) -> None:
        """Puts these values back into the recorded object."""

    def has_places(self, held: dict[Any, Any]) -> bool:
        """Whether the keys are the recorded ones, in the same order."""
        pairs = zip(held, self.parts, strict=False)
        return len(held) == len(self.parts) and all(
            # Keys with different hashes are not compared by ==, which for tensors compares number by number.
            now is before or (hash(now) == hash(before) and now == before)
            for now, before in pairs
        )

    def is_like(self, now: Any) -> bool:
        if type(now) is not type(self.value):
            return False
        if self._busy:  # the value contains itself
            return now is self.value
        self._busy = True
        try:
            held = self.read(now)
            return self.has_places(held) and all(part.is_like(held[key]) for key, part in self.parts.items())
        finally:
            self._busy = False

    def restored(self) -> Any:
        if not self._busy:
            self._busy = True
            try:
                parts = {key: part.restored() for key, part in self.parts.items()}
                held = self.read(self.value)
                if not self.has_places(held) or any(held[key] is not parts[key] for key in parts):
                    self.fill(parts)
            finally:
                self._busy = False
        return self.value


class _List(_Held):
    """A list or a deque."""

    def read(self, value: Any) -> dict[Any, Any]:
        return dict(enumerate(value))

    def fill(self, parts: dict[Any, Any]) -> None:
        self.value.clear()
        self.value.extend(parts.values())


class _Tuple(_List):
    """A tuple: it cannot change itself, only the values inside it are restored."""

    def fill(self, parts: dict[Any, Any]) -> None: ...


class _Dict(_Held):
    """A dictionary, including the order of its items."""

    def read(self, value: Any) -> dict[Any, Any]:
        return dict(value)

    def fill(self, parts: dict[Any, Any]) -> None:
        self.value.clear()
        self.value.update(parts)


class _Set(_Held):
    """A set, whose order does not count."""

    def read(self, value: Any) -> dict[Any, Any]:
        return dict.fromkeys(value)

    def has_places(self, held: dict[Any, Any]) -> bool:
        return held.keys() == self.parts.keys()

    def fill(self, parts: dict[Any, Any]) -> None:
        self.value.clear()
        self.value.update(parts)


class _Bound(_Held):
    """A bound method or a `functools.partial`: only the object or the arguments that it is bound to are restored."""

    def read(self, value: Any) -> dict[Any, Any]:
        if isinstance(value, types.MethodType):
            return {"function": value.__func__, "object": value.__self__}
        return {"function": value.func, "arguments": value.args, "keywords": value.keywords}

    def fill(self, parts: dict[Any, Any]) -> None: ...


class _Object(_Held):
    """An object with attributes, in slots or in `__dict__`."""

    def read(self, value: Any) -> dict[Any, Any]:
        return attributes(value)

    def fill(self, parts: dict[Any, Any]) -> None:
        slots = _slots(type(self.value))
        for name, slot in slots.items():
            if name in parts:
                slot.__set__(self.value, parts[name])
            else:
                with contextlib.suppress(AttributeError):  # the slot is empty now too
                    slot.__delete__(self.value)
        if hasattr(self.value, "__dict__"):
            vars(self.value).clear()
            vars(self.value).update({name: part for name, part in parts.items() if name not in slots})


def _is_fixed(value: Any) -> bool:
    """Whether nothing inside a value is recorded: constants, code, generators, parameters, too large or odd tensors."""
    if isinstance(value, Tensor):
        is_dense = value.layout == torch.strided and not (value.is_meta or value.is_nested)
        return isinstance(value, nn.Parameter) or not is_dense or value.numel() > LARGEST
    if isinstance(value, np.ndarray):
        return value.size > LARGEST
    return isinstance(value, (*CONSTANTS, frozenset, *_CODE, *GENERATORS))


_KINDS: list[tuple[Callable[[Any], bool], type[Snapshot]]] = [
    (_is_fixed, _Same),
    (lambda value: isinstance(value, Tensor), _Numbers),
    (lambda value: isinstance(value, np.ndarray), _Array),
    (lambda value: isinstance(value, COUNTERS), _Counter),
    (lambda value: isinstance(value, bytearray | array.array), _Bytes),
    (lambda value: isinstance(value, list | deque), _List),
    (lambda value: isinstance(value, tuple), _Tuple),
    (lambda value: isinstance(value, dict), _Dict),
    (lambda value: isinstance(value, set), _Set),
    (lambda value: isinstance(value, types.MethodType | functools.partial), _Bound),
    (has_own_values, _Object),
    (lambda value: True, _Same),
]


def _are_equal(now: Tensor, kept: Tensor) -> bool:
    """Whether two tensors hold the same values; NaN equals NaN."""
    if torch.equal(now, kept):
        return True
    if not (kept.is_floating_point() or kept.is_complex()):
        return False
    return bool(((now == kept) | (now.isnan() & kept.isnan())).all())
