"""From a folder of PNGs to a trained and audited model that names a new picture: the commands that the README lists."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from test_data import write_pictures
from test_docs import ROOT, blocks_of
from typer.testing import CliRunner

from ecnn import files
from ecnn.cli import app
from ecnn.data import load_data
from ecnn.data.sources import usual_size
from ecnn.recipes import auto_recipe
from ecnn.serving import load_subject, make_app

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSES = ("bars", "checks", "steps")


def draw(name: str, rng: np.random.Generator) -> Image.Image:
    """A striped picture of 12 x 12 pixels: upright, both ways, or level."""
    down, across = np.meshgrid(np.arange(12), np.arange(12), indexing="ij")
    phase = int(rng.integers(4))
    stripes = {"bars": across + phase, "steps": down + phase, "checks": across + down + phase}[name] // 2 % 2
    colour = rng.integers(120, 256, 3)
    noisy = stripes[:, :, None] * colour + rng.integers(0, 60, (12, 12, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def command(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    allowed = (0, 1, 3) if words[0] == "audit" else (0,)
    assert done.exit_code in allowed, done.output
    return done.stdout


def readme_commands() -> dict[str, list[str]]:
    """The commands of the README from a clone to a prediction, by what they do."""
    lines = [shlex.split(line, comments=True) for line in readme_block().splitlines()]
    return {words[1]: words for words in lines}


def readme_block() -> str:
    (block,) = (block for block in blocks_of(ROOT / "README.md") if "ecnn data photos" in block.text)
    return block.text


@pytest.mark.usefixtures("short_audits")
def test_from_three_hundred_pictures_to_a_named_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the commands of the README that follow `make install`, which the next test runs."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in CLASSES:
        Path("photos", name).mkdir(parents=True)
        for number in range(100):
            draw(name, rng).save(Path("photos", name, f"{number}.png"))
    draw("steps", rng).save("new.png")
    commands = readme_commands()
    assert list(commands) == ["install", "data", "train", "audit", "predict"]
    shorter = {
        "train": "--epochs 10 --set model.width=4 --set model.depth=8 --json",  # a second
        "audit": "--limit 1 --json",
    }
    said = {
        name: command(*words[1:], *shorter.get(name, "").split())
        for name, words in commands.items()
        if words[0] == "ecnn"
    }
    assert "300 images of 3 classes" in said["data"]
    run = json.loads(said["train"])
    assert run["test_images"] == 60
    assert run["test_accuracy"] > 0.9
    assert json.loads(said["audit"])["images"] == 1
    assert said["predict"].startswith("new.png  steps ")
    for name in CLASSES:
        draw(name, rng).resize((40, 30), Image.Resampling.NEAREST).save("new.jpg", quality=95)
        (shown,) = json.loads(command("predict", "runs/photos", "new.jpg", "--json"))["predictions"]
        assert shown["guesses"][0]["name"] == name
    assert command("predict", "runs/photos", "new.jpg").startswith("new.jpg  steps ")
    with TestClient(make_app(load_subject("runs/photos")), base_url="http://localhost") as client:
        answer = client.post("/v1/predict", files={"images": Path("new.jpg").read_bytes()}).json()
        assert answer["predictions"][0]["guesses"][0]["name"] == "steps"


@pytest.mark.full
def test_make_install_and_activate_give_the_command(tmp_path: Path) -> None:
    """The first command of the README as it stands there, in a copy of the project, and then the second.

    Without an index: packages are found where this test runs, so none is downloaded. pip checks that all of them are
    there as the project asks, builds the project, and installs it with its command.
    """
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    write_pictures(tmp_path / "photos", {"car": 5, "dog": 5}, size=(8, 8))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    (packages,) = tmp_path.glob(".venv/lib/python*/site-packages")
    (packages / "found.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (install,) = (line for line in readme_block().splitlines() if line.startswith("make install"))
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "TORCH": f"torch=={version('torch')}"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
    shown = install.partition("#")[0] + "&& ecnn data photos && command -v ecnn"
    done = subprocess.run(
        ["bash", "-c", shown], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "10 images of 2 classes" in done.stdout
    assert done.stdout.splitlines()[-1] == str(tmp_path / ".venv/bin/ecnn")
    where = [str(tmp_path / ".venv/bin/python"), "-c", "import ecnn; print(ecnn.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(tmp_path / "src/ecnn/__init__.py")


def test_the_recipe_follows_from_the_number_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for images, batch_size, epochs in (
        (1, 1, 200),
        (20, 8, 200),
        (216, 16, 62),
        (3000, 256, 73),
        (10**5, 256, 60),
    ):
        made = auto_recipe(images, (32, 32))
        assert (made.batch_size, made.epochs) == (batch_size, epochs)
    assert auto_recipe(100, (8, 8)).shift == 1
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "own", {"a": 12, "b": 12}, size=(8, 8))

    def spec(*words: str) -> dict[str, dict[str, object]]:
        found: dict[str, dict[str, object]] = json.loads(command("train", *words, "--dry-run"))
        return found

    code = ("--set", "code.code_length=3", "--set", "code.steps=100")
    own = spec("--data", "own", *code)
    assert (own["train"]["batch_size"], own["model"]["batch_norm"]) == (8, True)
    assert (
        spec("--data", "own", "--recipe", "paper", "--batch-size", "4", *code)["model"]["batch_norm"] is False
    )
    assert spec("--data", "own", "--set", "model.batch_norm=false", *code)["model"]["batch_norm"] is False
    assert (
        spec("--data", "digits")["train"]["batch_size"] == 32
    )  # a dataset with a name keeps what was tuned for it
    files.write_toml("again.toml", own)
    assert spec("--spec", "again.toml") == own


def test_sizes_are_kept_only_if_they_are_one_and_small(tmp_path: Path) -> None:
    write_pictures(tmp_path / "same", {"a": 3, "b": 3}, size=(24, 20))
    assert usual_size(tmp_path / "same") is None
    assert load_data(tmp_path / "same", image_size="auto").image_size == (24, 20)
    write_pictures(tmp_path / "large", {"a": 3, "b": 3}, size=(80, 20))
    assert load_data(tmp_path / "large", image_size="auto").image_size == (32, 32)
    write_pictures(tmp_path / "same" / "a", {".": 1}, size=(24, 21))
    assert load_data(tmp_path / "same", image_size="auto").image_size == (32, 32)
    (tmp_path / "same" / "a" / "zz.png").write_bytes(b"damaged")
    assert usual_size(tmp_path / "same") == (32, 32)  # the reader says what is wrong with it
