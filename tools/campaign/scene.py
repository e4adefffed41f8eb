"""The material of all cases: small images, a code, a trained run, and what undisturbed commands print and write."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open

import ecnn
from campaign import writes
from campaign.forks import Ended, Violation, command, in_child
from ecnn.auditing import budgets

#: Entries that differ between two runs of the same work.
_VOLATILE = {"seconds", "images_per_second", "started", "finished", "times", "sha256"}
_SIZE, _CLASSES = 8, 3
_EXPERIMENT = """
title = "a campaign"
paper = "none"
rows = ["clean", "pgd"]
[audited]
pgd = "audit"
[spec]
data = {{ name = {pictures}, image_size = 8, test_limit = 8 }}
audit = {{ norm = "linf", eps = 0.1, limit = 6, budget = "quick" }}
[spec.attacks.pgd]
kind = "pgd"
norm = "linf"
eps = 0.1
steps = 2
step_size = 0.05
[[arms]]
name = "one"
title = "one"
spec.model = {{ kind = "resnet", width = 2, depth = 8 }}
spec.train = {{ epochs = 2, batch_size = 16 }}
"""


@dataclass(frozen=True)
class Workflow:
    """A command that writes files, and the result of running it undisturbed.

    Attributes:
        name: in reports.
        words: arguments of `ecnn`.
        start: a folder as it is before the command.
        ended: how the command ended.
        files: contents of the folder afterwards, see `snapshot`.
        events: number of write events.
        accesses: number of write events and of files opened for reading.
        largest: size of the largest file, in bytes.
    """

    name: str
    words: tuple[str, ...]
    start: Path
    ended: Ended
    files: dict[str, str]
    events: int
    accesses: int
    largest: int


@dataclass(frozen=True)
class Scene:
    """Everything that cases share. It is not changed after it was made: cases work on copies.

    Attributes:
        home: a folder that contains all of it, and the folders of cases.
        pictures: a folder of images by class.
        done: a folder in which `run` is trained, evaluated and audited, `table` an experiment, `code.json` a code.
        workflows: by name.
    """

    home: Path
    pictures: Path
    done: Path
    workflows: dict[str, Workflow]

    @contextmanager
    def folder_from(self, start: Path) -> Iterator[Path]:
        """A fresh copy of a folder, which is deleted when the block ends."""
        with tempfile.TemporaryDirectory(dir=self.home, prefix="case-", ignore_cleanup_errors=True) as name:
            folder = Path(name) / "here"
            shutil.copytree(start, folder)
            yield folder


def make_scene(home: Path, *, few: bool = False) -> Scene:
    """Draws the images, runs every command once undisturbed, and imports the modules that commands need.

    Args:
        home: a folder for all of it.
        few: leaves out audits and experiments, which take longest.
    """
    torch.set_num_threads(1)
    # A budget with which an audit runs every attack and diagnostic in a second.
    tiny = {
        "images": 8,
        "steps": 2,
        "targets": 2,
        "probe_images": 4,
        "probe_steps": 2,
        "queries": 8,
        "eot": 2,
    }
    budgets.BUDGETS["quick"] = dataclasses.replace(budgets.BUDGETS["quick"], **tiny)  # type: ignore[arg-type]
    pictures = home / "pictures"
    _draw_images(pictures)
    ecnn.design_code(3, 4, steps=100, seed=0)  # so that numba compiles before children are forked
    coded, trained, done = home / "coded", home / "trained", home / "done"
    coded.mkdir()
    (coded / "table.toml").write_text(_EXPERIMENT.format(pictures=json.dumps(str(pictures))))
    shown = ("--data", str(pictures))
    small = (*shown, "--image-size", str(_SIZE), "--batch-size", "16", "--set", "model.depth=8")
    code = ("code", "--classes", "3", "--length", "5", "--steps", "200", "--out", "code.json")
    _in_peace(code, coded)
    shutil.copytree(coded, trained)
    base = (
        "train",
        *small,
        "--code",
        "code.json",
        "--set",
        "model.width=2",
        "--epochs",
        "10",
        "--out",
        "run",
    )
    _in_peace(base, trained)
    train = ("train", *small, "--epochs", "3", "--set", "model.width=2", "--out", "run")
    attack = ("evaluate", "run", *shown, "--steps", "2", "--step-size", "0.05", "--batch-size", "5")
    evaluate = (
        *attack,
        "--attack",
        "pgd",
        "--attack",
        "fgsm",
        "--eps",
        "0.1",
        "--eps",
        "0.2",
        "--limit",
        "12",
    )
    audit = ("audit", "run", *shown, "--eps", "0.1", "--budget", "quick", "--limit", "6", "--claim", "0.5")
    asked = {
        "design": (coded, (*code, "--plot", "code.png")),
        "train": (coded, (*train, "--code", "code.json")),
        "train anew": (trained, (*base, "--no-resume")),
        "evaluate": (trained, (*evaluate, "--out", "run")),
        "images": (trained, (*attack, "--attack", "pgd", "--eps", "0.1", "--save-images", "images.npz")),
    }
    if not few:
        asked |= {
            "squeeze": (coded, (*train, "--model", "feature_squeezing")),
            "audit": (trained, (*audit, "--out", "run")),
            "reproduce": (coded, ("reproduce", "table.toml", "--out", "table")),
        }
    workflows = {name: _observe(name, words, start, home) for name, (start, words) in asked.items()}
    shutil.copytree(trained, done)
    _in_peace((*evaluate, "--out", "run"), done)
    if not few:
        _in_peace((*audit, "--out", "run"), done)
        _in_peace(("reproduce", "table.toml", "--out", "table"), done)
    return Scene(home, pictures, done, workflows)


def _draw_images(folder: Path) -> None:
    """Draws images of noise with a bright stripe, whose position is the class."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for label in range(_CLASSES):
            (folder / split / str(label)).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 200, (_SIZE, _SIZE), dtype=np.uint8)
                pixels[:, 2 * label : 2 * label + 2] = 255
                Image.fromarray(pixels).save(folder / split / str(label) / f"{number}.png")


def _in_peace(words: tuple[str, ...], folder: Path) -> None:
    """Runs a command that must succeed in a child, then imports its modules here, so that later children have them."""

    def work() -> Iterator[list[str]]:
        known = set(sys.modules)
        try:
            command(*words)()
        except SystemExit as stop:
            if stop.code not in (0, 1, 3, None):
                raise
        yield [name for name in sys.modules if name not in known]

    ended = in_child(work, folder=folder, seconds=300)
    if ended.status != 0:
        raise RuntimeError(f"ecnn {' '.join(words)} ended with {ended.status} in peace: {ended.err}")
    for name in ended.answers[0]:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: S112 (entries of sys.modules that cannot be imported by name)
            continue


def _observe(name: str, words: tuple[str, ...], start: Path, home: Path) -> Workflow:
    """Runs a command undisturbed, and counts its write events and accesses."""
    folder = home / f"observed-{name}".replace(" ", "-")
    shutil.copytree(start, folder)

    def work() -> Iterator[list[str]]:
        seen: list[str] = []
        writes.watch(folder, lambda number, name, path: seen.append(name), reads=True)
        try:
            command(*words)()
        finally:
            yield seen

    ended = in_child(work, folder=folder, seconds=300)
    if ended.status not in (0, 1, 3):
        raise RuntimeError(f"{name} ended with {ended.status} in peace: {ended.err}")
    seen = ended.answers[0]
    largest = max(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    events = sum(name != "read" for name in seen)
    return Workflow(name, words, start, ended, snapshot(folder), events, len(seen), largest)


def same_output(one: str, other: str) -> bool:
    """Whether two outputs are equal but for times and paths of cases."""
    return _without_times(one) == _without_times(other)


def _without_times(text: str) -> str:
    text = re.sub(r'"(seconds|elapsed)": [\d.e-]+', "TIME", text)
    return re.sub(r"\d+\.\d+ s\b|/\S*case-\w+/here", "TIME", text)


def snapshot(folder: Path) -> dict[str, str]:
    """The `content` of each file below a folder, by path."""
    return {
        str(path.relative_to(folder)): content(path)
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or not path.is_dir()
    }


def content(path: Path) -> str:
    """A hash of a file's contents without times; "unreadable: REASON" if it is broken."""
    try:
        if not path.is_file():
            return "unreadable: no file"
        if path.name == "times.json":
            return "times"
        if path.name == "DONE":
            return _hash(_read_sums(path))
        if path.suffix in _READERS:
            return _hash(_READERS[path.suffix](path))
        return _hash(path.read_bytes())
    except Exception as error:  # a broken file can make its reader raise anything
        return f"unreadable: {error}"


def broken_files(folder: Path) -> list[Violation]:
    """Violations for the files below a folder that cannot be read; hidden files and folders are left out."""
    return [
        Violation("corrupt", f"{name} {said}")
        for name, said in snapshot(folder).items()
        if said.startswith("unreadable") and not any(part.startswith(".") for part in Path(name).parts)
    ]


def differences(workflow: Workflow, folder: Path) -> list[Violation]:
    """Violations for files that differ from those that the same command leaves when it is undisturbed."""
    found, wanted = snapshot(folder), workflow.files
    lost = [Violation("lost", f"{name} is missing") for name in wanted if name not in found]
    left = [Violation("temporary", f"{name} is left") for name in found if name not in wanted]
    other = [
        Violation("corrupt" if said.startswith("unreadable") else "lost", f"{name} is another: {said}")
        for name, said in found.items()
        if name in wanted and wanted[name] != said
    ]
    return [*lost, *left, *other]


def _read_tensors(path: Path) -> Any:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = dict(file.metadata() or {})
    said = {name: (str(value.dtype), value.numpy().tobytes()) for name, value in tensors.items()}
    return sorted((name, kind, hashlib.sha256(raw).hexdigest()) for name, (kind, raw) in said.items()), header


def _read_arrays(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        said = {name: archive.read(name) for name in archive.namelist()}
    header = said.pop("header.npy", b"")
    text = header[10 + int.from_bytes(header[8:10], "little") :].decode()
    return sorted((name, hashlib.sha256(raw).hexdigest()) for name, raw in said.items()), json.loads(text)


def _read_sums(path: Path) -> Any:
    """The names in DONE, sorted; ValueError if a file does not have the checksum that DONE says."""
    sums = {name: said for said, name in (line.split("  ") for line in path.read_text().splitlines())}
    for name, expected in sums.items():
        if hashlib.sha256((path.parent / name).read_bytes()).hexdigest() != expected:
            raise ValueError(f"{name} has another checksum than DONE says")
    return sorted(sums)


def _read_picture(path: Path) -> Any:
    with Image.open(path) as picture:
        picture.load()
        return picture.size


_READERS = {
    ".safetensors": _read_tensors,
    ".npz": _read_arrays,
    ".json": lambda path: json.loads(path.read_text()),
    ".jsonl": lambda path: [json.loads(line) for line in path.read_text().splitlines()],
    ".toml": lambda path: tomllib.loads(path.read_text()),
    ".png": _read_picture,
}


def _hash(value: Any) -> str:
    text = value if isinstance(value, bytes) else repr(_steady(value)).encode()
    return hashlib.sha256(text).hexdigest()


def _steady(value: Any) -> Any:
    """The value without entries that differ between two runs of the same work, such as times."""
    if isinstance(value, dict):
        return [(key, _steady(value[key])) for key in sorted(value) if key not in _VOLATILE]
    if isinstance(value, list | tuple):
        return [_steady(item) for item in value]
    if isinstance(value, str) and value[:1] in ("{", "["):  # a table within a header
        try:
            return _steady(json.loads(value))
        except ValueError:
            return value
    return value


def environment() -> None:
    """Sets the environment so that children use one thread and cannot reach the network."""
    os.environ.update(OMP_NUM_THREADS="1", HTTPS_PROXY="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9")
