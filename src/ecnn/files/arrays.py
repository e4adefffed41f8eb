"""Named tensors as safetensors files and named arrays as .npz files; nothing in such a file can run code."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ecnn.errors import InputError
from ecnn.files.disk import MAX_ARRAY_BYTES, MAX_TENSOR_BYTES, AnyPath, opened, write_atomically

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_MAX_ARRAYS, _MAX_HEAD = 1000, 100 * 2**20
_HEADER, _SUM = "header", "sha256"
_NO_SUM = 64 * "0"
_NPY_START = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|][biuf]\d{1,2})', 'fortran_order': (True|False), "
    rb"'shape': \(([\d, ]{0,200})\), \} *\n",
    re.DOTALL,
)


def write_tensors(path: AnyPath, tensors: dict[str, Tensor], header: dict[str, str]) -> Path:
    """Writes named tensors as safetensors with a header of strings, all or nothing; see `tensor_bytes`."""
    head, values = _tensor_parts(tensors, header)

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.write(head)
            file.write(values)

    return write_atomically(path, write, durable=True)


def tensor_bytes(tensors: dict[str, Tensor], header: dict[str, str]) -> bytes:
    """Named tensors as a safetensors file with a header of strings.

    The header is one entry of the file's metadata, JSON with sorted keys, so that equal tensors and headers give equal
    bytes. It also holds the SHA-256 of the whole file, computed with zeros in place of the checksum.
    """
    return b"".join(_tensor_parts(tensors, header))


def _tensor_parts(tensors: dict[str, Tensor], header: dict[str, str]) -> tuple[bytes, memoryview]:
    """`tensor_bytes` in two parts: the head, and the large rest as a view that is not copied."""
    from safetensors.torch import save

    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    content = save(plain, {_HEADER: json.dumps({**header, _SUM: _NO_SUM}, sort_keys=True)})
    head = content[: _head_size(content)]
    found = hashlib.sha256(content).hexdigest()
    return head.replace(_sum_in_file(_NO_SUM), _sum_in_file(found)), memoryview(content)[len(head) :]


def _head_size(start: bytes) -> int:
    """Number of bytes before the tensors of a safetensors file, from its first 8 bytes or more."""
    return 8 + int.from_bytes(start[:8], "little")


def _sum_in_file(value: str) -> bytes:
    """The bytes of the checksum's entry in a safetensors file: JSON within JSON, so its quotes are escaped."""
    return f'\\"{_SUM}\\": \\"{value}\\"'.encode()


def read_tensors(path: AnyPath) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a safetensors file; nothing in it can run code.

    Raises InputError if the file is not whole or does not match its checksum. Files of other programs, and old ones of
    ours, have no checksum; their header is the metadata of the file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        # Opened here: safetensors accepts only paths in UTF-8, and a path opened twice may be two different files.
        with opened(path, MAX_TENSOR_BYTES) as file:
            head, metadata = _read_head(file)
            file.seek(0)
            content = file.read()
        header = json.loads(metadata[_HEADER]) if _HEADER in metadata else metadata
        if _HEADER in metadata:
            _check_sum(head, content, header.pop(_SUM))
        return load(content), header
    except InputError:
        raise
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(
            f"{path} is not a whole safetensors file: it is truncated, altered or of another kind."
        ) from error


def _read_head(file: IO[bytes]) -> tuple[bytes, dict[str, str]]:
    """The bytes before the tensors, and the metadata in them; ValueError unless the file has the size they announce.

    It is checked before the tensors are read, so that a damaged or hostile file cannot make us allocate memory.
    """
    start, size = file.read(8), os.fstat(file.fileno()).st_size
    if _head_size(start) > min(size, _MAX_HEAD):
        raise ValueError("the head is longer than the file, or than any head")
    head = start + file.read(_head_size(start) - 8)
    described = json.loads(head[8:])
    metadata = described.pop("__metadata__", {})
    ends = [int(tensor["data_offsets"][1]) for tensor in described.values()]
    if len(head) + max(ends, default=0) != size:
        raise ValueError("the file has not the size it announces")
    return head, metadata


def _check_sum(head: bytes, content: bytes, expected: str) -> None:
    """Raises ValueError unless the content of a safetensors file has this checksum."""
    found = hashlib.sha256(head.replace(_sum_in_file(expected), _sum_in_file(_NO_SUM)))
    found.update(memoryview(content)[len(head) :])
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
    """Arrays and header of a file that `write_arrays` wrote; InputError if it is not whole."""
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

    Sizes are checked before memory is allocated, so that a hostile file is an InputError like a truncated one.

    Args:
        keys: names of the arrays to read; all of them if not given.
        content: the bytes of the file, if they have been read already.
    """
    source = Path(path)
    try:
        whole = opened(source, MAX_ARRAY_BYTES) if content is None else io.BytesIO(content)
        with whole as file, zipfile.ZipFile(file) as archive:
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
    # NumPy's own parser evaluates this text. A pattern is stricter, and the size is checked before it allocates memory.
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
