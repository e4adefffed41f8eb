"""Wiring: settings as people type them, and choices made for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ecnn
from ecnn.attacks import PGD
from ecnn.data import load_data
from ecnn.errors import InputError
from ecnn.pipeline import TrainRequest, make_attack, parse_settings, plan, train_run


def test_settings() -> None:
    found = parse_settings(
        [
            "train.lr=0.1",
            "model.width=8",
            "model.batch_norm=true",
            "train.objective=trades",
            "objective.eps=8/255",
        ]
    )
    assert found == {
        "train": {"lr": 0.1, "objective": "trades"},
        "objective": {"eps": "8/255"},
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
    train_run(TrainRequest(data="digits", out=tmp_path, model={"width": 4, "depth": 8}, train={"epochs": 1}))
    assert list((tmp_path / "tensorboard").glob("events.*"))


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    model = {"width": 4, "depth": 8, "feature_dim": 8}
    train_run(
        TrainRequest(data="digits", out=folder, code="10x10", model=model, train={"epochs": 3, "lr": 0.01})
    )
    return folder


def test_attacks_by_name() -> None:
    made = make_attack(
        "pgd", {"norm": "linf", "eps": "8/255", "steps": 5, "step_size": 0.01, "on": "members"}
    )
    assert made == PGD(norm="linf", eps="8/255", steps=5, step_size=0.01, on="members")
    for name, options, sentence in (
        ("pdg", {}, "no attack is called 'pdg'; known: fgsm"),
        ("pgd", {"norm": "linf", "eps": 1}, "pgd needs step_size, steps"),
        ("fgsm", {"norm": "linf", "eps": 1, "steps": 3}, "fgsm has no option 'steps'"),
    ):
        with pytest.raises(InputError, match=sentence):
            make_attack(name, options)


def test_a_saved_run_is_attacked(digits_run: Path, tmp_path: Path) -> None:
    """The command, the folder it leaves and the images it writes agree with what the parts say by themselves."""
    command = [
        sys.executable,
        "-m",
        "ecnn",
        "evaluate",
        str(digits_run),
        "--attack",
        "pgd",
        "--attack",
        "fgsm",
    ]
    options = [
        "--eps",
        "0.1",
        "--eps",
        "0.2",
        "--steps",
        "5",
        "--step-size",
        "0.05",
        "--loss",
        "margin",
        "--limit",
        "50",
        "--json",
        "--seed",
        "3",
    ]
    places = ["--out", str(tmp_path / "out"), "--save-images", str(tmp_path / "adv.npz")]
    done = subprocess.run([*command, *options, *places], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["attacks"]) == ["pgd@0.1", "pgd@0.2", "fgsm@0.1", "fgsm@0.2"]

    model, data = ecnn.load_model(digits_run), load_data("digits")
    images, labels = data.test[:50]
    attack = PGD(norm="linf", eps="0.2", steps=5, step_size=0.05, loss="margin")
    expected = attack.run(model, images, labels, seed=3)
    assert found["attacks"]["pgd@0.2"]["robust"] == int((~expected.success).sum())
    with np.load(tmp_path / "adv.npz", allow_pickle=False) as arrays:
        assert torch.allclose(torch.from_numpy(arrays["pgd@0.2.images"]), expected.images, atol=1e-6)
        assert arrays["label"].tolist() == labels.tolist()
    again = subprocess.run([*command, *options, *places], capture_output=True, text=True, check=True)
    assert json.loads(again.stdout)["attacks"] == found["attacks"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--attack", "pgd", "--eps", "0.1"], "pgd needs step_size, steps"),
        (["--attack", "cw2", "--eps", "0.1"], "no attack is called 'cw2'"),
        (["--attack", "fgsm", "--eps", "0.1", "--steps", "3"], "none of fgsm has an option 'steps'"),
        (["--attack", "fgsm", "--eps", "0.1", "--data", "nothing"], "nothing"),
        (["--attack", "fgsm", "--eps", "0.1", "--limit", "0"], "limit"),
        (["--attack", "fgsm", "--eps", "0.1", "--set", "train.lr=1"], "--set takes attack.NAME=VALUE"),
    ],
)
def test_mistakes_of_evaluate(digits_run: Path, arguments: list[str], sentence: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ecnn", "evaluate", str(digits_run), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
