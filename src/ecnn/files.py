"""Reading and writing files so that a reader never sees half of one; the only room that writes to the disk."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import platform
import re
import shutil
import stat
import struct
import tempfile
import threading
import time
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ecnn.errors import DiskError, InputError

fcntl: Any
try:
    import fcntl
except ImportError:  # on Windows: there folders are not locked, and what killed writers left stays
    fcntl = None

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

AnyPath = str | os.PathLike[str]

MAX_JSON_BYTES = 64 * 2**20
MAX_IMAGE_BYTES = 256 * 2**20
MAX_ARRAY_BYTES = 4 * 2**30
MAX_TENSOR_BYTES = 64 * 2**30
_MAX_ARRAYS = 1000
_HEADER, _SUM = "header", "sha256"
_NO_SUM = 64 * "0"
_LOCK, _TEMPORARY = ".ecnn-lock", ".ecnn-tmp-"
# What the caller can mend by another path; every other error of the system is a fault of the machine.
_MISTAKES = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
_MISTAKEN = (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
_NPY_START = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|][biuf]\d{1,2})', 'fortran_order': (True|False), "
    rb"'shape': \(([\d, ]{0,200})\), \} *\n",
    re.DOTALL,
)


@contextmanager
def naming(path: AnyPath, verb: str) -> Iterator[None]:
    """An error of the operating system inside names the file and the reason: InputError, or DiskError for a fault."""
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
        # safetensors raises FileNotFoundError without the system's words for it.
        reason = "No such file or directory" if isinstance(error, FileNotFoundError) else error.strerror
        if isinstance(error, _MISTAKES) or error.errno in _MISTAKEN:
            raise InputError(f"cannot {verb} {path}: {reason or error}.") from error
        raise DiskError(
            f"cannot {verb} {path}: {reason or error}; what was written before is kept: make room, or mend the disk, "
            "and start the same again."
        ) from error


def _kind_of(path: AnyPath) -> str | None:
    """What lies at a path, links followed: "" for a file, None for nothing, else a word for it."""
    try:
        mode = os.stat(os.fspath(path)).st_mode  # a number would be an open file
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:  # a zero byte
        raise InputError(f"{path!r} cannot be the name of a file.") from error
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no file")


def _target_of(path: AnyPath) -> Path:
    """Where to write what is to be found at a path: links are followed; InputError unless a file can be there."""
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

    A kill, a full disk or an exception inside `write` leaves the target as it was; only a kill can leave a temporary
    file behind, which the next writer in that folder removes. A link stays, and what it leads to is replaced.
    `durable` also waits for the disk, against a loss of power.
    """
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
            os.replace(temporary, target)
    return Path(path)


def is_folder(path: AnyPath) -> bool:
    """Whether a folder is there; a name that no file can have, such as one that is too long, is none."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def exists(path: AnyPath) -> bool:
    """Whether anything is there, likewise."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def entries(folder: AnyPath) -> list[Path]:
    """What a folder holds, in order; one that cannot be read, or goes meanwhile, is an InputError."""
    with naming(folder, "read"):
        return sorted(Path(folder).iterdir())


def check_writable(path: AnyPath) -> None:
    """Raises InputError unless a file can be written there, so that long work does not end with nowhere to put it."""
    with naming(path, "write"):
        folder = _target_of(path).parent
        while not folder.exists():
            folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"cannot write {path}: {folder} is not a folder that can be written to.")


def _new_file(target: Path) -> str:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=_TEMPORARY, suffix=target.suffix)
    os.close(handle)
    return name


@contextmanager
def _temporary(make: Callable[[], str]) -> Iterator[Path]:
    """A new file or folder, gone at the end, that no other process takes for what a killed one left."""
    handle = None
    while fcntl is not None:
        name = make()
        try:
            handle = os.open(name, os.O_RDONLY)
        except FileNotFoundError:  # taken for what a killed writer left, before it could be held
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
    """A folder for the moment; what a kill leaves of it goes with the next start of anything that writes there."""
    parent = Path(os.path.realpath(beside)).parent

    def make() -> str:
        with naming(beside, "write"):
            parent.mkdir(parents=True, exist_ok=True)
            remove_stale(parent)
            return tempfile.mkdtemp(dir=parent, prefix=_TEMPORARY)

    with _temporary(make) as folder:
        yield folder


def remove_stale(folder: AnyPath) -> None:
    """Removes the temporaries of killed writers from a folder: those that no living process holds."""
    _tidied.add(Path(os.path.realpath(folder)))
    if fcntl is None or not Path(folder).is_dir():
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
    """Locks an open file until it is closed or the process ends; False if another holds it, None if none can here."""
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
    """A folder that this process works in: the open lock file, and which thread took it."""

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
    """Keeps others from working in a folder until the block ends; InputError that says who does if one is.

    The system lets go of the lock when the process ends, however it does. Within the block, and the thread, the same
    folder can be locked again. Where the file system knows no locks nobody is kept out.

    Args:
        work: what is done there, in a word: "training".
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
    """Removes what killed processes left in a folder, the file of their lock too, unless one works there now."""
    if Path(folder).is_dir() and any(Path(folder).glob(".ecnn-*")):
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
        os.close(handle)  # who held it has removed it
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"{work} by process {os.getpid()} on {platform.node()} since {since}\n".encode())
    except OSError:
        os.close(handle)
        raise
    return handle


def _check_not_moved(target: Path) -> None:
    """Raises DiskError if the target lies in a folder that we work in and that has gone from there."""
    for root, lock in list(_locks.items()):
        if target.is_relative_to(root) and not lock.is_at(root / _LOCK):
            raise DiskError(
                f"cannot write {target}: {root} was moved, deleted or replaced during the work; what was written is "
                "where the folder is now: start the same again with that folder to go on."
            )


def copy(source: AnyPath, target: AnyPath) -> Path:
    """Copies a file, all or nothing."""
    return write_atomically(target, lambda temporary: shutil.copyfile(source, temporary))


def keep(source: AnyPath, target: AnyPath) -> Path:
    """Gives a file that will be replaced a second name, all or nothing; copies it where the disk has no hard links."""
    _check_not_moved(_target_of(target))
    temporary = Path(target).with_name(f"{_TEMPORARY}{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        os.link(source, temporary)
        os.replace(temporary, target)
        temporary.unlink(missing_ok=True)  # it stays if both are the same file already
    except OSError:
        return copy(source, target)
    return Path(target)


def write_text(path: AnyPath, text: str) -> Path:
    """Writes text as UTF-8, all or nothing."""
    return write_atomically(path, lambda temporary: temporary.write_bytes(text.encode()))


def write_json(path: AnyPath, value: Any) -> Path:
    """Writes strict JSON (no NaN), all or nothing; lists of numbers stay on one line so that people can read them.

    A table gets an entry "sha256", the checksum of all others, which `read_json` checks and takes away.
    """
    if isinstance(value, dict):
        value = {**value, _SUM: _sum_of_table(json.loads(json.dumps(value, allow_nan=False)))}
    text = json.dumps(value, indent=1, allow_nan=False)
    text = re.sub(
        r"\[\s+([-\d][^\[\]{}\"]*?)\s+\]", lambda found: "[" + re.sub(r"\s+", "", found[1]) + "]", text
    )
    return write_text(path, text + "\n")


def _sum_of_table(table: Mapping[str, Any]) -> str:
    """SHA-256 of the table's entries, however the file lays them out."""
    others = {key: value for key, value in table.items() if key != _SUM}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def write_toml(path: AnyPath, tables: Mapping[str, Any]) -> Path:
    """Writes nested tables of numbers, strings and lists as TOML, all or nothing; None is left out."""
    return write_text(path, "\n".join(_toml_lines(tables)).strip() + "\n")


def _toml_lines(table: Mapping[str, Any], name: str = "") -> list[str]:
    """The table's own entries under its head, then the tables within it."""
    own = [(key, value) for key, value in table.items() if value is not None and not isinstance(value, dict)]
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines = ["", f"[{name}]"] if name and (own or not inner) else []
    lines += [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in own]
    for key, value in inner.items():
        lines += _toml_lines(value, f"{name}.{_toml_key(key)}" if name else _toml_key(key))
    return lines


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_text(key)


def _toml_text(text: str) -> str:
    """A string as TOML writes it: like JSON, but letters beyond 16 bits stand for themselves."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InputError(f"{text!r} is not UTF-8, so that TOML cannot hold it: rename what it names.")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        entries = ", ".join(f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items())
        return f"{{ {entries} }}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        return _toml_text(value)
    # Numbers and booleans are written alike in JSON and TOML.
    return json.dumps(value, allow_nan=False)


@contextmanager
def _opened(path: AnyPath, most: int) -> Iterator[IO[bytes]]:
    """A file open for reading, the one door that all of ours are read through.

    Pipes would wait for ever and devices never end: only files are opened, up to a size.
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
    """The content of a file of at most so many bytes; one that cannot be read is an InputError."""
    with _opened(path, most) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1)
    if len(content) != size:  # of the system's own files nobody knows how long they are
        raise InputError(f"{path} changed while it was read, or is no plain file.")
    return content


def file_sum(path: AnyPath) -> str:
    """SHA-256 of a file."""
    with _opened(path, MAX_ARRAY_BYTES) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def read_toml(path: AnyPath) -> dict[str, Any]:
    """The content of a TOML file; every way it can be unreadable is an InputError of one sentence."""
    content = read_bytes(path, most=MAX_JSON_BYTES)
    try:
        return tomllib.loads(content.decode())
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply to be a TOML file of ours.") from error
    except ValueError as error:  # no UTF-8, no TOML, or a number of thousands of digits
        raise InputError(f"{path} is not TOML: {str(error).splitlines()[0]}.") from error


def write_tensors(path: AnyPath, tensors: dict[str, Tensor], header: dict[str, str]) -> Path:
    """Writes named tensors as safetensors with a header of strings, all or nothing.

    The header is one entry of the file's metadata, JSON in the order of its keys: same tensors and header, same bytes.
    It holds the SHA-256 of the whole file, computed with zeros in its place.
    """
    from safetensors.torch import save

    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    content = save(plain, {_HEADER: json.dumps({**header, _SUM: _NO_SUM}, sort_keys=True)})
    head = content[: _head_size(content)]
    found = hashlib.sha256(content).hexdigest()

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.write(head.replace(_sum_in_file(_NO_SUM), _sum_in_file(found)))
            file.write(memoryview(content)[len(head) :])

    return write_atomically(path, write, durable=True)


def _head_size(start: bytes) -> int:
    """Where the tensors begin in a safetensors file that begins like this."""
    return 8 + int.from_bytes(start[:8], "little")


def _sum_in_file(value: str) -> bytes:
    """The checksum as the bytes of a safetensors file show it, JSON within JSON."""
    return f'\\"{_SUM}\\": \\"{value}\\"'.encode()


def read_tensors(path: AnyPath) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a safetensors file; nothing in it can run code. One that has a checksum must agree with it.

    Other programs' files, and ours of before, have none and as header the strings of their metadata.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with _opened(path, MAX_TENSOR_BYTES) as raw, safe_open(Path(path), framework="pt") as file:
            metadata = dict(file.metadata() or {})
            header = json.loads(metadata[_HEADER]) if _HEADER in metadata else metadata
            if _HEADER in metadata:
                _check_sum(raw, header.pop(_SUM))
            return {key: file.get_tensor(key) for key in file.keys()}, header  # noqa: SIM118
    except InputError:
        raise
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(
            f"{path} is not a whole safetensors file: it is truncated, altered or of another kind."
        ) from error


def _check_sum(file: IO[bytes], expected: str) -> None:
    """Raises ValueError unless an open safetensors file has this checksum."""
    start = file.read(8)
    head = start + file.read(_head_size(start) - 8)
    found = hashlib.sha256(head.replace(_sum_in_file(expected), _sum_in_file(_NO_SUM)))
    while piece := file.read(2**20):
        found.update(piece)
    if found.hexdigest() != expected:
        raise ValueError("the checksum is another")


def write_arrays(path: AnyPath, arrays: Mapping[str, np.ndarray], header: Mapping[str, str]) -> Path:
    """Writes named arrays of numbers as a compressed .npz with a header of strings, all or nothing.

    NumPy reads the file without pickles; the header is an array of bytes beside the others, JSON in UTF-8.
    """
    import numpy as np

    if _HEADER in arrays or any(array.dtype.kind not in "biuf" for array in arrays.values()):
        raise InputError(f"arrays must hold plain numbers, and none may be called {_HEADER!r}.")
    text = np.frombuffer(json.dumps(dict(header)).encode(), dtype=np.uint8)
    everything: dict[str, Any] = {_HEADER: text, **arrays}

    content = io.BytesIO()
    np.savez_compressed(content, **everything)
    return write_atomically(path, lambda temporary: temporary.write_bytes(content.getbuffer()), durable=True)


def read_arrays(path: AnyPath) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays and header of what `write_arrays` wrote."""
    arrays = read_npz(path)
    try:
        header = json.loads(arrays.pop(_HEADER).tobytes().decode())
        if not isinstance(header, dict) or not all(isinstance(value, str) for value in header.values()):
            raise ValueError("the header is no table of strings")
    except (KeyError, ValueError, RecursionError) as error:
        raise InputError(_not_whole(path)) from error
    return arrays, header


def read_npz(
    path: AnyPath, *, keys: Sequence[str] | None = None, content: bytes | None = None
) -> dict[str, np.ndarray]:
    """Arrays of numbers by name from any .npz file, read-only; nothing in the file can run code.

    Sizes are checked before memory is asked for, so that a hostile file is an InputError like a truncated one.

    Args:
        keys: which arrays; all of them if not given.
        content: the bytes of the file, where they have been read before.
    """
    source = Path(path)
    try:
        opened = _opened(source, MAX_ARRAY_BYTES) if content is None else io.BytesIO(content)
        with opened as file, zipfile.ZipFile(file) as archive:
            every = archive.infolist()
            size = sum(entry.file_size for entry in every)
            if len(every) > _MAX_ARRAYS or size > MAX_ARRAY_BYTES:
                raise InputError(
                    f"{source} holds {len(every)} arrays of {size >> 20} MiB together, too large for a file of ours."
                )
            entries = {entry.filename.removesuffix(".npy"): entry for entry in every}
            if len(entries) != len(every):
                raise ValueError("two arrays of one name")
            for key in keys or ():
                if key not in entries:
                    has = ", ".join(sorted(entries)) or "none"
                    raise InputError(
                        f'{source} has no array "{key}"; it needs {", ".join(keys or ())} and has {has}.'
                    )
            return {name: _read_array(archive, entries[name]) for name in keys or entries}
    except InputError:
        raise
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        KeyError,
        ValueError,
        TypeError,
        OverflowError,
        RuntimeError,
        MemoryError,
    ) as error:
        raise InputError(_not_whole(source)) from error


def _not_whole(path: AnyPath) -> str:
    return f"{path} is not a whole array file (.npz): it is truncated, altered or of another kind."


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """One array, read-only; ValueError unless the bytes are exactly what their own header announces."""
    import numpy as np

    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{entry.filename} is compressed in an unknown way")
    raw = archive.read(entry)
    # NumPy's own parser evaluates this text; a pattern is stricter, and asks for no memory before it is checked.
    found = _NPY_START.match(raw)
    if not found or not entry.filename.endswith(".npy"):
        raise ValueError(f"{entry.filename} is no array of plain numbers")
    kind, is_fortran, sizes = (part.decode() for part in found.groups())
    dtype, shape = np.dtype(kind), tuple(int(size) for size in sizes.split(",") if size.strip())
    start = 10 + int.from_bytes(raw[8:10], "little")
    if found.end() != start or math.prod(shape) * dtype.itemsize != len(raw) - start:
        raise ValueError(f"{entry.filename} has not the size it announces")
    values = np.frombuffer(raw, dtype=dtype, offset=start).reshape(
        shape, order="F" if is_fortran == "True" else "C"
    )
    if dtype.kind == "b" and values.view(np.uint8).max(initial=0) > 1:
        raise ValueError(f"{entry.filename} holds neither true nor false")
    return values.astype(dtype.newbyteorder("="), copy=False)


def read_json(path: AnyPath) -> Any:
    """The content of a JSON file; every way it can be unreadable is an InputError of one sentence.

    A table that has a checksum must agree with it; those of before have none.
    """
    content = read_bytes(path, most=MAX_JSON_BYTES)
    try:
        value = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file (byte {error.start} is not UTF-8).") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error.msg} at line {error.lineno}.") from error
    except ValueError as error:
        raise InputError(f"{path} holds a number of too many digits to be a JSON file of ours.") from error
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply to be a JSON file of ours.") from error
    if isinstance(value, dict) and _SUM in value and value.pop(_SUM) != _sum_of_table(value):
        raise InputError(
            f'{path} was damaged or changed after it was written: move it away, or remove its entry "{_SUM}" to '
            "accept it as it is."
        )
    return value
