"""The examples run: here with few images and little training, so that they say nothing but do not rot."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ecnn.auditing import load_audit

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_demo_tells_its_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("demo").main(tmp_path, limit=8, most_epochs=1)
    printed = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in printed if line.startswith(("plain ", "ecnn ", "ecnn-at "))}
    assert list(rows) == ["plain", "ecnn", "ecnn-at"]
    for name, row in rows.items():
        audit = load_audit(tmp_path / name)
        assert audit.images == 8
        assert row.endswith(audit.verdict)
        assert f"{100 * audit.accuracy:.1f} %" in row
        assert (tmp_path / name / "audit.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "code.png").exists()
