"""Files on disk: atomic writes, checked reads, temporary files, and locks on folders."""

from __future__ import annotations

import errno
import fnmatch
import functools
import hashlib
import os
import platform
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ecnn.errors import DiskError, InputError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: folders are not locked there, and temporary files of killed writers stay
    fcntl = None

AnyPath = str | os.PathLike[str]

MAX_JSON_BYTES = 64 * 2**20
MAX_IMAGE_BYTES = 256 * 2**20
MAX_ARRAY_BYTES = 4 * 2**30
MAX_TENSOR_BYTES = 64 * 2**30
_LOCK, _TEMPORARY = ".ecnn-lock", ".ecnn-tmp-"
# Errors that another path can avoid (InputError). Every other OSError is a fault of the machine (DiskError).
_MISTAKES = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
_MISTAKEN = (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


@contextmanager
def naming(path: AnyPath, verb: str) -> Iterator[None]:
    """Turns an OSError inside into an InputError or, for a fault of the machine, a DiskError, with path and reason.

    An impossible file name, which raises ValueError, is an InputError too.

    Args:
        path: the file or folder that the message names.
        verb: what is done with it, such as "write".
    """
    try:
        yield
    except DiskError:
        raise
    except ValueError as error:
        if isinstance(error, InputError) or not (
            "null" in str(error) or isinstance(error, UnicodeEncodeError)
        ):
            raise
        raise InputError(f"cannot {verb} {str(path)!r}: no file can have this name.") from error
    except OSError as error:
        # safetensors raises FileNotFoundError without a `strerror`.
        reason = "No such file or directory" if isinstance(error, FileNotFoundError) else error.strerror
        if isinstance(error, _MISTAKES) or error.errno in _MISTAKEN:
            raise InputError(f"cannot {verb} {path}: {reason or error}.") from error
        raise DiskError(
            f"cannot {verb} {path}: {reason or error}; what was written before is kept: make room, or mend the disk, "
            "and start the same again."
        ) from error


def _kind_of(path: AnyPath) -> str | None:
    """The type of what is at a path, with links followed: "" for a file, None for nothing, else words ("a folder")."""
    try:
        mode = os.stat(os.fspath(path)).st_mode  # fspath refuses numbers, which stat takes for open files
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:  # a zero byte
        raise InputError(f"{path!r} cannot be the name of a file.") from error
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no file")


def _target_of(path: AnyPath) -> Path:
    """The path to write to, with links followed; InputError if something is there that is not a file."""
    with naming(path, "write"):
        kind = _kind_of(path)
        target = Path(os.path.realpath(path))
    if kind:
        raise InputError(f"cannot write {path}: it is {kind}, not a file; choose another name.")
    if target.is_symlink():
        raise InputError(f"cannot write {path}: it is a link that leads nowhere; choose another name.")
    return target


def write_atomically(path: AnyPath, write: Callable[[Path], object], *, durable: bool = False) -> Path:
    """Calls `write` with a temporary path beside the target, then moves it there in one step.

    A kill, a full disk or an exception inside `write` leaves the target as it was. Only a kill can leave a temporary
    file behind, which the next writer in that folder removes. If the path is a link, its target is replaced.
    `durable` also waits until the data are on the disk, against a loss of power. Returns the path.
    """
    with _written(path, write, durable) as (temporary, target):
        os.replace(temporary, target)
    return Path(path)


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Writes files that belong together: all to temporary files first, which then replace the targets, in their order.

    A full disk or an exception leaves all targets as they were. A kill can leave the first ones new and the last ones
    old. To detect this, let the first file hold a checksum of the last, and compare them when they are read.
    """
    with ExitStack() as stack:
        written = [
            stack.enter_context(_written(path, functools.partial(_write_bytes, content), durable=True))
            for path, content in contents.items()
        ]
        for temporary, target in written:
            os.replace(temporary, target)


def _write_bytes(content: bytes, path: Path) -> None:
    path.write_bytes(content)


@contextmanager
def _written(path: AnyPath, write: Callable[[Path], object], durable: bool) -> Iterator[tuple[Path, Path]]:
    """A temporary file with the new content, and the target to move it to; removed at the end unless it was moved."""
    target = _target_of(path)
    _check_not_moved(target)
    with naming(path, "write"):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.parent not in _tidied:
            remove_stale(target.parent)
        with _temporary(lambda: _new_file(target)) as temporary:
            write(temporary)
            if durable:
                with open(temporary, "rb") as written:
                    os.fsync(written.fileno())
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)  # mkstemp makes files that only their owner can read
            yield temporary, target


def exists(path: AnyPath) -> bool:
    """Whether anything is at the path, with links followed.

    Raises InputError if we lack the permission to look, because the file may be there, or if no file can have this
    name.
    """
    return _seen_kind(path) is not None


def is_file(path: AnyPath) -> bool:
    """Whether a file is at the path, with links followed; raises InputError as `exists` does."""
    return _seen_kind(path) == ""


def is_folder(path: AnyPath) -> bool:
    """Whether a folder is at the path, with links followed; raises InputError as `exists` does."""
    return _seen_kind(path) == _KINDS[stat.S_IFDIR]


def _seen_kind(path: AnyPath) -> str | None:
    with naming(path, "read"):
        return _kind_of(path)


def entries(folder: AnyPath) -> list[Path]:
    """The paths in a folder, sorted; InputError if it cannot be read or does not exist."""
    with naming(folder, "read"):
        return sorted(Path(folder).iterdir())


def matching(folder: AnyPath, pattern: str) -> list[Path]:
    """The paths in a folder that match a pattern such as "*.npz" or "*/audit.json", sorted; none if there is no folder.

    A folder that we may not read is an InputError. `Path.glob` would take it for empty.
    """
    found = [Path(folder)]
    for part in pattern.split("/"):
        inside = [entry for place in found if is_folder(place) for entry in entries(place)]
        found = [entry for entry in inside if fnmatch.fnmatchcase(entry.name, part)]
    return sorted(found)


def below(folder: AnyPath) -> list[Path]:
    """All paths below a folder, sorted; links to folders are not followed. InputError if a folder cannot be read."""
    found: list[Path] = []
    places = [Path(folder)]
    while places:
        inside = entries(places.pop())
        found += inside
        places += [entry for entry in inside if is_folder(entry) and not entry.is_symlink()]
    return sorted(found)


def check_writable(path: AnyPath) -> None:
    """Raises InputError unless a file can be written there. Called before long work, so that its result is not lost."""
    with naming(path, "write"):
        folder = _target_of(path).parent
        while not folder.exists():
            folder = folder.parent
    if not is_folder(folder) or not os.access(folder, os.W_OK):
        raise InputError(f"cannot write {path}: {folder} is not a folder that can be written to.")


def _new_file(target: Path) -> str:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=_TEMPORARY, suffix=target.suffix)
    os.close(handle)
    return name


@contextmanager
def _temporary(make: Callable[[], str]) -> Iterator[Path]:
    """A new temporary file or folder, removed at the end. It is locked, so that no process removes it as stale."""
    handle = None
    while fcntl is not None:
        name = make()
        try:
            handle = os.open(name, os.O_RDONLY)
        except FileNotFoundError:  # another process removed it as stale before it was locked
            continue
        if _take(handle) is not False and os.path.lexists(name):
            break
        os.close(handle)
    else:
        name = make()
    temporary = Path(name)
    try:
        yield temporary
    finally:
        if handle is not None:
            os.close(handle)
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


@contextmanager
def temporary_folder(beside: AnyPath) -> Iterator[Path]:
    """A temporary folder beside a path, removed at the end; after a kill, the next writer there removes it."""
    parent = Path(os.path.realpath(beside)).parent

    def make() -> str:
        with naming(beside, "write"):
            parent.mkdir(parents=True, exist_ok=True)
            remove_stale(parent)
            return tempfile.mkdtemp(dir=parent, prefix=_TEMPORARY)

    with _temporary(make) as folder:
        yield folder


def remove_stale(folder: AnyPath) -> None:
    """Removes the temporary files of killed writers from a folder: those that no process has locked."""
    _tidied.add(Path(os.path.realpath(folder)))
    if fcntl is None or not is_folder(folder):
        return
    for path in Path(folder).glob(f"{_TEMPORARY}*"):
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        if _take(handle):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        os.close(handle)


def _take(handle: int) -> bool | None:
    """Locks an open file until it is closed or the process ends; False if it is locked, None if locks do not work."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


@dataclass(frozen=True)
class _Lock:
    """The lock on a folder that this process works in: the open lock file, and the thread that locked it."""

    handle: int
    thread: int

    def is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self.handle), os.stat(path))
        except OSError:
            return False


_locks: dict[Path, _Lock] = {}
_tidied: set[Path] = set()  # folders whose stale temporaries this process has removed


@contextmanager
def locked(folder: AnyPath, work: str) -> Iterator[None]:
    """Locks a folder, which is made if need be, until the block ends. InputError that names the holder if it is locked.

    The system releases the lock when the process ends, however it ends. Inside the block the same thread can lock the
    folder again. Where the file system has no locks, nobody is kept out.

    Args:
        work: what is done there, in one word such as "training", for the error message that others get.
    """
    with naming(folder, "write"):
        root = Path(os.path.realpath(folder))
    if root in _locks and _locks[root].thread == threading.get_ident():
        yield
        return
    with naming(folder, "write"):
        is_new = not root.exists()
        root.mkdir(parents=True, exist_ok=True)
        lock = _Lock(_open_lock(root, work), threading.get_ident())
    _locks[root] = lock
    try:
        _tidied.difference_update([path for path in _tidied if path.is_relative_to(root)])
        remove_stale(root)
        yield
    finally:
        del _locks[root]
        if lock.is_at(root / _LOCK):
            (root / _LOCK).unlink(missing_ok=True)
            if is_new and not any(root.iterdir()):
                root.rmdir()
        os.close(lock.handle)


def tidy(folder: AnyPath) -> None:
    """Removes temporary files and lock files of killed processes from a folder, unless a process works there now."""
    if is_folder(folder) and any(Path(folder).glob(".ecnn-*")):
        with suppress(InputError, OSError), locked(folder, "tidying"):
            pass


def _open_lock(root: Path, work: str) -> int:
    while True:
        handle = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        if _take(handle) is False:
            with open(handle, "rb") as held:
                holder = held.read(1000).decode(errors="replace").strip()
            raise InputError(
                f"{root} is in use ({holder or 'by another process'}): wait until that has ended, or choose another "
                "folder."
            )
        if _Lock(handle, 0).is_at(root / _LOCK):
            break
        os.close(handle)  # the process before us has removed the lock file
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"{work} by process {os.getpid()} on {platform.node()} since {since}\n".encode())
    except OSError:
        os.close(handle)
        raise
    return handle


def _check_not_moved(target: Path) -> None:
    """Raises DiskError if the target is in a folder that we have locked and that has been moved or deleted since."""
    for root, lock in list(_locks.items()):
        if target.is_relative_to(root) and not lock.is_at(root / _LOCK):
            raise DiskError(
                f"cannot write {target}: {root} was moved, deleted or replaced during the work; what was written is "
                "where the folder is now: start the same again with that folder to go on."
            )


def copy(source: AnyPath, target: AnyPath) -> Path:
    """Copies a file, all or nothing."""
    return write_atomically(target, lambda temporary: shutil.copyfile(source, temporary))


def remove(path: AnyPath) -> None:
    """Removes a file, if there is one."""
    with naming(path, "remove"):
        Path(path).unlink(missing_ok=True)


def write_text(path: AnyPath, text: str) -> Path:
    """Writes text as UTF-8, all or nothing."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"cannot write {path}: {text[error.start : error.end]!r} in its text is not UTF-8; rename what it names."
        ) from error
    return write_atomically(path, functools.partial(_write_bytes, content))


def keep(source: AnyPath, target: AnyPath) -> Path:
    """Keeps a file that will be replaced under a second name: a hard link, or a copy where the disk has no links."""
    _check_not_moved(_target_of(target))
    temporary = Path(target).with_name(f"{_TEMPORARY}{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        os.link(source, temporary)
        os.replace(temporary, target)
        temporary.unlink(missing_ok=True)  # os.replace does nothing if both are the same file already
    except OSError:
        return copy(source, target)
    return Path(target)


@contextmanager
def opened(path: AnyPath, most: int) -> Iterator[IO[bytes]]:
    """Opens a file for reading; InputError if it is larger than `most` bytes. All our files are read through this.

    Only plain files are opened, because a pipe would wait for ever and a device never ends.
    """
    with naming(path, "read"):
        kind = _kind_of(path)
        if kind:
            raise InputError(f"cannot read {path}: it is {kind}, not a file.")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                raise InputError(f"{path} is larger than {most >> 20} MiB, too large for a file of its kind.")
            yield file


def read_bytes(path: AnyPath, *, most: int = MAX_ARRAY_BYTES) -> bytes:
    """The content of a file of at most `most` bytes; InputError if it cannot be read."""
    with opened(path, most) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1)
    if len(content) != size:  # the size of a system file, such as those in /proc, is unknown
        raise InputError(f"{path} changed while it was read, or is no plain file.")
    return content


def file_sum(path: AnyPath) -> str:
    """SHA-256 of a file."""
    with opened(path, MAX_ARRAY_BYTES) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
