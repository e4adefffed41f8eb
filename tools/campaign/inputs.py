"""What inputs of all kinds share: values nobody means, and many of them tried in one child."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from campaign.forks import MEMORY_BYTES, Violation, in_child
from ecnn.errors import InputError

#: What a JSON or TOML file can hold where something else is expected.
HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.0, -0.5, 1e308, 1e-320, 0.1, "", "x",
    "0", "8/255", "1/0", "nan", "../..", "\x00", "\ud83d\ude00", "a" * 5000, [], {}, [0], [[]], {"a": {}},
    [1, 2, 3, 4, 5, 6], "cuda", "/dev/zero", [None], [[[[[[[[0]]]]]]]],
)  # fmt: skip


def allowed(error: BaseException) -> bool:
    """Whether a caller in Python may meet this exception: ours, or one for an argument of a wrong type.

    The latter is a TypeError; of an array in place of a number NumPy and torch say instead that it is neither true nor
    false.
    """
    is_array = str(error).startswith(("The truth value of", "Boolean value of Tensor"))
    return isinstance(error, InputError | TypeError) or is_array


def one_by_one(
    work: Callable[[int], Iterator[tuple[str, list[tuple[str, str]]]]],
    names: list[str],
    folder: Path,
    mend: Callable[[int], None] = lambda number: None,
) -> Iterator[tuple[str, list[Violation]]]:
    """What the inputs broke, all tried in one child; one that ends or hangs it is to blame, and the rest go on.

    Args:
        work: called in the child with the number of inputs that are done, yields a description and what was broken.
        names: of the inputs, for one that gave no answer.
        mend: called with the number of an input that ended its child, to clean up behind it.
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
