"""Writing all or nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ecnn import files
from ecnn.errors import InputError


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

    with pytest.raises(InputError, match="No space left on device"):
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

    with pytest.raises(InputError, match=r"cannot write .*x\.json: No space left on device"):
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
