"""A moment after which no attack asks the model any more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

NO_TIME = "there was no time left"
_END: ContextVar[float | None] = ContextVar("end_of_searching", default=None)


class OutOfTimeError(BaseException):
    """A search that was under way when its time was over.

    No Exception, as an interruption from the keyboard is none: who goes on after whatever a model throws does not go on
    after this.
    """


@contextmanager
def until(moment: float | None) -> Iterator[None]:
    """Inside, searches end with an OutOfTimeError at that moment of `time.monotonic`; None sets no end of its own."""
    ends = [end for end in (_END.get(), moment) if end is not None]
    token = _END.set(min(ends, default=None))
    try:
        yield
    finally:
        _END.reset(token)


def time_is_over() -> bool:
    """Whether the moment that was set has come."""
    end = _END.get()
    return end is not None and time.monotonic() > end


def check_time() -> None:
    """Raises OutOfTimeError if the moment that was set has come."""
    if time_is_over():
        raise OutOfTimeError(NO_TIME)
