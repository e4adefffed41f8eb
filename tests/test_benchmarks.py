"""Benchmarks still run: their quick forms, which measure nothing worth keeping and leave committed figures alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["annealing", "attacks", "baselines", "estimators", "training"])
def test_quick_form(name: str, tmp_path: Path) -> None:
    """That of the audit takes longest and is left to `make bench`; tests/test_auditing_models.py runs its models."""
    committed = {path: path.read_bytes() for path in BENCHMARKS.glob("*.[jm]*")}
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick"]
    # A process beside others of its kind: with one thread each they do not wait for one another.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
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
