"""Shared by all parts that try inputs: hostile values, and a way to try many inputs in one child."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from campaign.forks import MEMORY_BYTES, Violation, in_child
from ecnn.errors import InputError

#: Values that a JSON or TOML file can hold where something else is expected.
HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.0, -0.5, 1e308, 1e-320, 0.1, "", "x",
    "0", "8/255", "1/0", "nan", "../..", "\x00", "\ud83d\ude00", "a" * 5000, [], {}, [0], [[]], {"a": {}},
    [1, 2, 3, 4, 5, 6], "cuda", "/dev/zero", [None], [[[[[[[[0]]]]]]]],
)  # fmt: skip


def allowed(error: BaseException) -> bool:
    """Whether the package may raise this exception in Python: an InputError, or an error for an argument's wrong type.

    The latter is a TypeError. For an array in place of a number, NumPy and torch raise another error, which says that
    its truth value is ambiguous.
    """
    is_array = str(error).startswith(("The truth value of", "Boolean value of Tensor"))
    return isinstance(error, InputError | TypeError) or is_array


def one_by_one(
    work: Callable[[int], Iterator[tuple[str, list[tuple[str, str]]]]],
    names: list[str],
    folder: Path,
    mend: Callable[[int], None] = lambda number: None,
) -> Iterator[tuple[str, list[Violation]]]:
    """Tries inputs in one child, and yields the name and violations of each.

    An input that ends the child, or makes it hang, is itself a violation; the rest go on in a new child.

    Args:
        work: called in the child with the number of inputs that are done; yields a description and the violations of
            each further input.
        names: of the inputs, for those that give no answer.
        folder: working directory of the child.
        mend: called with the number of an input that ended its child, to undo what it left.
    """
    done = 0
    while done < len(names):
        ended = in_child(lambda: work(done), folder=folder)  # noqa: B023
        for name, broken in ended.answers:
            yield name, [Violation(*entry) for entry in broken]
        done += len(ended.answers)
        if done < len(names):
            kind = "hang" if ended.status is None else "status"
            yield names[done], [Violation(kind, f"the process ended with {ended.status}: {ended.last_words}")]
            mend(done)
            done += 1
        elif ended.megabytes > MEMORY_BYTES >> 20:
            yield "one of these", [Violation("memory", f"{ended.megabytes} MB: {', '.join(names)[:150]}")]
