"""Benchmarks still run: their quick forms, which measure nothing worth keeping and leave committed figures alone."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name",
    [
        *("annealing", "attacks", "estimators", "fast", "scale"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("baselines", "training")),
    ],
)
def test_quick_form(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the audit and of serving take longest and are left to `make bench`; other tests run their parts."""
    committed = {path: path.read_bytes() for path in BENCHMARKS.glob("*.[jm]*")}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick"])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # they turn it on
    runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    assert (tmp_path / "out" / "quick" / f"{name}.md").read_text().startswith("# ")
    assert {path: path.read_bytes() for path in BENCHMARKS.glob("*.[jm]*")} == committed


def test_every_quoted_command_exists() -> None:
    quoted = [
        found for page in BENCHMARKS.glob("*.md") for found in re.findall(r"`python (.*?)`", page.read_text())
    ]
    assert len(quoted) >= 5
    for script, *words in map(str.split, quoted):
        text = (BENCHMARKS.parent / script).read_text()
        assert all(f'"{word}"' in text for word in words if word.startswith("--")), (script, words)
