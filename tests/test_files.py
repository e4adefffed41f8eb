"""Writing all or nothing."""

from __future__ import annotations

import json
import os
import random
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecnn import files
from ecnn.errors import DiskError, InputError


def test_json_round_trip_stays_readable(tmp_path: Path) -> None:
    value = {
        "rows": [[0, 1, 1], [1, 0, 0]],
        "name": "[1, 2] stays",
        "empty": [],
        "half": [0.5, -1e-9],
        "words": ["a b"],
    }
    path = files.write_json(tmp_path / "a" / "b.json", value)
    assert files.read_json(path) == value
    assert "[0,1,1]" in path.read_text()
    assert path.read_text().endswith("}\n")


def test_nan_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "x.json", {"energy": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_failing_writer_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    target = files.write_text(tmp_path / "kept.txt", "old")

    def fail_midway(path: Path) -> None:
        path.write_text("half of the new")
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskError, match="No space left on device"):
        files.write_atomically(target, fail_midway)

    def crash_midway(path: Path) -> None:
        path.write_text("half of the new")
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        files.write_atomically(target, crash_midway)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """The kernel's own "disk full", from the device that is always full."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")

    def write(temporary: Path) -> None:
        with full.open("wb", buffering=0) as device:
            device.write(b"x")

    with pytest.raises(
        DiskError, match=r"cannot write .*x\.json: No space left on device; what .* is kept: make room"
    ):
        files.write_atomically(tmp_path / "x.json", write)
    assert list(tmp_path.iterdir()) == []


def test_files_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        path = files.write_text(tmp_path / "x", "text")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("where", ["folder", "file/below"])
def test_unwritable_places_are_found_before_the_work(tmp_path: Path, where: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        files.check_writable(tmp_path / where)
    files.check_writable(tmp_path / "new" / "deeper" / "x.json")
    assert not (tmp_path / "new").exists()


def test_huge_json_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "big.json"
    path.write_text(json.dumps(list(range(1000))))
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 1000)
    with pytest.raises(InputError, match="larger than"):
        files.read_json(path)


@pytest.mark.parametrize(
    "value", [{"a": [1, 2]}, [[]], [[1], [2.5, None]], "text", {"nested": {"deep": [[-1, 0]]}}]
)
def test_any_json_value_survives(tmp_path: Path, value: Any) -> None:
    assert files.read_json(files.write_json(tmp_path / "v.json", value)) == value


ARRAYS = {
    "whole": np.arange(10, dtype=np.int32),
    "big_endian": np.arange(4, dtype=">i8"),
    "halves": np.linspace(0, 1, 7, dtype=np.float32),
    "truths": np.array([True, False]),
    "one": np.array(3.5),
    "sideways": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "empty": np.zeros((0, 4), dtype=np.float32),
}


def test_arrays_round_trip_and_numpy_reads_them(tmp_path: Path) -> None:
    path = files.write_arrays(tmp_path / "a" / "x.npz", ARRAYS, {"what": "é, a test"})
    arrays, header = files.read_arrays(path)
    assert header == {"what": "é, a test"}
    assert list(arrays) == list(ARRAYS)
    for name, values in ARRAYS.items():
        assert arrays[name].dtype == values.dtype.newbyteorder("=")
        np.testing.assert_array_equal(arrays[name], values)
    with np.load(path, allow_pickle=False) as plain:
        assert set(plain) == {*ARRAYS, "header"}
        np.testing.assert_array_equal(plain["sideways"], ARRAYS["sideways"])
        assert json.loads(plain["header"].tobytes()) == header
    again = files.write_arrays(tmp_path / "y.npz", ARRAYS, {"what": "é, a test"})
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "arrays",
    [{"x": np.array([{}])}, {"x": np.array(["a"])}, {"header": np.zeros(1)}, {"x": np.zeros(1, complex)}],
)
def test_only_plain_numbers_are_written(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    with pytest.raises(InputError, match="plain numbers"):
        files.write_arrays(tmp_path / "x.npz", arrays, {})
    assert list(tmp_path.iterdir()) == []


def npz(**entries: bytes) -> bytes:
    made = BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in entries.items():
            archive.writestr(f"{name}.npy", content)
    return made.getvalue()


def npy(values: Any, **changes: bytes) -> bytes:
    made = BytesIO()
    np.save(made, np.asarray(values), allow_pickle=True)
    content = made.getvalue()
    for old, new in changes.items():
        content = content.replace(old.encode(), new)
    return content


HEADER = npy(np.frombuffer(b"{}", dtype=np.uint8))


def test_the_hostile_files_differ_from_good_ones_only_in_what_is_hostile(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(npz(header=HEADER, x=npy([1, 2])))
    arrays, header = files.read_arrays(path)
    assert (arrays["x"].tolist(), header) == ([1, 2], {})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a zip file",
        npz(x=npy([1, 2])),
        npz(header=npy(np.frombuffer(b"[]", dtype=np.uint8)), x=npy([1])),
        npz(header=npy(np.frombuffer(b'{"a": 1}', dtype=np.uint8)), x=npy([1])),
        npz(header=npy(np.frombuffer(b"{" * 100_000, dtype=np.uint8))),
        npz(header=HEADER, x=npy(np.array([print], dtype=object))),  # a pickle, which could run code
        npz(header=HEADER, x=npy(["text"])),
        npz(header=HEADER, x=npy([1, 2], **{"(2,)": b"(9,)"})),
        npz(header=HEADER, x=npy([1, 2], **{"(2,)": b"(99999999999999999,)", " " * 16 + "\n": b"\n"})),
        npz(header=HEADER, x=npy([1, 2], **{"<i8": b"<i9"})),
        npz(header=HEADER, x=npy([1, 2])[:-1]),
        npz(header=HEADER, x=npy([1, 2]) + b"more"),
        npz(header=HEADER, x=npy(np.array([True]))[:-1] + b"\x07"),
        npz(header=HEADER, x=b""),
        npz(**{"header": HEADER, "header.npy/../x": npy([1])}).replace(b"PK\x01\x02", b"PK\x01\x03"),
    ],
)
def test_hostile_array_files_are_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.npz is not a whole array file"):
        files.read_arrays(path)


def test_array_files_that_unpack_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.write_arrays(tmp_path / "x.npz", {"zeros": np.zeros(100_000)}, {})
    assert path.stat().st_size < 5000
    monkeypatch.setattr(files, "MAX_ARRAY_BYTES", 100_000)
    with pytest.raises(InputError, match="too large"):
        files.read_arrays(path)
    with pytest.raises(InputError, match="No such file"):
        files.read_arrays(tmp_path / "none.npz")


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_array_file_is_refused_or_unharmed(tmp_path: Path, damage: str) -> None:
    """Four hundred random damages: the answer is an InputError or exactly what was written, never something else."""
    path = files.write_arrays(tmp_path / "x.npz", ARRAYS, {"what": "a test"})
    content, rng = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(200):
        if damage == "cut":
            path.write_bytes(content[: rng.randrange(len(content))])
        else:
            place = rng.randrange(len(content))
            path.write_bytes(
                content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]
            )
        try:
            arrays, _ = files.read_arrays(path)
        except InputError:
            refused += 1
        else:
            assert all(np.array_equal(arrays[name], ARRAYS[name]) for name in arrays)
    assert refused > 100
