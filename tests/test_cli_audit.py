"""`ecnn audit` as a person uses it: any torch module, exit statuses, files, sentences instead of tracebacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import run
from typer.testing import CliRunner

from ecnn.cli import app

OWN = """
import ecnn
import torch
from torch import nn


def build():
    images, labels = ecnn.load_data("digits").train[:]
    means = torch.stack([images[labels == digit].mean(dim=0).flatten() for digit in range(10)])
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():  # the nearest class mean, which is linear in the image
        model[1].weight.copy_(2 * means)
        model[1].bias.copy_(-means.square().sum(dim=1))
    return model


def number():
    return 7
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def audit(own: Path, *more: str) -> tuple[str, ...]:
    fixed = ("--data", "digits", "--eps", "0.1", "--budget", "quick", "--limit", "40")
    return ("audit", "--module", f"{own}:build", *fixed, *more)


@pytest.mark.slow
def test_a_false_claim_about_a_module_of_ones_own(own: Path, tmp_path: Path) -> None:
    done = run(*audit(own, "--claim", "0.9", "--out", "audited", "--json"), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "images forward" in done.stderr.splitlines()[0]
    found = json.loads(done.stdout)
    assert (found["verdict"], found["claimed"], found["exit_code"]) == ("not believable", 0.9, 1)
    assert found["accuracy"] < 0.6 < 0.8 < found["clean_accuracy"]
    written = tmp_path / "audited"
    assert json.loads((written / "audit.json").read_text()) == found
    assert (written / "audit.md").read_text().startswith("# Audit: not believable")
    assert (written / "audit.png").read_bytes().startswith(b"\x89PNG")
    # The same audit of an honest claim goes on with what is there.
    again = run(*audit(own, "--claim", str(found["accuracy"]), "--out", "audited"), cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.startswith("# Audit: believable")


def test_the_cost_comes_first(own: Path, tmp_path: Path) -> None:
    done = run(*audit(own, "--dry-run"), cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == ""
    assert done.stderr.startswith("at most ")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"--module": None}, "give either a run folder"),
        ({"--data": None}, "needs --data"),
        ({"--module": "own.py:missing"}, "no function called 'missing'"),
        ({"--module": "own.py:number"}, "must return a torch module, not int"),
        ({"--module": "other.py:build"}, "file.py:function"),
        ({"--claim": "72"}, "0.72 for 72 %"),
        ({"--budget": "endless"}, "budget must be one of quick, standard, thorough"),
        ({"--eps": "many"}, "eps must be"),
        ({"--norm": "l7"}, "norm must be"),
    ],
)
def test_what_cannot_be_audited_is_said_in_a_sentence(
    own: Path, change: dict[str, str | None], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, str | None] = {
        "--module": "own.py:build",
        "--data": "digits",
        "--eps": "0.1",
        "--budget": "quick",
        "--limit": "4",
        **change,
    }
    given = [part for name, value in options.items() if value is not None for part in (name, value)]
    monkeypatch.chdir(own.parent)
    done = CliRunner().invoke(app, ["audit", *given])
    assert done.exit_code == 2, done.output
    assert done.stderr.splitlines()[-1].startswith("ecnn: ")
    assert sentence in done.stderr
