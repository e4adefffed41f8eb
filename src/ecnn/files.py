"""Reading and writing files so that a reader never sees half of one; the only room that writes to the disk."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import struct
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecnn.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

MAX_JSON_BYTES = 64 * 2**20
MAX_ARRAY_BYTES = 4 * 2**30
_MAX_ARRAYS = 1000
_HEADER = "header"
_NPY_START = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|][biuf]\d{1,2})', 'fortran_order': (True|False), "
    rb"'shape': \(([\d, ]{0,200})\), \} *\n",
    re.DOTALL,
)


@contextmanager
def _naming(path: str | os.PathLike[str], verb: str) -> Iterator[None]:
    """An error of the operating system inside becomes an InputError that names the file and the reason."""
    try:
        yield
    except OSError as error:
        # safetensors raises FileNotFoundError without the system's words for it.
        reason = "No such file or directory" if isinstance(error, FileNotFoundError) else error.strerror
        raise InputError(f"cannot {verb} {path}: {reason or error}.") from error


def write_atomically(
    path: str | os.PathLike[str], write: Callable[[Path], object], *, durable: bool = False
) -> Path:
    """Calls `write` with a temporary path beside the target, then moves it there in one step.

    A kill, a full disk or an exception inside `write` leaves the target as it was; only a kill can leave a temporary
    file behind. `durable` also waits for the disk, against a loss of power.
    """
    target = Path(path)
    with _naming(target, "write"):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=target.suffix)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            if durable:
                with open(temporary, "rb") as written:
                    os.fsync(written.fileno())
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)  # mkstemp makes files that only their owner can read
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    return target


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises InputError unless a file can be written there, so that long work does not end with nowhere to put it."""
    target = Path(path)
    if target.is_dir():
        raise InputError(f"cannot write {target}: it is a folder.")
    folder = target.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"cannot write {target}: {folder} is not a folder that can be written to.")


def copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Copies a file, all or nothing."""
    return write_atomically(target, lambda temporary: shutil.copyfile(source, temporary))


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Writes text as UTF-8, all or nothing."""
    return write_atomically(path, lambda temporary: temporary.write_bytes(text.encode()))


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """Writes strict JSON (no NaN), all or nothing; lists of numbers stay on one line so that people can read them."""
    text = json.dumps(value, indent=1, allow_nan=False)
    text = re.sub(
        r"\[\s+([-\d][^\[\]{}\"]*?)\s+\]", lambda found: "[" + re.sub(r"\s+", "", found[1]) + "]", text
    )
    return write_text(path, text + "\n")


def write_toml(path: str | os.PathLike[str], tables: Mapping[str, Any]) -> Path:
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
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        entries = ", ".join(f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items())
        return f"{{ {entries} }}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    # Strings, numbers and booleans are written alike in JSON and TOML.
    return json.dumps(value, allow_nan=False)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file; one that cannot be read is an InputError."""
    with _naming(path, "read"):
        return Path(path).read_bytes()


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a TOML file; every way it can be unreadable is an InputError of one sentence."""
    try:
        return tomllib.loads(read_bytes(path).decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}.") from error


def write_tensors(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, str]) -> Path:
    """Writes named tensors as safetensors with a header of strings, all or nothing."""
    from safetensors.torch import save_file

    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    return write_atomically(path, lambda temporary: save_file(plain, temporary, header), durable=True)


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a safetensors file; nothing in it can run code."""
    from safetensors import SafetensorError, safe_open

    try:
        with _naming(path, "read"), safe_open(Path(path), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(
            f"{path} is not a whole safetensors file: it is truncated, altered or of another kind."
        ) from error


def write_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], header: Mapping[str, str]
) -> Path:
    """Writes named arrays of numbers as a compressed .npz with a header of strings, all or nothing.

    NumPy reads the file without pickles; the header is an array of bytes beside the others, JSON in UTF-8.
    """
    import numpy as np

    if _HEADER in arrays or any(array.dtype.kind not in "biuf" for array in arrays.values()):
        raise InputError(f"arrays must hold plain numbers, and none may be called {_HEADER!r}.")
    text = np.frombuffer(json.dumps(dict(header)).encode(), dtype=np.uint8)
    everything: dict[str, Any] = {_HEADER: text, **arrays}

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            np.savez_compressed(file, **everything)

    return write_atomically(path, write, durable=True)


def read_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
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
    path: str | os.PathLike[str], *, keys: Sequence[str] | None = None, content: bytes | None = None
) -> dict[str, np.ndarray]:
    """Arrays of numbers by name from any .npz file, read-only; nothing in the file can run code.

    Sizes are checked before memory is asked for, so that a hostile file is an InputError like a truncated one.

    Args:
        keys: which arrays; all of them if not given.
        content: the bytes of the file, where they have been read before.
    """
    source = Path(path)
    try:
        opened = source if content is None else io.BytesIO(content)
        with _naming(source, "read"), zipfile.ZipFile(opened) as archive:
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


def _not_whole(path: str | os.PathLike[str]) -> str:
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


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file; every way it can be unreadable is an InputError of one sentence."""
    with _naming(path, "read"):
        size = Path(path).stat().st_size
    if size > MAX_JSON_BYTES:
        raise InputError(
            f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB, too large for a JSON file of ours."
        )
    try:
        return json.loads(read_bytes(path).decode())
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file (byte {error.start} is not UTF-8).") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error.msg} at line {error.lineno}.") from error
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply to be a JSON file of ours.") from error
