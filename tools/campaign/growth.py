"""Repeats uses of the package: memory, descriptors, threads and files must not grow with the number of uses."""

from __future__ import annotations

import gc
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import ecnn
from campaign.forks import Violation, command, in_child
from campaign.scene import Scene
from ecnn.attacks import PGD, Square

_USES, _ROUNDS = 12, 5
#: Memory that a use may keep on average: allocators round up, and leaks of tensors are larger.
_BYTES_PER_USE = 200_000
_UNITS = ("bytes", "descriptors", "threads and figures", "files")
Held = tuple[int, int, int, int]


def _uses(scene: Scene) -> dict[str, Callable[[], Any]]:
    """The uses that are repeated, by name; their working directory is a folder of the case."""
    data = ecnn.load_data(scene.pictures)
    code, model = ecnn.load_code(scene.done / "code.json"), ecnn.load_model(scene.done / "run")
    images, labels = data.test[:12]
    pgd = PGD(norm="linf", eps=0.1, steps=3, step_size=0.05)
    square = Square(norm="linf", eps=0.1, queries=20)

    def call(*words: str) -> None:
        try:
            command(*words)()
        except SystemExit as stop:
            if stop.code not in (0, 1, 2, 3, None):
                raise

    return {
        "load_model": lambda: ecnn.load_model(scene.done / "run"),
        "load_data": lambda: ecnn.load_data(scene.pictures),
        "load_code": lambda: ecnn.load_code("10x30"),
        "attack": lambda: pgd(model, images, labels),
        "square": lambda: square(model, images, labels),
        "design_code": lambda: ecnn.design_code(3, 4, steps=100, seed=0),
        "plot_code": lambda: ecnn.plot_code(code, "code.png"),
        "evaluate": lambda: ecnn.evaluate(model, data.test, {"pgd": pgd}, limit=4, run_dir="kept"),
        "evaluate anew": lambda: ecnn.evaluate(
            model, data.test, {"pgd": pgd}, limit=4, run_dir="kept", resume=False
        ),
        "fit": lambda: ecnn.fit(
            model, data.train, val=data.val, recipe="small", epochs=1, seed=0, run_dir="fitted", resume=False
        ),
        "ecnn train": lambda: call(*scene.workflows["train"].words),
        "ecnn evaluate": lambda: call(*scene.workflows["evaluate"].words),
        "ecnn code": lambda: call("code", "--show", "code.json"),
        "a refused file": lambda: call("code", "--show", "run/spec.toml"),
        "a refused run": lambda: call("evaluate", "run", "--attack", "nothing"),
    }


def try_growth(scene: Scene, number: int, rng: random.Random) -> Iterator[tuple[str, list[Violation]]]:
    """Repeats one use, the one of that number; there are no cases beyond the last use."""
    names = list(_uses_names(scene))
    if number >= len(names):
        return
    name = names[number]
    with scene.folder_from(scene.done) as folder:
        shutil.rmtree(folder / "table", ignore_errors=True)

        def work() -> Iterator[Held]:
            use, before = _uses(scene)[name], None
            for _ in range(_ROUNDS):
                for _ in range(_USES):
                    use()
                gc.collect()
                after = _held(folder)
                yield after
                if before is not None and not _growth(before, after):
                    return
                before = after

        ended = in_child(work, folder=folder, seconds=60)
    found = ended.violations()
    if len(ended.answers) > 1:
        found += _growth(*ended.answers[-2:])
    elif not found:
        found.append(Violation("status", f"no figures: {ended.last_words}"))
    yield f"{name} {_USES * len(ended.answers)} times", found


def _growth(before: Held, after: Held) -> list[Violation]:
    """The quantities that grew between two rounds; memory may grow a little, since allocators take some rounds."""
    most = {"bytes": _BYTES_PER_USE * _USES}
    return [
        Violation("growth", f"{unit} from {one:,} to {other:,} in {_USES} uses")
        for unit, one, other in zip(_UNITS, before, after, strict=True)
        if other - one > most.get(unit, 0)
    ]


def _uses_names(scene: Scene) -> tuple[str, ...]:
    return tuple(_uses(scene))


def _held(folder: Path) -> Held:
    """Bytes in memory, open descriptors, threads and figures, files in the folder."""
    # Anonymous memory only: mapped files and libraries grow in a child without a leak.
    (kilobytes,) = re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    files = sum(1 for path in folder.rglob("*") if path.is_file())
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return (
        1024 * int(kilobytes),
        descriptors,
        threading.active_count() + len(plt.get_fignums()),
        files,
    )
