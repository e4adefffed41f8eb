"""`ecnn audit` as a person uses it: any torch module, exit statuses, files, sentences instead of tracebacks."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from processes import run
from test_data import write_pictures
from typer.testing import CliRunner, Result

from ecnn import files, runs
from ecnn.cli import app
from ecnn.data import load_data
from ecnn.pipeline import load_module

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


def raises():
    raise RuntimeError("the weights are gone")


def ends():
    raise SystemExit(1)


def for_colour_images():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


def for_many():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 11))


def for_five_classes():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


class Needy(nn.Module):
    def __init__(self, size):
        super().__init__()


class Answering:
    def __init__(self):
        self.network = build()

    def __call__(self, images):
        return self.network(images)


network = build()
answering = Answering()
by_function = lambda images: network(images)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def audit(own: Path, *more: str) -> tuple[str, ...]:
    fixed = ("--data", "digits", "--eps", "0.1", "--budget", "quick", "--limit", "40")
    return ("audit", "--module", f"{own}:build", *fixed, *more)


@pytest.mark.usefixtures("one_thread", "short_lessons")
def test_a_false_claim_about_a_module_of_ones_own(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, audit(own, "--claim", "0.9", "--out", "audited", "--json"))
    assert done.exit_code == 1, done.stderr
    assert "images forward" in done.stderr.splitlines()[0]
    found = json.loads(done.stdout)
    assert (found["verdict"], found["claimed"], found["exit_code"]) == ("not believable", 0.9, 1)
    assert found["accuracy"] < 0.6 < 0.8 < found["clean_accuracy"]
    written = tmp_path / "audited"
    assert files.read_json(written / "audit.json") == found
    assert (written / "audit.md").read_text().startswith("# Audit: not believable")
    assert (written / "audit.png").read_bytes().startswith(b"\x89PNG")
    # The same audit of an honest claim, that 40 images can tell from a false one, goes on with what is there.
    modest = max(0.0, found["accuracy"] - 0.15)
    again = CliRunner().invoke(app, audit(own, "--claim", str(modest), "--out", "audited"))
    assert again.exit_code == 0, again.stdout + again.stderr
    assert again.stdout.startswith("# Audit: believable")
    assert "auditing: pgd-ce: " in again.stderr  # a line per attack, where there is no terminal


def test_the_cost_comes_first(own: Path, tmp_path: Path) -> None:
    done = run(*audit(own, "--dry-run"), cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == ""
    assert done.stderr.startswith("at most ")


@pytest.mark.parametrize("classes", ["\u00b2", "3,10", "-1", "9" * 5000, "zero", ""])
def test_classes_are_numbers_or_names(own: Path, classes: str) -> None:
    done = CliRunner().invoke(app, audit(own, "--dry-run", "--classes", classes))
    assert done.exit_code == 2, done.stderr
    assert done.stderr.startswith("ecnn: --classes takes numbers from 0 to 9, or names, with commas")
    assert CliRunner().invoke(app, audit(own, "--dry-run", "--classes", "3, 05")).exit_code == 0


WRONG_MODULES = {
    "own.py:missing": "no function or model called 'missing'",
    "own.py:number": "must return a torch module, not int",
    "other.py:build": "file.py:name",
    "own.py:Needy": "needs arguments",
    "own.py:for_five_classes": "a label is",
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"--module": None}, "give either a run folder"),
        ({"--data": None}, "needs --data"),
        *(({"--module": module}, sentence) for module, sentence in WRONG_MODULES.items()),
        ({"--claim": "72"}, "claim (such as 0.72 for 72 %)"),
        ({"--min-accuracy": "50"}, "min_accuracy (such as 0.72 for 72 %)"),
        ({"--limit": "0"}, "limit must be"),
        ({"--seed": "-1"}, "seed must be"),
        ({"--budget": "endless"}, "budget must be one of quick, fast, standard, thorough"),
        ({"--eps": "many"}, "eps must be"),
        ({"--norm": "l7"}, "norm must be"),
        ({"--eps": "8"}, 'did you mean "8/255"?'),
        ({"--batch-size": "0"}, "batch_size must be"),
        ({"--cluster": "dask"}, "cluster must be ray"),
        ({"--minutes": "-1"}, "minutes must be"),
        ({"--out": "own.py"}, "own.py"),
    ],
)
def test_what_cannot_be_audited_is_said_in_a_sentence(
    own: Path, change: dict[str, str | None], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    done = dry_run(change)
    assert done.exit_code == 2, done.output
    assert done.stderr.splitlines()[-1].startswith("ecnn: ")
    assert sentence in done.stderr


def dry_run(change: dict[str, str | None]) -> Result:
    """`ecnn audit --dry-run` with options that differ from the usual ones; a value of None leaves one out."""
    options = {
        "--module": "own.py:build",
        "--data": "digits",
        "--eps": "0.1",
        "--budget": "quick",
        "--limit": "4",
    }
    given = [
        part for name, value in {**options, **change}.items() if value is not None for part in (name, value)
    ]
    return CliRunner().invoke(app, ["audit", "--dry-run", *given])


@pytest.mark.parametrize("name", ["build", "network", "answering", "Answering", "by_function"])
def test_a_module_is_an_instance_a_function_or_what_returns_one(
    own: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    done = dry_run({"--module": f"own.py:{name}"})
    assert done.exit_code == 0, done.output
    images, labels = load_data("digits").test[:200]
    right = (load_module(f"own.py:{name}").eval()(images).argmax(dim=1) == labels).double().mean()
    assert right > 0.8


def test_classes_that_are_numbers_in_the_order_of_text_are_told(own: Path, tmp_path: Path) -> None:
    """A model that was trained on numbers would be counted wrong on "10", which is the third class as text."""
    write_pictures(tmp_path / "own", {str(number): 2 for number in range(11)}, size=(8, 8), mode="L")
    words = ["evaluate", "--module", f"{own}:for_many", "--data", str(tmp_path / "own"), "--attack", "none"]
    for asked in (["data", str(tmp_path / "own")], words):
        done = CliRunner().invoke(app, asked)
        assert done.exit_code == 0, done.output
        assert "'10' is class 2; call them 00, 01, ..." in done.output
    for number in range(10):
        (tmp_path / "own" / str(number)).rename(tmp_path / "own" / f"0{number}")
    assert "numbered" not in CliRunner().invoke(app, words).output


@pytest.mark.parametrize("words", ["audit --eps 0.1 --budget quick", "evaluate --attack fgsm"])
def test_the_folder_of_another_model_is_refused(own: Path, tmp_path: Path, words: str) -> None:
    """Its report would show what was found of this one."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("spec.toml", "model.safetensors"):
        shutil.copy(runs.zoo_folder("mnist-ecnn30") / name, run)
    asked = [
        *words.split(),
        "--module",
        f"{own}:build",
        "--data",
        "digits",
        "--limit",
        "1",
        "--out",
        str(run),
    ]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 2
    assert "is the run folder of another model: choose another folder" in done.stderr
    assert len(list(run.iterdir())) == 2


def test_a_file_imports_those_beside_it_and_may_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where `python file.py` is started; what it prints is not mixed with the result."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_network_parts.py").write_text("from torch import nn\n\nlinear = nn.Linear(64, 10)\n")
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nfrom my_network_parts import linear\n\n\ndef build():\n    print('loading')\n"
        "    return nn.Sequential(nn.Flatten(), linear)\n\n\ndef make(width):\n    return build()\n\n\n"
        "def spoken(images):\n    print('asked')\n    return build()(images)\n"
    )
    words = ["evaluate", "--data", "digits", "--limit", "2", "--attack", "none", "--json", "--module"]
    for name, said in (("build", "loading"), ("spoken", "asked")):
        done = CliRunner().invoke(app, [*words, f"{tmp_path / 'mine.py'}:{name}"])
        assert json.loads(done.stdout)["attacks"]
        assert said in done.stderr
    for name, sentence in (
        ("make", "make in .*mine.py was given images and returned a model: .* must need no arguments"),
        ("bild", "has no function or model called 'bild'; did you mean 'build'?"),
    ):
        done = CliRunner().invoke(app, [*words, f"{tmp_path / 'mine.py'}:{name}"])
        assert done.exit_code == 2
        assert re.search(sentence, done.stderr)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        ("own.py:raises", "RuntimeError: the weights are gone"),
        ("own.py:ends", "SystemExit: 1"),
        ("own.py:for_colour_images", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("own.py:for_colour_images", "The model was given images of 1 x 8 x 8 (channel, height, width)"),
        ("broken.py:build", "SyntaxError"),
        ("lost.py:build", "ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_a_fault_of_the_model_is_no_verdict(
    own: Path, module: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found before the cost is paid."""
    monkeypatch.chdir(own.parent)
    Path("broken.py").write_text("def build(:\n")
    Path("lost.py").write_text("import nowhere\n")
    done = dry_run({"--module": module})
    assert done.exit_code == 4
    assert done.stdout == ""
    (said,) = done.stderr.splitlines()
    assert said.startswith("ecnn: the machine or the model failed: ")
    assert sentence in said
