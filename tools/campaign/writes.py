"""Hooks into the write events of a process: to count them, to make one fail, or to kill the process at one."""

from __future__ import annotations

import builtins
import errno
import io
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Functions of `os` that change the disk, with the position of the argument, a path or descriptor, that says where.
_CALLS = {
    "open": 0, "write": 0, "fsync": 0, "replace": 1, "rename": 1, "unlink": 0, "remove": 0, "mkdir": 0, "rmdir": 0,
    "chmod": 0, "link": 1, "symlink": 1, "truncate": 0, "ftruncate": 0,
}  # fmt: skip
#: Errors that an operating system can return.
FAULTS = ("ENOSPC", "EIO", "EACCES", "ENOMEM", "EROFS", "EDQUOT", "EMFILE")

Hook = Callable[[int, str, str], None]


def watch(folder: Path, before: Hook, after: Hook | None = None, *, reads: bool = False) -> None:
    """From now on calls `before(number, name, path)` before every write event below the folder, and `after` after it.

    With `reads`, files that are opened for reading count too.

    Only for child processes: the patched functions are never restored. `fsync` is an event but does nothing, since
    processes are killed here and not machines. Writes by compiled libraries, such as of tensors, are not noticed;
    `limit_file_size` affects those.
    """
    lock, count, inside = threading.Lock(), [0], str(folder)

    def wrapped(name: str, position: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            path = _path_of(args[position]) if len(args) > position else ""
            changes = _writes(name, args, kwargs)
            if not path.startswith(inside) or not (reads or changes):
                return call(*args, **kwargs)
            with lock:
                count[0] += 1
                number = count[0]
            before(number, name if changes else "read", path)
            result = None if name == "fsync" else call(*args, **kwargs)
            if after:
                after(number, name, path)
            return result

        return run

    for name, position in _CALLS.items():
        setattr(os, name, wrapped(name, position, getattr(os, name)))
    builtins.open = io.open = wrapped("file", 0, open)


def die_at(number: int, *, behind: bool) -> tuple[Hook, Hook]:
    """Hooks (before, after) that kill the process with SIGKILL before or, with `behind`, after the numbered event."""

    def die(event: int, name: str, path: str) -> None:
        if event == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def nothing(event: int, name: str, path: str) -> None:
        pass

    return (nothing, die) if behind else (die, nothing)


def fail_at(number: int, fault: str, *, from_then_on: bool) -> Hook:
    """A hook that raises an OSError or MemoryError at the numbered event; with `from_then_on` also at later ones."""

    def fail(event: int, name: str, path: str) -> None:
        # A full disk still lets files be removed.
        if event == number or (from_then_on and event > number and name not in ("unlink", "remove", "rmdir")):
            if fault == "MemoryError":
                raise MemoryError
            code = getattr(errno, fault)
            raise OSError(code, os.strerror(code), path)

    return fail


def limit_file_size(size: int, *, deadly: bool) -> None:
    """Limits the size of files: a write beyond it is cut short, and the next one fails, or kills if `deadly`."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _path_of(value: Any) -> str:
    if isinstance(value, int):
        try:
            return str(Path(f"/proc/self/fd/{value}").readlink())
        except OSError:
            return ""
    try:
        return os.path.abspath(os.fsdecode(value))  # noqa: PTH100 (the path as it was asked for, links and all)
    except TypeError:
        return ""


def _writes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call may change the disk: for calls that open a file, whether it is opened for writing."""
    if name == "open":
        return bool(
            (args[1] if len(args) > 1 else kwargs.get("flags", 0)) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
    if name == "file":
        return any(letter in (args[1] if len(args) > 1 else kwargs.get("mode", "r")) for letter in "wax+")
    return True
