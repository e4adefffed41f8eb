"""Wiring: settings as people type them, and choices made for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ecnn.data import load_data
from ecnn.errors import InputError
from ecnn.pipeline import TrainRequest, parse_settings, plan


def test_settings() -> None:
    found = parse_settings(
        ["train.lr=0.1", "model.width=8", "model.batch_norm=true", "train.objective=cross_entropy"]
    )
    assert found == {
        "train": {"lr": 0.1, "objective": "cross_entropy"},
        "model": {"width": 8, "batch_norm": True},
    }
    for bad in ("lr=0.1", "train.lr", "data.name=x", ""):
        with pytest.raises(InputError, match="--set takes"):
            parse_settings([bad])


def test_choices_that_fit_the_data() -> None:
    made = plan(TrainRequest(data="digits"), load_data("digits"))
    assert made.code is not None
    assert (made.code.num_classes, made.code.code_length) == (10, 30)
    assert made.spec["model"]["kind"] == "ecnn"
    assert made.recipe.epochs == 30
    assert "attack" in made.spec
    assert made.spec["attack"] is None


def test_dry_run_prints_the_spec_and_writes_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ecnn",
        "train",
        "--data",
        "digits",
        "--eps",
        "0.1",
        "--dry-run",
        "--epochs",
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    spec = json.loads(done.stdout)
    assert spec["train"]["epochs"] == 3
    assert spec["attack"]["eps"] == "0.1"
    assert list(tmp_path.iterdir()) == []


def test_models_are_listed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ecnn", "models"], capture_output=True, text=True, check=True
    )
    assert "cifar10-ecnn30-q2     cifar10   test 85.61 %" in done.stdout


def test_tensorboard_events_where_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from ecnn.pipeline import train_run

    train_run(TrainRequest(data="digits", out=tmp_path, model={"width": 4, "depth": 8}, train={"epochs": 1}))
    assert list((tmp_path / "tensorboard").glob("events.*"))
