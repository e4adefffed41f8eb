"""A deadline for attacks: after it, a search ends with `OutOfTimeError` at its next pass through the model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

NO_TIME = "there was no time left"
_END: ContextVar[float | None] = ContextVar("end_of_searching", default=None)


class OutOfTimeError(BaseException):
    """Raised when a search reaches its deadline.

    Like KeyboardInterrupt it is a BaseException, not an Exception: code that catches every error of a model must not
    catch this one.
    """


@contextmanager
def until(moment: float | None) -> Iterator[None]:
    """Sets a deadline, on the clock of `time.monotonic`, for searches in this context.

    The earliest deadline of nested contexts counts. None adds no deadline.
    """
    ends = [end for end in (_END.get(), moment) if end is not None]
    token = _END.set(min(ends, default=None))
    try:
        yield
    finally:
        _END.reset(token)


def time_is_over() -> bool:
    """Whether a deadline is set and has passed."""
    end = _END.get()
    return end is not None and time.monotonic() > end


def check_time() -> None:
    """Raises OutOfTimeError if a deadline is set and has passed."""
    if time_is_over():
        raise OutOfTimeError(NO_TIME)
