"""One case in a child process: what it printed, how it ended, how long it took and how much memory it held."""

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

#: A case that takes longer hangs.
HANG_SECONDS = 20.0
# A child whose parent was killed ends by itself.
_ORPHAN_SECONDS = 900
#: A process that holds more is too large.
MEMORY_BYTES = 2 * 2**30
#: What `ecnn` may end with: done or believable, not believable, wrong request, inconclusive, fault, interrupted.
STATUSES = (0, 1, 2, 3, 4, 130)
TRACEBACK = "Traceback (most recent call last)"
UNFORESEEN = re.compile(r"the machine or the model failed: (?!OSError|MemoryError)")


@dataclass(frozen=True)
class Violation:
    """A promise that was broken.

    Attributes:
        kind: which, a key of `table.KINDS`.
        detail: what was seen, in a line.
    """

    kind: str
    detail: str


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        status: of the process; the negative number of the signal that ended it, None if it hung.
        answers: what the work yielded, as far as it came.
    """

    status: int | None
    out: str
    err: str
    answers: list[Any]
    megabytes: int

    def violations(self, *, statuses: Sequence[int] = STATUSES) -> list[Violation]:
        """Which of the promises that every process makes were broken."""
        found = []
        if self.status is None:
            found.append(Violation("hang", "still running"))
        elif self.status not in statuses:
            found.append(Violation("status", f"status {self.status}: {self.last_words}"))
        # An error that nobody foresaw is a traceback too, even where it is told in a sentence.
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
        work: called in the child; what it yields comes back. SystemExit gives the status; any other exception prints
            its traceback and gives status 1, as Python does.
        seconds: without an answer, after which the child is killed and counts as hanging.
        interrupt_after: sends Ctrl-C then, for work that may be long by right; `seconds` count from there.
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
    """`ecnn` with these words, as work for a child."""

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
    """Address space for as much as a process may hold and a little more; what asks for more is refused, and seen."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux: only what was held is measured
        return
    limit = pages * resource.getpagesize() + MEMORY_BYTES + 2**28
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read_all(
    pid: int, ends: dict[str, int], seconds: float, interrupt_after: float | None
) -> tuple[dict[str, bytearray], bool]:
    """Everything that the child writes, and whether it ended in time."""
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
    """The answers that came whole."""
    stream, found = io.BytesIO(bytes(data)), []
    while True:
        try:
            found.append(pickle.load(stream))  # noqa: S301 (from our own child)
        except (EOFError, pickle.UnpicklingError):
            return found
