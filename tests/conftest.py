"""Settings shared by all tests."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Compilation by numba makes the first example slow; results must not depend on the machine's speed.
settings.register_profile(
    "ecnn", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
settings.load_profile("ecnn")

#: Where the files of real datasets lie, if they do.
DATA = Path(os.environ.get("ECNN_DATA") or Path(__file__).parents[1] / "data")


#: The Chromium that page tests drive, if there is one.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@functools.cache
def benchmark(name: str) -> Any:
    """A module of benchmarks/, which is no package."""
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests come first, so that no process is left with them when the others have finished."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """What is loaded by now stays to the end: searching it for garbage again and again took a twentieth of the time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without a Chromium, tests marked `browser` are skipped before anything is trained for them; in CI they fail."""
    if item.get_closest_marker("browser") is not None and CHROMIUM is None:
        if os.environ.get("ECNN_REQUIRE_BROWSER"):
            pytest.fail("no Chromium, and ECNN_REQUIRE_BROWSER is set: install one")
        pytest.skip("no Chromium")


def ecnn_command(words: str, *more: str) -> list[str]:
    """The command `ecnn` with these words, and with more that may contain spaces, run by this Python."""
    return [sys.executable, "-m", "ecnn", *words.split(), *more]


@pytest.fixture(autouse=True)
def _do_not_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests kill processes, not machines; waiting for a slow disk after every epoch proves nothing."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The Chromium, for tests marked `browser`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        alone = ["--no-sandbox"] if os.geteuid() == 0 else []  # root has no sandbox in a container
        made = player.chromium.launch(executable_path=CHROMIUM, args=alone)
        yield made
        made.close()


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """Within `full_disk(size)` no file can grow beyond so many bytes, as on a disk without more room."""
    resource = pytest.importorskip("resource")

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture
def as_nobody() -> Callable[[Path], AbstractContextManager[None]]:
    """Within `as_nobody(folder)` root has no more rights than others; that folder, and those above, can be entered."""

    @contextmanager
    def lowered(folder: Path) -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        modes = {path: path.stat().st_mode for path in (folder, *folder.parents)}
        closed = {path: mode for path, mode in modes.items() if not mode & 0o001}
        for path, mode in closed.items():
            path.chmod(mode | 0o011)
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
            for path, mode in closed.items():
                path.chmod(mode)

    return lowered


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Networks so small lose more by sharing work than they gain."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def short_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits of a second, where it is not their strength that is tested."""
    from toys import shorten_audits  # only here: it loads torch

    shorten_audits(monkeypatch)


@pytest.fixture
def short_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits whose students hardly learn, where it is not theirs that is tested."""
    from toys import shorten_lessons  # only here: it loads torch

    shorten_lessons(monkeypatch)


@pytest.fixture
def short_autoattack(monkeypatch: pytest.MonkeyPatch) -> None:
    """AutoAttack with a fifth of its steps and few queries, where it is not its strength that is tested."""
    from ecnn.attacks import auto  # only here: it loads torch

    monkeypatch.setattr(auto, "_STEPS", 20)
    monkeypatch.setattr(auto, "_QUERIES", 200)


@pytest.fixture
def unofficial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets small files of the true formats pass for the official ones."""
    import ecnn.pipeline.costing  # noqa: F401 which counts images by the official sizes, so must have them before
    from ecnn.data import sources  # only here: it loads torch

    for key in list(sources.CHECKSUMS):
        monkeypatch.delitem(sources.CHECKSUMS, key)
    monkeypatch.setattr(sources, "FORMS", {})


@pytest.fixture(autouse=True)
def _skip_without_what_it_needs(request: pytest.FixtureRequest) -> None:
    """Tests marked `gpu` or `data(file, ...)` say no more than that; here it is seen whether it is there."""
    needed = request.node.get_closest_marker("data")
    for name in needed.args if needed else ():
        if not (DATA / name).exists():
            pytest.skip(f"no {name} under data/")
    if request.node.get_closest_marker("gpu") is None:
        return
    import torch  # only here: most tests of codes do without it

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
