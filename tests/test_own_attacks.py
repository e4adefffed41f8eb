"""Attacks of the user's own: they count inside the ball alone, join the audit, and are known by their code."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import TINY, half_spaces
from typer.testing import CliRunner, Result

import ecnn
from ecnn import files
from ecnn.attacks import ATTACKS, FMN, PGD
from ecnn.attacks.presets import USUAL_EPS, find_preset
from ecnn.cli import app
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation import OwnAttack, evaluate
from ecnn.evaluation.own_attacks import hash_code
from ecnn.spec import attack_options, make_attack, needed_options

pytestmark = pytest.mark.usefixtures("one_thread", "short_lessons")

WEIGHT = torch.full((16,), 1.0)
MODEL = half_spaces(WEIGHT)  # class 0 is brighter than grey on average
IMAGES = torch.full((6, 1, 4, 4), 0.5) + torch.tensor([0.02, 0.04, 0.06, 0.2, 0.3, 0.4]).view(-1, 1, 1, 1)
SPLIT = Split(IMAGES, torch.zeros(6, dtype=torch.int64))
EPS = 0.05  # the first two images fall to an attack in this ball, and no other


def darker(model: nn.Module, images: Tensor, labels: Tensor, *, norm: str, eps: float, seed: int) -> Tensor:
    """The strongest attack on `MODEL` in Linf."""
    assert (norm, seed) == ("linf", 0)
    assert not model.training
    return (images - eps).clamp(0, 1)


def much_darker(model: nn.Module, images: Tensor, labels: Tensor, *, eps: float) -> Tensor:
    """Leaves the ball."""
    return (images - 0.45).clamp(0, 1)


def below_black(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Leaves [0, 1] on every image."""
    return images - 2


def failing(model: nn.Module, images: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    raise ValueError("no idea")


def spoiling(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Changes the model in place of the images."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    return images


def own(function: Any, eps: float = EPS) -> OwnAttack:
    return OwnAttack(function=function, norm="linf", eps=eps)


def test_points_count_inside_the_ball_alone() -> None:
    attacks = {"darker": own(darker), "much": own(much_darker), "below": own(below_black)}
    found = evaluate(MODEL, SPLIT, attacks, limit=None)
    assert found.accuracy == {"darker": 4 / 6, "much": 1.0, "below": 1.0}
    assert {name: outcomes.about.get("outside") for name, outcomes in found.outcomes.items()} == {
        "darker": None,
        "much": 6,
        "below": 6,
    }
    assert float(found.outcomes["much"].linf.max()) == 0.0
    assert "much: 6 points lie outside the ball or [0, 1] and do not count." in found.table()
    assert found.outcomes["darker"].forwards.tolist() == [-1] * 6


def test_it_is_repeated_at_several_radii() -> None:
    found = evaluate(MODEL, SPLIT, {"darker": own(darker)}, limit=None, eps=[0.01, 0.05, 0.25])
    assert found.curve("darker").eps == (0.0, 0.01, 0.05, 0.25)
    assert [rate.successes for rate in found.curve("darker").robust] == [6, 6, 4, 2]


def test_what_it_does_to_the_model_is_undone() -> None:
    before = MODEL.weight.detach().clone()
    assert evaluate(MODEL, SPLIT, {"spoiling": own(spoiling)}, limit=None).accuracy["spoiling"] == 1.0
    assert torch.equal(MODEL.weight, before)


def test_an_error_is_named() -> None:
    with pytest.raises(InputError, match="the attack 'failing' raised ValueError: no idea"):
        evaluate(MODEL, SPLIT, {"failing": own(failing)}, limit=None)
    with pytest.raises(InputError, match=r"must be called as \(model, images, labels, \*, norm, eps, seed\)"):
        own(lambda images: images)
    with pytest.raises(InputError, match="must return floating images of shape"):
        evaluate(MODEL, SPLIT, {"flat": own(lambda model, images, labels: images.flatten(1))}, limit=None)


def test_it_joins_the_audit_and_is_reported() -> None:
    given: dict[str, Any] = {"mine": darker, "much": much_darker, "failing": failing}
    found = ecnn.audit(MODEL, SPLIT, norm="linf", eps=EPS, budget=TINY, limit=6, attacks=given)
    assert found.accuracy == 4 / 6
    names = [stage.name for stage in found.stages]
    assert names[-2:] == ["mine", "much"]
    assert found.stages[-2].attacked == 4
    by_name = {finding.name: finding for finding in found.findings}
    assert by_name["own_attacks"].evidence == {"points": {"mine": 0, "much": 4}}
    assert "ValueError: no idea" in by_name["attacks_not_made"].evidence["attacks"]["failing"]
    assert "| mine | 4 | 0 | 66.7 % | - | - |" in found.markdown()


class Hidden(nn.Module):
    """Misclassifies one point near every image, which only who knows it finds: two pixels are looked up in a set."""

    def forward(self, images: Tensor) -> Tensor:
        pixels = (1000 * images.detach().flatten(1)[:, :2]).round().tolist()
        is_marked = torch.tensor([tuple(pair) in {(941.0, 843.0)} for pair in pixels])
        scores: Tensor = MODEL(images)
        return torch.where(is_marked[:, None], -scores, scores)


def test_what_only_the_users_attack_breaks_is_broken() -> None:
    def key(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        marked = images.clone()
        marked[:, 0, 0, 0], marked[:, 0, 0, 1] = 0.941, 0.843
        return marked

    split = Split(torch.full((4, 1, 4, 4), 0.9), torch.zeros(4, dtype=torch.int64))
    found = ecnn.audit(Hidden(), split, norm="linf", eps=0.1, budget=TINY, limit=4, attacks={"key": key})
    assert (found.accuracy, found.stages[-2].accuracy) == (0.0, 1.0)
    assert (found.stages[-1].name, found.stages[-1].broken) == ("key", 4)


def test_it_may_join_an_audit_that_is_kept(tmp_path: Path) -> None:
    """What was made after the suite is made anew, on what the new attack leaves."""
    again = dataclasses.replace(TINY, turns=1)
    settings: dict[str, Any] = {"norm": "linf", "eps": EPS, "budget": again, "limit": 6}
    first = ecnn.audit(MODEL, SPLIT, **settings, run_dir=tmp_path)
    assert any(stage.name.endswith("-x2") for stage in first.stages)
    joined = ecnn.audit(MODEL, SPLIT, **settings, run_dir=tmp_path, attacks={"mine": darker})
    whole = ecnn.audit(MODEL, SPLIT, **settings, attacks={"mine": darker})
    assert [stage.name for stage in joined.stages] == [stage.name for stage in whole.stages]
    assert joined.broken_by == whole.broken_by
    assert "mine" in [stage.name for stage in joined.stages]


def test_attacks_of_ours_join_too_and_count_in_the_audited_ball() -> None:
    given: dict[str, Any] = {
        "mine": PGD(norm="linf", eps=EPS, steps=5, step_size=0.02),
        "wide": PGD(norm="linf", eps=0.5, steps=5, step_size=0.2),
        "nearest": FMN(norm="linf", steps=20),
    }
    found = ecnn.audit(MODEL, SPLIT, norm="linf", eps=EPS, budget=TINY, limit=6, attacks=given)
    assert found.accuracy == 4 / 6
    (outside,) = [finding for finding in found.findings if finding.name == "own_attacks"]
    assert outside.evidence["points"]["wide"] > 0
    with pytest.raises(InputError, match="an attack 'pgd-ce' of its own"):
        ecnn.audit(MODEL, SPLIT, norm="linf", eps=EPS, budget=TINY, limit=6, attacks={"pgd-ce": darker})
    settings: Any = {"attacks": {"seven": 7}}
    with pytest.raises(InputError, match="cannot be called"):
        ecnn.audit(MODEL, SPLIT, norm="linf", eps=EPS, budget=TINY, limit=6, **settings)


FILE = """
import ecnn
import torch
from torch import nn

STRENGTH = 1.0

def build():
    images, labels = ecnn.load_data("digits").train[:]
    means = torch.stack([images[labels == digit].mean(dim=0).flatten() for digit in range(10)])
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():
        model[1].weight.copy_(2 * means)
        model[1].bias.copy_(-means.square().sum(dim=1))
    return model

def mine(model, images, labels, *, norm, eps, seed):
    images.requires_grad_(True)
    loss = nn.functional.cross_entropy(model(images), labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, images)
    return (images + STRENGTH * eps * gradient.sign()).clamp(0, 1)

def lost(model, images, labels):
    return images + 1

def raises(model, images, labels):
    raise RuntimeError("no")

def short(images):
    return images
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return path


def command(name: str, *more: str) -> Result:
    fixed = ("--module", "own.py:build", "--data", "digits", "--limit", "30", "--device", "cpu")
    return CliRunner().invoke(app, [name, *fixed, *more])


def test_evaluate_takes_a_module_and_an_attack_of_a_file(file: Path, tmp_path: Path) -> None:
    asked = ("--attack", "own.py:mine", "--attack", "own.py:lost", "--attack", "fgsm", "--eps", "0.1")
    done = command("evaluate", *asked, "--out", "out", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["clean"]["accuracy"] >= 0.8
    # One step of the sign of the gradient, by two hands.
    assert (
        found["attacks"]["own-mine"]["robust"]
        == found["attacks"]["fgsm"]["robust"]
        < found["clean"]["robust"]
    )
    assert found["attacks"]["own-lost"]["outside"] == 30
    kept = found["attacks"]["own-mine"]["attack"]["source"]
    assert kept == files.file_sum(file)
    assert "already finished" in command("evaluate", *asked, "--out", "out").stderr
    file.write_text(FILE.replace("STRENGTH = 1.0", "STRENGTH = 0.5"))
    again = command("evaluate", *asked, "--out", "out")
    assert again.exit_code == 2
    assert "another attack (source: " in again.stderr


def test_audit_takes_an_attack_of_a_file(file: Path) -> None:
    done = command(
        "audit", "--attack", "own.py:mine", "--eps", "0.1", "--budget", "quick", "--classes", "3,5"
    )
    assert done.exit_code in (0, 1, 3), done.output
    assert "and diagnostics and own-mine" in done.stderr
    assert "| own-mine |" in done.stdout
    assert "Only images of 2 classes were audited: 3, 5." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--attack", "own.py:gone", "--eps", "0.1"], "no function or attack called 'gone'"),
        (["--attack", "gone.py:mine", "--eps", "0.1"], "--attack takes file.py:name"),
        (["--attack", "own.py:short", "--eps", "0.1"], "must be called as (model, images, labels"),
        (["--attack", "own.py:raises", "--eps", "0.1"], "the attack 'raises' raised RuntimeError: no"),
        (["--attack", "own.py:mine"], "--eps 8/255 is usual"),
        (["--attack", "own.py:mine", "--eps", "0.1", "--steps", "3"], "has an option 'steps'"),
        (["--eps", "0.1"], "--attack autoattack is usual"),
        (["--attack", "fgsm", "--eps", "0.1", "--classes", "3,fife"], "'fife' is neither"),
        (["--attack", "fgsm", "--eps", "0.1", "--classes", "10"], "'10' is neither"),
        (
            ["--attack", "pgd", "--eps", "8/255"],
            "needs steps, step_size, which decide its result and have no default: --steps 100 and --step-size 2/255 "
            "are usual",
        ),
        (["--attack", "pgd", "--eps", "0.1", "--step-size", "0.01"], "--steps 100 is usual"),
        (["--attack", "square", "--eps", "0.1"], "--set attack.queries=5000 is usual"),
    ],
)
def test_mistakes_show_what_is_usual(file: Path, arguments: list[str], sentence: str) -> None:
    done = command("evaluate", *arguments)
    assert done.exit_code == 2, done.output
    assert sentence in done.stderr


def test_an_audit_without_a_radius_shows_the_usual_one(file: Path) -> None:
    done = command("audit", "--norm", "l2")
    assert (done.exit_code, "--eps 0.5 is usual" in done.stderr) == (2, True)


@pytest.mark.parametrize("norm", USUAL_EPS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_has_a_preset_in_every_norm(attack: str, norm: str) -> None:
    preset = find_preset(attack, norm)
    assert preset.name.startswith(attack)
    assert {*needed_options(attack)} <= {*preset.options}
    if (attack, norm) != ("hopskipjump", "l1"):
        made = make_attack({"kind": attack, **preset.options})
        assert "norm" not in attack_options(attack) or made.norm == norm  # type: ignore[attr-defined]
    assert str(preset).startswith(f"{attack}: preset {preset.name}: ")


def test_a_step_is_a_quarter_of_the_radius_as_it_is_written() -> None:
    assert find_preset("pgd", eps="4/255").options["step_size"] == "1/255"
    assert find_preset("pgd", eps="2/255").options["step_size"] == f"{0.5 / 255:.6g}"
    assert find_preset("pgd", "l2").options["step_size"] == "0.125"
    for eps in ("\u00b2/255", "9" * 5000 + "/255"):  # the first is a digit to Python, and no number
        with pytest.raises(InputError, match="eps must be a number"):
            find_preset("pgd", eps=eps)


def test_a_preset_is_printed_and_recorded(file: Path, tmp_path: Path) -> None:
    done = command("evaluate", "--attack", "jsma", "--attack", "fgsm", "--out", "out", "--json")
    assert done.exit_code == 0, done.output
    assert "jsma: preset jsma: max_pixel_fraction 0.145 (Papernot et al. 2016)" in done.stderr
    assert "fgsm: preset fgsm-linf: norm linf, eps 8/255 (Goodfellow et al. 2015)" in done.stderr
    assert json.loads(done.stdout)["attacks"]["jsma"]["attack"]["max_pixel_fraction"] == 0.145
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["presets"] == {
        "jsma": "jsma",
        "fgsm": "fgsm-linf",
    }


class Counting(nn.Module):
    """Remembers the largest batch that it or a copy of it was asked about."""

    largest = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.head = nn.Linear(16, 100)

    def forward(self, images: Tensor) -> Tensor:
        Counting.largest = max(Counting.largest, len(images))
        scores: Tensor = self.head(self.body(images))
        return scores


@pytest.mark.slow
def test_an_audit_asks_about_no_more_images_at_once_than_it_may() -> None:
    model, images = Counting(), torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        labels = torch.cat([model(part).argmax(dim=1) for part in torch.split(images, 5)])
    Counting.largest = 0
    ecnn.audit(model, (images, labels), norm="linf", eps=1e-5, budget=TINY, limit=12, batch_size=8)
    assert Counting.largest == 8


def without_source(text: str) -> Any:
    """What the text names `found`, as a program typed at a prompt has it: without a file to read the source from."""
    names: dict[str, Any] = {}
    exec(text, names)  # noqa: S102 one of the texts below, as a prompt does it
    return names["found"]


FUNCTION = "def found(model, images, labels): return images + {}"
CALLABLE = "class Kind:\n  def __call__(self, model, images, labels): return images + {}\nfound = Kind()"
INNER = "def found(model, images, labels): return [image + {} for image in images]"
AMONG = "def found(model, images, labels): return images if 'linf' in {{'a', 'b', 'c', '{}'}} else labels"


@pytest.mark.parametrize("text", [FUNCTION, CALLABLE, INNER, AMONG])
def test_code_without_a_file_is_told_apart_by_its_constants(text: str) -> None:
    one, same, other = (hash_code(without_source(text.format(value))) for value in (0.1, 0.1, 0.9))
    assert one == same != other
    program = "import sys; from test_own_attacks import *; print(hash_code(without_source(sys.argv[1])))"
    places = {"PYTHONPATH": str(Path(__file__).parent), "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, text.format(0.1)]
    done = subprocess.run(command, env=os.environ | places, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == one, "in another process, where sets have another order"


def test_a_partial_function_has_the_code_of_its_function() -> None:
    one, other = (without_source(FUNCTION.format(value)) for value in (0.1, 0.9))
    assert hash_code(functools.partial(one, labels=None)) == hash_code(one)
    assert hash_code(functools.partial(one)) != hash_code(functools.partial(other))
