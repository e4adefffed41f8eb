"""Writing all or nothing, reading only what is whole, one user of a folder at a time."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import tomllib
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


def test_files_that_belong_together_are_all_old_or_all_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: Any
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    files.write_together({first: b"old 1", second: b"old 2"})
    with full_disk(1000), pytest.raises(DiskError, match=r"cannot write .*second: File too large; what"):
        files.write_together({first: b"new 1", second: bytes(2000)})
    assert [path.read_bytes() for path in (first, second)] == [b"old 1", b"old 2"]
    real, order = os.replace, list[str]()

    def replace(source: Any, target: Any) -> None:
        if order:
            raise KeyboardInterrupt
        order.append(Path(target).name)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):  # what a kill leaves, but for the litter
        files.write_together({first: b"new 1", second: b"new 2"})
    assert [path.read_bytes() for path in (first, second)] == [b"new 1", b"old 2"]
    monkeypatch.undo()
    files.write_together({first: b"new 1", second: b"new 2"})
    assert [path.read_bytes() for path in (first, second)] == [b"new 1", b"new 2"]
    assert sorted(tmp_path.iterdir()) == [first, second]


def test_text_that_is_not_utf8_is_told_from_a_name_that_is_not(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*x: '\\udcff' in its text is not UTF-8; rename"):
        files.write_text(tmp_path / "x", "bad\udcff")
    named = files.write_text(tmp_path / "bad\udcff", "text")
    assert files.read_bytes(named) == b"text"


def test_a_folder_that_may_not_be_looked_into_is_named(tmp_path: Path, as_nobody: Any) -> None:
    closed = files.write_text(tmp_path / "open" / "closed" / "x", "").parent
    closed.chmod(0)
    for look in (files.exists, files.is_file, files.is_folder):
        with as_nobody(tmp_path), pytest.raises(InputError, match=r"cannot read .*d/x: Permission denied\."):
            look(closed / "x")
    for use, given in (
        (files.entries, (closed,)),
        (files.matching, (closed, "*")),
        (files.matching, (closed.parent, "*/x")),
        (files.below, (closed.parent,)),
    ):
        with as_nobody(tmp_path), pytest.raises(InputError, match=r"read .*/closed: Permission denied\."):
            use(*given)
    closed.chmod(0o700)
    assert files.is_file(closed / "x")


def test_what_is_there_and_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = files.write_text(tmp_path / "x", "")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    looks = (files.exists, files.is_file, files.is_folder)
    for path, expected in (
        (kept, (True, True, False)),
        (tmp_path, (True, False, True)),
        (os.devnull, (True, False, False)),
        (tmp_path / "nothing", (False, False, False)),
        (kept / "below", (False, False, False)),
        (tmp_path / "nowhere", (False, False, False)),
    ):
        assert tuple(look(path) for look in looks) == expected
    for look in looks:
        for path, why in (
            (tmp_path / ("x" * 300), "File name too long"),
            (tmp_path / "loop", "Too many levels of symbolic links"),
            ("a\0b", "cannot be the name of a file"),
        ):
            with pytest.raises(InputError, match=why):
                look(path)

    def fails(path: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "stat", fails)
    with pytest.raises(DiskError, match="cannot read x: Input/output error"):
        files.exists("x")


def test_what_lies_below_a_folder_comes_in_order(tmp_path: Path) -> None:
    for name in ("b/2.npz", "b/.3.npz", "a/1.npz", "a/c/1.npz", "a/1.json", "1.npz"):
        files.write_text(tmp_path / name, "")
    (tmp_path / "a" / "link").symlink_to(tmp_path)

    def named(found: list[Path]) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in found]

    assert named(files.matching(tmp_path, "*.npz")) == ["1.npz"]
    assert named(files.matching(tmp_path, "*/[!.]*.npz")) == ["a/1.npz", "b/2.npz"]
    assert named(files.matching(tmp_path, "a/*/1.npz")) == ["a/c/1.npz", "a/link/1.npz"]
    assert files.matching(tmp_path / "nothing", "*") == files.matching(tmp_path / "1.npz", "*") == []
    assert named(files.below(tmp_path / "a")) == ["a/1.json", "a/1.npz", "a/c", "a/c/1.npz", "a/link"]
    assert files.below(tmp_path) == sorted(tmp_path.rglob("*"))


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


def test_what_cannot_be_removed_is_named(tmp_path: Path) -> None:
    files.remove(tmp_path / "nothing")
    files.remove(files.write_text(tmp_path / "x", ""))
    assert not (tmp_path / "x").exists()
    with pytest.raises(InputError, match=rf"cannot remove {tmp_path}: "):
        files.remove(tmp_path)  # a folder


def test_huge_json_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "big.json"
    path.write_text(json.dumps(list(range(1000))))
    monkeypatch.setattr("ecnn.files.tables.MAX_JSON_BYTES", 1000)
    with pytest.raises(InputError, match="larger than"):
        files.read_json(path)


def test_what_an_editor_writes_before_the_text_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("seed = 1", encoding="utf-8-sig")
    (tmp_path / "a.json").write_text('{"seed": 1}', encoding="utf-8-sig")
    assert files.read_toml(tmp_path / "a.toml") == files.read_json(tmp_path / "a.json") == {"seed": 1}


def test_an_entry_that_comes_twice_is_refused(tmp_path: Path) -> None:
    """The last of the two would count, and whoever edits the first would never know."""
    path = tmp_path / "code.json"
    path.write_text('{"symbols": 1, "inner": {"seed": 1, "name": 2, "seed": 3}}')
    with pytest.raises(InputError, match=r"code\.json has the entry 'seed' twice: remove one"):
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
    monkeypatch.setattr("ecnn.files.arrays.MAX_ARRAY_BYTES", 100_000)
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


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for link, target in (("old", "there/old.txt"), ("new", "there/new.txt")):
        (tmp_path / link).symlink_to(target)
    (tmp_path / "there" / "old.txt").write_text("before")
    for link in ("old", "new"):
        files.check_writable(tmp_path / link)
        files.write_text(tmp_path / link, "after")
        assert (tmp_path / link).is_symlink()
        assert (tmp_path / "there" / f"{link}.txt").read_text() == "after"


@pytest.mark.parametrize("what", ["pipe", "device", "folder", "loop"])
def test_only_files_are_replaced(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x.json"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/null")
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    before = path.lstat()
    for act in (files.check_writable, lambda path: files.write_json(path, {})):
        with pytest.raises(InputError, match=r"cannot write .*x\.json: "):
            act(path)
    assert path.lstat() == before
    assert list(tmp_path.iterdir()) == [path]


def test_pipes_devices_and_endless_files_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reader would wait for ever, or fill the memory."""
    pipe, endless, big = tmp_path / "pipe", tmp_path / "endless", tmp_path / "big"
    os.mkfifo(pipe)
    endless.symlink_to("/dev/zero")
    big.touch()
    os.truncate(big, 2**37)
    readers = (files.read_bytes, files.read_json, files.read_toml, files.read_npz, files.read_tensors)
    for read in (*readers, files.file_sum):
        for path, sentence in ((pipe, "it is a pipe, not a file"), (endless, "a device"), (big, "too large")):
            with pytest.raises(InputError, match=sentence):
                read(path)
    for name in ("x\0y", "x" * 5000, tmp_path / "none", tmp_path):
        with pytest.raises(InputError):
            files.read_bytes(name)
    own = Path("/proc/self/status")  # of the system, and of a length that nobody knows
    if own.exists():
        with pytest.raises(InputError, match="no plain file"):
            files.read_bytes(own)


HOLD = """
import sys, time
from pathlib import Path
from ecnn import files
def write(temporary):
    temporary.write_bytes(b"half")
    print("writing", flush=True)
    sys.stdin.read()
with files.locked(sys.argv[1], "test"):
    files.write_atomically(Path(sys.argv[1]) / "x.json", write)
"""


def start_holder(folder: Path) -> subprocess.Popen[str]:
    """A process that has locked the folder and is writing a file in it."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_a_folder_has_one_user_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    with start_holder(tmp_path) as process:
        sentence = rf"in use \(test by process {process.pid} on .+ since 20.*\): wait until that has ended"
        with pytest.raises(InputError, match=sentence), files.locked(tmp_path, "test"):
            pass
        files.remove_stale(tmp_path)
        assert len(list(tmp_path.glob(".ecnn-tmp-*.json"))) == 1  # its writer lives
        process.kill()
        process.wait()
    assert len(list(tmp_path.iterdir())) == 2
    with files.locked(tmp_path, "test"), files.locked(tmp_path, "test again"):
        assert [path.name for path in tmp_path.iterdir()] == [".ecnn-lock"]
        files.write_text(tmp_path / "sub" / "x", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["sub"]
    with start_holder(tmp_path) as process:
        process.kill()
        process.wait()
    files.disk._tidied.clear()  # as a new process
    files.write_text(tmp_path / "y", "text")
    assert {path.name for path in tmp_path.iterdir()} == {"sub", "y", ".ecnn-lock"}


def test_another_thread_is_another_user(tmp_path: Path) -> None:
    said: list[str] = []

    def work() -> None:
        try:
            with files.locked(tmp_path / "run", "test"):
                said.append("in")
        except InputError as error:
            said.append(str(error))

    with files.locked(tmp_path / "run", "test"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    work()
    assert "in use" in said[0]
    assert said[1:] == ["in"]
    assert list(tmp_path.iterdir()) == []  # a folder in which nothing came to be goes too


def test_a_folder_that_is_moved_away_gets_nothing_more(tmp_path: Path) -> None:
    with files.locked(tmp_path / "run", "test"):
        files.write_text(tmp_path / "run" / "a", "text")
        (tmp_path / "run").rename(tmp_path / "moved")
        for act in (files.write_text, lambda path, text: files.keep(text, path)):
            with pytest.raises(DiskError, match="was moved, deleted or replaced during the work"):
                act(tmp_path / "run" / "b", "text")
        assert not (tmp_path / "run").exists()
    with files.locked(tmp_path / "moved", "test"):
        pass
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["a"]


def test_a_file_keeps_a_second_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last, previous = tmp_path / "last", tmp_path / "previous"
    for has_links in (True, False):
        if not has_links:
            monkeypatch.delattr(os, "link")
            monkeypatch.setattr(
                os, "link", lambda *names: (_ for _ in ()).throw(OSError(95, "no links")), False
            )
        files.write_text(last, "one")
        files.keep(last, previous)
        files.keep(last, previous)
        files.write_text(last, "two")
        assert (previous.read_text(), last.read_text()) == ("one", "two")
        files.keep(last, previous)
        assert previous.read_text() == "two"
    assert sorted(tmp_path.iterdir()) == [last, previous]


def test_what_a_killed_process_left_is_tidied_unless_one_works_there(tmp_path: Path) -> None:
    for name in (".ecnn-lock", ".ecnn-tmp-x.json", "result.json"):
        (tmp_path / name).write_text("by process 1")
    with files.locked(tmp_path, "training"):
        held = subprocess.run(
            [sys.executable, "-c", f"from ecnn import files; files.tidy({str(tmp_path)!r})"], check=False
        )
        assert held.returncode == 0
        assert (tmp_path / ".ecnn-lock").exists()
    (tmp_path / ".ecnn-lock").write_text("by process 1")
    files.tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_temporary_folder_of_a_killed_process_goes_with_the_next(tmp_path: Path) -> None:
    with files.temporary_folder(tmp_path / "x.npz") as folder:
        files.write_text(folder / "deep" / "y", "text")
        left = tmp_path / ".ecnn-tmp-left"
        left.mkdir()
        (left / "z").write_text("text")
        files.remove_stale(tmp_path)
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["\U0001f600 é", "a\x7fb", 'quote " and \\', "tab\tline\n", "\U0010ffff"])
def test_toml_holds_every_name(tmp_path: Path, name: str) -> None:
    path = files.write_toml(tmp_path / name.replace("\n", "") / "x.toml", {name: {"x": name}, "y": [name]})
    assert files.read_toml(path) == {name: {"x": name}, "y": [name]}
    assert tomllib.loads(path.read_text(encoding="utf-8")) == files.read_toml(path)


def test_toml_refuses_bytes_that_are_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    with pytest.raises(InputError, match=r"'caf\\udce9' is not UTF-8.*rename"):
        files.write_toml(tmp_path / "x.toml", {"name": name})
    assert files.read_json(files.write_json(tmp_path / name, {"name": name})) == {"name": name}


def test_a_changed_table_is_refused(tmp_path: Path) -> None:
    path = files.write_json(
        tmp_path / "x.json", {"accuracy": 0.725, "list": [1, 2], "number": {"3": 1}, 4: 5}
    )
    content, rng, refused = path.read_bytes(), random.Random(0), 0
    value = files.read_json(path)
    assert value == {"accuracy": 0.725, "list": [1, 2], "number": {"3": 1}, "4": 5}
    for place in range(len(content)):
        path.write_bytes(
            content[:place] + bytes([content[place] ^ (1 << rng.randrange(7))]) + content[place + 1 :]
        )
        try:
            found = files.read_json(path)
        except InputError:
            refused += 1
        else:  # white space, or the name of the checksum
            assert {key: found[key] for key in value} == value
    assert refused > 0.8 * len(content)
    path.write_text(content.decode().replace("0.725", "0.925"))
    with pytest.raises(InputError, match=r'damaged or changed .* remove its entry "sha256" to accept'):
        files.read_json(path)
    path.write_text('{"accuracy": 0.925}')  # as files of before
    assert files.read_json(path) == {"accuracy": 0.925}


def test_same_tensors_same_bytes_and_every_bit_counts(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {"weight": torch.arange(12.0).reshape(3, 4), "count": torch.tensor(3)}
    header = {key: key * 3 for key in ("format", "version", "facts", "name")}
    first = files.write_tensors(tmp_path / "a", tensors, header).read_bytes()
    for _ in range(5):
        assert (
            files.write_tensors(tmp_path / "b", dict(reversed(tensors.items())), header).read_bytes() == first
        )
    assert torch.equal(load_file(tmp_path / "a")["weight"], tensors["weight"])  # others can read it
    path = tmp_path / "c"
    for place in range(len(first)):
        path.write_bytes(first[:place] + bytes([first[place] ^ (1 << place % 8)]) + first[place + 1 :])
        try:
            found, head = files.read_tensors(path)
        except InputError:
            continue
        # The name of the header or of all metadata: what is read then is no file of ours.
        assert not head.get("format")
    save_file(tensors, path, header)  # as files of before, and of others
    found, head = files.read_tensors(path)
    assert head == header
    assert torch.equal(found["weight"], tensors["weight"])


def test_tensors_are_read_whatever_their_file_is_called(tmp_path: Path) -> None:
    import torch

    tensors = {
        "half": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.zeros(0, 2),
        "yes": torch.tensor(True),
    }
    path = files.write_tensors(tmp_path / "bad\udcff.safetensors", tensors, {"a": "b"})
    found, header = files.read_tensors(path)
    assert header == {"a": "b"}
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    found["half"].add_(1)  # they can be changed


def test_a_tensor_file_of_another_size_than_it_announces_takes_no_memory(tmp_path: Path) -> None:
    path, one = tmp_path / "x.safetensors", b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    for size, rest in ((2**40, b""), (2**25, b""), (len(one), one)):
        path.write_bytes(size.to_bytes(8, "little") + rest)
        os.truncate(path, 2**34)  # a hole, which takes no room on the disk
        with pytest.raises(InputError, match="is not a whole safetensors file"):
            files.read_tensors(path)


@pytest.mark.parametrize("name", ["\ud800", "a\0b"])
def test_what_cannot_be_the_name_of_a_file_is_refused_everywhere(name: str) -> None:
    def lock() -> None:
        with files.locked(name, "work"):
            pass

    for call in (
        lock,
        lambda: files.read_bytes(name),
        lambda: files.write_text(name, ""),
        lambda: files.check_writable(name),
    ):
        with pytest.raises(InputError, match="name"):
            call()


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).touch()
    assert [path.name for path in files.entries(tmp_path)] == ["a", "b"]
    for path in (tmp_path / "gone", tmp_path / "a"):
        with pytest.raises(InputError, match=f"cannot read {path}: No"):
            files.entries(path)
