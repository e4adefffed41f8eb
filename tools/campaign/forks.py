"""Runs one case in a child process: returns its output, its status and its memory, and notices if it hangs."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import resource
import runpy
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: A case that gives no answer for longer counts as hanging.
HANG_SECONDS = 20.0
# After so long a child ends by itself, in case its parent was killed.
_ORPHAN_SECONDS = 900
#: A process that uses more memory is a violation.
MEMORY_BYTES = 2 * 2**30
#: Exit statuses that `ecnn` may have: done or believable, not believable, wrong request, inconclusive, fault, Ctrl-C.
STATUSES = (0, 1, 2, 3, 4, 130)
TRACEBACK = "Traceback (most recent call last)"
UNFORESEEN = re.compile(r"the machine or the model failed: (?!OSError|MemoryError)")


@dataclass(frozen=True)
class Violation:
    """A promise of the package that a case has broken.

    Attributes:
        kind: of promise, a key of `table.KINDS`.
        detail: what was observed, in a line.
    """

    kind: str
    detail: str


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        status: exit status; minus the signal number if a signal ended it, None if it hung.
        out, err: its output.
        answers: the values that the work yielded before it ended.
        megabytes: peak memory.
    """

    status: int | None
    out: str
    err: str
    answers: list[Any]
    megabytes: int

    def violations(self, *, statuses: Sequence[int] = STATUSES) -> list[Violation]:
        """Violations of what every process promises: no hang, a known status, no traceback, bounded memory."""
        found = []
        if self.status is None:
            found.append(Violation("hang", "still running"))
        elif self.status not in statuses:
            found.append(Violation("status", f"status {self.status}: {self.last_words}"))
        # An unforeseen error counts as a traceback too, even if the command reports it in a sentence.
        if TRACEBACK in self.err or UNFORESEEN.search(self.err):
            found.append(Violation("traceback", self.last_words))
        refused = "alloc" in self.err or "MemoryError" in self.err or "out of memory" in self.err.lower()
        if self.megabytes > MEMORY_BYTES >> 20 or refused:
            found.append(Violation("memory", f"{self.megabytes} MB, {self.last_words}"))
        return found

    @property
    def last_words(self) -> str:
        """The last line on standard error."""
        return (self.err.strip().splitlines() or [""])[-1][:300]


def in_child(
    work: Callable[[], Iterator[Any] | None],
    *,
    folder: Path,
    seconds: float = HANG_SECONDS,
    interrupt_after: float | None = None,
) -> Ended:
    """Runs the work in a child whose working and temporary directory is `folder`, and waits for its end.

    Args:
        work: called in the child; the values that it yields are sent back. SystemExit gives the status; any other
            exception prints its traceback and gives status 1, as in Python.
        seconds: how long the child may go without yielding a value; then it is killed and counts as hanging.
        interrupt_after: seconds after which Ctrl-C is sent, for work that is allowed to take long; `seconds` count from
            then on.
    """
    pipes = {name: os.pipe() for name in ("out", "err", "answers")}
    pid = os.fork()
    if pid == 0:
        _be_the_child(work, folder, {name: ends[1] for name, ends in pipes.items()})
    for _, write_end in pipes.values():
        os.close(write_end)
    read, in_time = _read_all(pid, {name: ends[0] for name, ends in pipes.items()}, seconds, interrupt_after)
    if not in_time:
        os.killpg(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return Ended(
        status=os.waitstatus_to_exitcode(status) if in_time else None,
        out=read["out"].decode(errors="replace"),
        err=read["err"].decode(errors="replace"),
        answers=_unpickle_all(read["answers"]),
        megabytes=usage.ru_maxrss >> 10,
    )


def command(*words: str) -> Callable[[], None]:
    """Work for a child: the command `ecnn` with these arguments."""

    def work() -> None:
        sys.argv = ["ecnn", *words]
        runpy.run_module("ecnn", run_name="__main__")

    return work


def _be_the_child(work: Callable[[], Iterator[Any] | None], folder: Path, ends: dict[str, int]) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.alarm(_ORPHAN_SECONDS)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(ends["out"], 1)
        os.dup2(ends["err"], 2)
        for name, end, errors in (
            ("stdout", 1, "strict"),
            ("stderr", 2, "backslashreplace"),
        ):  # as Python has them
            setattr(sys, name, io.TextIOWrapper(io.FileIO(end, "w", closefd=False), "utf-8", errors))
        os.chdir(folder)
        tempfile.tempdir = str(folder)
        os.environ["TMPDIR"] = str(folder)
        _limit_memory()
        answers = os.fdopen(ends["answers"], "wb", buffering=0)
        for answer in work() or ():
            pickle.dump(answer, answers)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status & 255)


def _limit_memory() -> None:
    """Limits the address space to a little more than a process may use, so that larger allocations fail visibly."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux: memory is only measured, not limited
        return
    limit = pages * resource.getpagesize() + MEMORY_BYTES + 2**28
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read_all(
    pid: int, ends: dict[str, int], seconds: float, interrupt_after: float | None
) -> tuple[dict[str, bytearray], bool]:
    """Everything that the child writes, by the name of the pipe, and whether it ended in time."""
    read = {name: bytearray() for name in ends}
    deadline = time.monotonic() + (seconds if interrupt_after is None else interrupt_after)
    with selectors.DefaultSelector() as selector:
        for name, end in ends.items():
            selector.register(end, selectors.EVENT_READ, name)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                if interrupt_after is None:
                    break
                os.kill(pid, signal.SIGINT)
                interrupt_after, deadline = None, time.monotonic() + seconds
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                read[key.data] += data
                if key.data == "answers":
                    deadline = time.monotonic() + seconds
                if not data:
                    selector.unregister(key.fd)
        in_time = not selector.get_map()
    for end in ends.values():
        os.close(end)
    return read, in_time


def _unpickle_all(data: bytearray) -> list[Any]:
    """The answers that arrived completely."""
    stream, found = io.BytesIO(bytes(data)), []
    while True:
        try:
            found.append(pickle.load(stream))  # noqa: S301 (from our own child)
        except (EOFError, pickle.UnpicklingError):
            return found
