"""`CodeMatrix`: the symbol of each class in each task, the distances of rows and of columns, and the energy."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ecnn import files
from ecnn.bounds import max_entropy, min_column_distance_bound, min_row_distance_bound, most_balanced
from ecnn.checks import check_array, check_choice, check_count, check_kind, shown
from ecnn.errors import InputError

FORMAT = "ecnn-code"
VERSION = 1
MAX_ARITY = 256
#: Most classes, and most tasks times arity: tables of all pairs stay below 200 MB.
MAX_CLASSES, MAX_SYMBOLS = 2048, 4096
ColumnWeight = float | Literal["balanced"]

# Two different splits of up to a million classes are farther apart than this, in nats. Less is a rounding error.
_SAME_SPLIT = 1e-9
_INFINITE = 1e300


def entropy(probabilities: np.ndarray) -> float:
    """Shannon entropy in nats, with 0 log 0 = 0."""
    positive = probabilities[probabilities > 0]
    return float(-(positive * np.log(positive)).sum())


def hamming_distance(a: np.ndarray, b: np.ndarray) -> int:
    """Number of tasks in which two codewords have different symbols."""
    return int((a != b).sum())


def variation_of_information(a: np.ndarray, b: np.ndarray) -> float:
    """How much two splits of the classes disagree, in nats; 0 when one only renames the other.

    Two columns at distance 0 are the same task, so fooling one member fools the other (eq:vi).

    Args:
        a, b: (class,) integer group of each class; the order of group numbers means nothing.
    """
    joint = np.zeros((a.max() + 1, b.max() + 1))
    np.add.at(joint, (a, b), 1 / len(a))
    vi = 2 * entropy(joint) - entropy(joint.sum(axis=1)) - entropy(joint.sum(axis=0))
    return vi if vi > _SAME_SPLIT else 0.0


def check_size(num_classes: int, code_length: int, arity: int) -> None:
    """Raises InputError unless a code of that size with distinct codewords can exist."""
    check_count("num_classes", num_classes, least=2, most=MAX_CLASSES)
    check_count("arity", arity, least=2, most=MAX_ARITY)
    check_count("code_length", code_length, most=MAX_SYMBOLS // int(arity))
    num_classes, code_length, arity = int(num_classes), int(code_length), int(arity)  # NumPy's would overflow
    if code_length * math.log2(arity) < 63 and arity**code_length < num_classes:
        needed = math.ceil(math.log(num_classes, arity) - 1e-12)
        raise InputError(
            f"{num_classes} classes need {num_classes} different codewords, but {code_length} symbols of arity "
            f"{arity} spell only {arity**code_length}: use a code_length of at least {needed}."
        )


def balanced_column_weight(num_classes: int, code_length: int, arity: int = 2) -> float:
    """The weight of the column term at which both terms of the energy count about the same (eq:Mobj_alternative).

    It depends on the size alone. With it, the two terms are equal for a code in which every pair of rows has the
    largest possible average distance and every pair of columns the bound on d_VI.

    Departs: the paper says that eta makes the sums "roughly" equal and gives no value. A weight taken from the
        code itself would make the column term vanish from the optimisation.
    """
    if code_length < 2:
        return 1.0
    row_pairs = math.comb(num_classes, 2)
    unseparated = sum(math.comb(size, 2) for size in most_balanced(num_classes, arity).tolist())
    row_distance = code_length * (1 - unseparated / row_pairs)
    column_distance = min_column_distance_bound(num_classes, code_length, arity=arity)
    if column_distance <= _SAME_SPLIT:  # some columns must be the same task, whatever the weight
        column_distance = max_entropy(num_classes, arity)
    return row_pairs * row_distance**-2 / (math.comb(code_length, 2) * column_distance**-2)


def resolve_column_weight(
    column_weight: ColumnWeight, num_classes: int, code_length: int, arity: int
) -> float:
    """The weight of the column term as a number: "balanced" is computed from the size, a number is only checked."""
    if column_weight == "balanced":
        return balanced_column_weight(num_classes, code_length, arity)
    if not isinstance(column_weight, int | float | np.number) or not 0 <= column_weight < _INFINITE:
        raise InputError(
            f'column_weight must be "balanced" or a number from 0 up, not {shown(column_weight)}.'
        )
    return float(column_weight)


@dataclass(frozen=True)
class CodeReport:
    """A code's distances and other figures, with bounds on what any code of its size could have."""

    num_classes: int
    code_length: int
    arity: int
    min_row_distance: int
    min_row_distance_bound: int
    min_column_distance: float
    min_column_distance_bound: float
    correctable_errors: int
    correctable_errors_bound: int
    smallest_group: int
    smallest_group_bound: int
    energy: float
    column_weight: float

    def __str__(self) -> str:
        kind = "binary" if self.arity == 2 else f"{self.arity}-ary"
        rows = [
            ("rows: min Hamming distance", f"{self.min_row_distance}", f"{self.min_row_distance_bound}"),
            ("symbol errors corrected", f"{self.correctable_errors}", f"{self.correctable_errors_bound}"),
            (
                "columns: min VI distance (nats)",
                f"{self.min_column_distance:.4f}",
                f"{self.min_column_distance_bound:.4f}",
            ),
            ("smallest group of classes", f"{self.smallest_group}", f"{self.smallest_group_bound}"),
            (f"energy (column weight {self.column_weight:.4g})", f"{self.energy:.6g}", ""),
        ]
        head = f"{self.num_classes} classes x {self.code_length} {kind} tasks"
        lines = [f"{head:<42}{'this code':>10}{'bound':>8}"]
        lines += [f"  {name:<40}{value:>10}{bound:>8}".rstrip() for name, value, bound in rows]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class CodeMatrix:
    """An immutable code: row i is the codeword of class i, column n the task that member n learns.

    Attributes:
        symbols: (class, task) integers 0..arity-1, read-only.
        arity: number of symbols that a task may have as its answer.
        provenance: where the code comes from, plain JSON values; ignored by equality and by the hash.
        allow_equal_rows: accept classes with the same codeword, which no decoder can tell apart.
        allow_constant_columns: accept tasks with the same symbol for all classes, which teach a member nothing.
    """

    symbols: np.ndarray
    arity: int = 2
    provenance: Mapping[str, Any] = field(default_factory=dict, repr=False, kw_only=True)
    allow_equal_rows: bool = field(default=False, repr=False, kw_only=True)
    allow_constant_columns: bool = field(default=False, repr=False, kw_only=True)

    def __init__(
        self,
        symbols: npt.ArrayLike,
        arity: int = 2,
        *,
        provenance: Mapping[str, Any] | None = None,
        allow_equal_rows: bool = False,
        allow_constant_columns: bool = False,
    ) -> None:
        if provenance is not None:
            check_kind("provenance", provenance, Mapping, "a table")
        checked = _checked_symbols(symbols, arity)
        check_count("num_classes", len(checked), least=2)
        if not allow_equal_rows:
            check_size(checked.shape[0], checked.shape[1], arity)
            _refuse_equal_rows(checked)
        if not allow_constant_columns:
            constant = np.flatnonzero((checked == checked[0]).all(axis=0))
            if len(constant):
                raise InputError(
                    f"column {constant[0]} gives every class the symbol {checked[0, constant[0]]}, so its member "
                    "would learn nothing: change it or pass allow_constant_columns=True."
                )
        checked.setflags(write=False)
        for name, value in (
            ("symbols", checked),
            ("arity", int(arity)),
            ("provenance", MappingProxyType(dict(provenance or {}))),
            ("allow_equal_rows", allow_equal_rows),
            ("allow_constant_columns", allow_constant_columns),
        ):
            object.__setattr__(self, name, value)

    @property
    def num_classes(self) -> int:
        return int(self.symbols.shape[0])

    @property
    def code_length(self) -> int:
        return int(self.symbols.shape[1])

    @cached_property
    def signed(self) -> np.ndarray:
        """(class, task) the binary code as -1 and +1, the paper's 2M - 1."""
        if self.arity != 2:
            raise InputError(f"only a binary code has signs; this one has arity {self.arity}: use one_hot.")
        return _read_only(2 * self.symbols.astype(np.int8) - 1)

    @cached_property
    def one_hot(self) -> np.ndarray:
        """(class, task, symbol) 1 where the codeword of the class has that symbol in the task, else 0."""
        return _read_only((self.symbols[:, :, None] == np.arange(self.arity)).astype(np.int8))

    @cached_property
    def row_distances(self) -> np.ndarray:
        """(class, class) Hamming distances between codewords."""
        flat = self.one_hot.reshape(self.num_classes, -1).astype(np.float64)
        return _read_only(self.code_length - np.rint(flat @ flat.T).astype(np.int64))

    @cached_property
    def column_distances(self) -> np.ndarray:
        """(task, task) variation of information between columns, in nats."""
        flat = self.one_hot.reshape(self.num_classes, -1).astype(np.float64)
        joint = (flat.T @ flat).reshape(self.code_length, self.arity, self.code_length, self.arity)
        # With c log c of the counts, the log(num_classes) terms of the three entropies cancel.
        joint_term = _count_log_count(joint).sum(axis=(1, 3))
        own_term = _count_log_count(flat.sum(axis=0)).reshape(self.code_length, self.arity).sum(axis=1)
        vi = (own_term[:, None] + own_term[None, :] - 2 * joint_term) / self.num_classes
        return _read_only(np.where(vi > _SAME_SPLIT, vi, 0.0))

    @property
    def min_row_distance(self) -> int:
        """The paper's d_H: the smallest Hamming distance between two codewords."""
        return int(_pairs(self.row_distances).min())

    @property
    def min_column_distance(self) -> float:
        """The paper's d_VI in nats; infinite when there is only one column."""
        return float(_pairs(self.column_distances).min(initial=math.inf))

    @property
    def correctable_errors(self) -> int:
        """Number of wrong symbols up to which nearest-codeword decoding is always right."""
        return max(self.min_row_distance - 1, 0) // 2

    @property
    def group_sizes(self) -> np.ndarray:
        """(task, symbol) number of classes with each symbol."""
        return np.asarray(self.one_hot.sum(axis=0, dtype=np.int64))

    def energy(self, column_weight: ColumnWeight = "balanced") -> float:
        """The objective of annealing: sum H^-2 over pairs of rows + weight * sum VI^-2 over pairs of columns.

        Infinite if two rows are equal or, with a positive weight, two columns are the same task (eq:Mobj_alternative).

        Departs: sums run over unordered pairs, so values are half of the printed ones; the minimisers are the same.
        """
        weight = resolve_column_weight(column_weight, self.num_classes, self.code_length, self.arity)
        with np.errstate(divide="ignore"):
            rows = (_pairs(self.row_distances).astype(np.float64) ** -2).sum()
            columns = (_pairs(self.column_distances) ** -2).sum()
        return float(rows + (weight * columns if weight else 0.0))

    def nearest(self, received: npt.ArrayLike) -> np.ndarray:
        """The class whose codeword differs from each received word in the fewest symbols (ties: the lowest).

        Args:
            received: (word, task) integers 0..arity-1.

        Returns:
            (word,) class indices.
        """
        words = _checked_symbols(received, self.arity, "received words")
        check_array("received words", words, "word", self.code_length)
        flat = self.one_hot.reshape(self.num_classes, -1).astype(np.float64)
        agreements = (words[:, :, None] == np.arange(self.arity)).reshape(len(words), -1) @ flat.T
        return np.asarray(np.argmax(agreements, axis=1))

    def report(self, column_weight: ColumnWeight = "balanced") -> CodeReport:
        """This code's figures with the bounds for its size; `print` shows them as a small table."""
        size = (self.num_classes, self.code_length)
        row_bound = min_row_distance_bound(*size, arity=self.arity)
        return CodeReport(
            num_classes=self.num_classes,
            code_length=self.code_length,
            arity=self.arity,
            min_row_distance=self.min_row_distance,
            min_row_distance_bound=row_bound,
            min_column_distance=self.min_column_distance,
            min_column_distance_bound=min_column_distance_bound(*size, arity=self.arity),
            correctable_errors=self.correctable_errors,
            correctable_errors_bound=max(row_bound - 1, 0) // 2,
            smallest_group=int(self.group_sizes.min()),
            smallest_group_bound=self.num_classes // self.arity,
            energy=self.energy(column_weight),
            column_weight=resolve_column_weight(column_weight, *size, self.arity),
        )

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of size, arity and symbols: two codes are equal exactly when their hashes are."""
        head = f"{FORMAT} {self.num_classes} {self.code_length} {self.arity}\n".encode()
        return hashlib.sha256(head + self.symbols.tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CodeMatrix):
            return NotImplemented
        return self.arity == other.arity and np.array_equal(self.symbols, other.symbols)

    def __hash__(self) -> int:
        return hash(self.content_hash)

    def __repr__(self) -> str:
        return (
            f"CodeMatrix({self.num_classes} classes x {self.code_length} tasks, arity {self.arity}, "
            f"d_H {self.min_row_distance}, d_VI {self.min_column_distance:.4f})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CodeMatrix.from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """The code as plain JSON values; `from_dict` reads them back."""
        value: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "num_classes": self.num_classes,
            "code_length": self.code_length,
            "arity": self.arity,
            "hash": self.content_hash,
            "provenance": dict(self.provenance),
            "symbols": self.symbols.tolist(),
        }
        for permission in ("allow_equal_rows", "allow_constant_columns"):
            if getattr(self, permission):
                value[permission] = True
        return value

    @classmethod
    def from_dict(cls, value: Any) -> CodeMatrix:
        """The code that `to_dict` described; anything else is an InputError."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise InputError(f'not a code: expected a JSON object with "format": "{FORMAT}".')
        if value.get("version") != VERSION:
            raise InputError(
                f"this code has format version {value.get('version')!r}, but only {VERSION} is known here: "
                "use a newer ecnn."
            )
        missing = [key for key in ("arity", "symbols") if key not in value]
        if missing:
            raise InputError(f'a code needs the key "{missing[0]}".')
        if not isinstance(value.get("provenance", {}), dict):
            raise InputError('the "provenance" of a code must be an object.')
        code = cls(
            value["symbols"],
            value["arity"],
            provenance=value.get("provenance"),
            allow_equal_rows=value.get("allow_equal_rows") is True,
            allow_constant_columns=value.get("allow_constant_columns") is True,
        )
        for key, found in (
            ("num_classes", code.num_classes),
            ("code_length", code.code_length),
            ("hash", code.content_hash),
        ):
            if value.get(key, found) != found:
                raise InputError(
                    f"the symbols do not match the file's {key}: it was changed after it was written "
                    f"(remove the key to accept the symbols as they are)."
                )
        return code

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the code as JSON, atomically; returns the path."""
        return files.write_json(path, self.to_dict())


def load_code(source: str | os.PathLike[str]) -> CodeMatrix:
    """A shipped code by name (`"10x30"`, `"10x30-q3"`, see `codebook`) or a code file by path."""
    if str(source) in codebook():
        with resources.as_file(resources.files("ecnn") / "codebook" / f"{source}.json") as path:
            return _load_file(path)
    if not files.exists(source) and Path(source).suffix == "":
        check_choice("a code that is not a file", str(source), codebook())
    return _load_file(Path(source))


def codebook() -> tuple[str, ...]:
    """Names of the shipped codes, the paper's sizes, smallest first."""
    entries = (resources.files("ecnn") / "codebook").iterdir()
    names = [entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json")]
    return tuple(sorted(names, key=lambda name: [int(part) for part in name.replace("-q", "x").split("x")]))


def _load_file(path: Path) -> CodeMatrix:
    value = files.read_json(path)
    try:
        return CodeMatrix.from_dict(value)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _checked_symbols(symbols: npt.ArrayLike, arity: int, what: str = "symbols") -> np.ndarray:
    """The symbols as a new (row, task) uint8 array; an InputError names the first wrong one."""
    try:
        array = np.asarray(symbols)
    except ValueError as error:
        raise InputError(f"{what} must be a table with rows of equal length.") from error
    if array.dtype == np.bool_:
        array = array.astype(np.int64)
    check_array(what, array, "row", "task", dtype="whole numbers")
    if array.size == 0:
        raise InputError(f"{what} must hold at least one row and one task, not {array.shape}.")
    check_count("arity", arity, least=2, most=MAX_ARITY)
    wrong = np.argwhere((array < 0) | (array >= arity))
    if len(wrong):
        row, task = wrong[0]
        raise InputError(
            f"{what} must lie in 0..{arity - 1} for arity {arity}, but row {row}, task {task} is {array[row, task]}."
        )
    return array.astype(np.uint8)


def _refuse_equal_rows(symbols: np.ndarray) -> None:
    seen: dict[bytes, int] = {}
    for index, row in enumerate(symbols):
        first = seen.setdefault(row.tobytes(), index)
        if first != index:
            raise InputError(
                f"classes {first} and {index} have the same codeword, so no decoder could tell them apart: change "
                "one or pass allow_equal_rows=True."
            )


def _pairs(distances: np.ndarray) -> np.ndarray:
    """(pair,) the entries above the diagonal."""
    return distances[np.triu_indices(len(distances), k=1)]


def _count_log_count(counts: np.ndarray) -> np.ndarray:
    return counts * np.log(np.where(counts > 0, counts, 1))


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
