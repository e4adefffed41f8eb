"""Baselines trained by name, as the command line does it: accuracy, run folders, resuming, refusals."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import RING, SMALL, count
from typer.testing import CliRunner

import ecnn
from ecnn import files
from ecnn.attacks import PGD
from ecnn.backbones import ResNet
from ecnn.baselines import (
    ADPObjective,
    EMPIRObjective,
    FeatureSqueezing,
    Specialists,
    SpecialistsObjective,
    TanhEnsemble,
    TanhEnsembleObjective,
    TRADESObjective,
    confusion_sets,
    count_confusions,
)
from ecnn.cli import app
from ecnn.data import Dataset, Split
from ecnn.data.sources import FORMS
from ecnn.errors import InputError
from ecnn.models import MODELS, OBJECTIVES, RECIPES, objective_of, resolve_recipe, spell_out
from ecnn.objectives import MemberObjective, make_objective, score_margin
from ecnn.pipeline import Plan, TrainedRun, plan, train_run
from ecnn.recipes import Recipe
from ecnn.runs import load_model
from ecnn.spec import Spec
from ecnn.training import fit
from ecnn.training.loop import accuracy

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = 0.1
FAST: dict[str, Any] = {"epochs": 4, "batch_size": 64, "lr": 0.02, "ema": 0.9, "shift": 0}
RECIPE = Recipe(epochs=5, batch_size=32, optimizer="adam", lr=1e-2, schedule="onecycle")
WITH_BATCH_NORM: dict[str, Any] = {"depth": 8, "width": 4, "feature_dim": 8, "batch_norm": True}
#: model -> options that make it small
SIZES: dict[str, dict[str, Any]] = {
    "ecnn": WITH_BATCH_NORM,
    "resnet": {"depth": 8, "width": 4},
    "multiscale": {"width": 8, "hidden": 32},
    "adp": {"depth": 8, "width": 4},
    "tanh_ensemble": {},
    "independent_ecoc": WITH_BATCH_NORM,
    "specialists": {"sets": RING, **SMALL},
    "feature_squeezing": {"depth": 8, "width": 4},
    "empir": {"depth": 8, "width": 8},
}


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return ecnn.load_data("digits")


def spec_of(kind: str, data: str = "digits", **changes: Any) -> Spec:
    """A spec by its tables; `objective` is short for settings of the objective."""
    options = changes.pop("objective", None)
    train = {**changes.pop("train", {}), **({} if options is None else {"objective_options": options})}
    model = {"kind": kind, **changes.pop("model", {})}
    return Spec.from_dict({"data": {"name": data}, "model": model, "train": train, **changes})


def small(kind: str, **changes: Any) -> Spec:
    """The same, small and fast."""
    code: dict[str, Any] = {"code": {"name": "10x10"}} if kind in ("ecnn", "independent_ecoc") else {}
    model = {**SIZES[kind], **changes.pop("model", {})}
    train = {**FAST, **changes.pop("train", {})}
    return spec_of(kind, model=model, train=train, **code, **changes)


def train_small(spec: Spec, out: Path) -> TrainedRun:
    return train_run(spec, out=out, device="cpu")


def attacked(model: nn.Module, data: Dataset, *, images: int = 50, **options: Any) -> float:
    attack = PGD(norm="linf", eps=EPS, steps=10, step_size=0.02, **options)
    return accuracy(model, data.test.take(images), attack=attack)


def mean_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """What raises the error of all members at once, whoever votes for whom."""
    anything: Any = model
    return -score_margin(anything.mean_scores(images), labels)


VIEWS: dict[str, tuple[Any, ...]] = {
    "ecnn": ("scores", "linear", "tempered", "members"),
    "independent_ecoc": ("scores", "linear", "tempered", "members"),
    "tanh_ensemble": ("scores", "linear", "tempered", "members"),
    "specialists": ("scores", mean_loss),
    "empir": ("scores", mean_loss),
}


#: Committees of many networks: each is trained for an epoch by the quick forms of experiments, or by tests of its own.
LONGEST = ("specialists", "independent_ecoc")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.full] * (kind in LONGEST)) for kind in MODELS],
)
def test_every_model_learns_digits_by_name(kind: str, digits: Dataset, tmp_path: Path) -> None:
    """At least 90 % of the test digits after four epochs, the same scores from its folder, and PGD breaks it."""
    run = train_small(small(kind), tmp_path)
    assert run.test_accuracy >= 0.9
    model = load_model(tmp_path)
    assert accuracy(model, digits.test) == run.test_accuracy
    again = train_small(small(kind), tmp_path)  # it is finished: nothing is trained, and nothing is refused
    assert (again.test_accuracy, again.best_epoch) == (run.test_accuracy, run.best_epoch)
    images, _ = digits.test[:50]
    assert torch.equal(load_model(tmp_path)(images), model(images))
    for view in VIEWS.get(kind, ("scores",)):
        assert attacked(model, digits, on=view) <= run.test_accuracy - 0.2, view
    if kind == "adp":
        with pytest.raises(InputError, match="has no members"):
            attacked(model, digits, on="members")
    if isinstance(model, FeatureSqueezing):
        validation, test = digits.val[:][0], digits.test[:][0]
        assert int(model.flags(validation).sum()) == math.floor(0.05 * len(validation))
        assert float(model.flags(test).float().mean()) <= 0.15


@pytest.mark.slow
def test_trades_and_adversarial_training_make_digits_robust(digits: Dataset, tmp_path: Path) -> None:
    """At least 90 % clean, and 20 points more under attack than without them; both choose the epoch under attack."""
    attack = {"norm": "linf", "eps": "0.1", "steps": 2, "step_size": 0.05, "loss": "cross_entropy"}
    wide, longer = {"width": 6}, {"epochs": 5}
    train_small(small("resnet", model=wide, train=longer, seed=2), tmp_path / "plain")
    plain = attacked(load_model(tmp_path / "plain"), digits, images=200)
    kinds: dict[str, dict[str, Any]] = {"attack": {}, "trades": {"objective": "trades"}}
    for name, train in kinds.items():
        folder = tmp_path / name
        spec = small("resnet", model=wide, train={**longer, **train, "attack": attack}, seed=2)
        run = train_small(spec, folder)
        assert run.test_accuracy >= 0.9
        assert attacked(load_model(folder), digits, images=200) >= plain + 0.2
        log = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
        robust = [record["val_robust_accuracy"] for record in log]
        assert run.best_epoch == max(epoch for epoch, value in enumerate(robust) if value == max(robust))
        assert run.val_accuracy == max(robust)
        assert any(record["val_accuracy"] != record["val_robust_accuracy"] for record in log)


@pytest.mark.slow
def test_confusions_of_a_trained_network_make_specialists(digits: Dataset) -> None:
    torch.manual_seed(0)
    network = ResNet(10, 1, depth=8, width=4, mean=digits.mean_image)
    fit(network, digits.train, val=digits.val, recipe=RECIPE, objective="cross_entropy", seed=0)
    images, labels = digits.val[:]
    attack = PGD(norm="linf", eps=0.3, steps=5, step_size=0.1, loss="cross_entropy", keep="last")
    counts = count_confusions(network, images, labels, lambda model, x, y: attack(model, x, y), batch_size=50)
    right = network(images).argmax(dim=1) == labels
    assert counts.sum(axis=1).tolist() == torch.bincount(labels[right], minlength=10).tolist()
    sets = confusion_sets(counts)
    assert all(index in one and 2 <= len(one) <= 9 for index, one in enumerate(sets))
    assert count(Specialists(10, 1, sets=sets, **SMALL)) == 21 * count(ResNet(10, 1, **SMALL))


# What is chosen for a model and its data


def stand_in(name: str) -> Dataset:
    """One random image per class, with the shape of the dataset."""
    _, _, _, channels, size = FORMS[name]
    images = torch.randint(256, (10, channels, size, size), dtype=torch.uint8)
    split = Split(images, torch.arange(10))
    mirrored = name not in ("mnist", "gtsrb", "digits")
    return Dataset(name, split, split, split, tuple(map(str, range(10))), may_be_mirrored=mirrored)


def planned(kind: str, data: str, **changes: Any) -> Plan:
    return plan(spec_of(kind, data, **changes), stand_in(data))


@pytest.mark.parametrize(
    ("kind", "data", "train", "model"),
    [
        (
            "adp",
            "cifar10",
            {"epochs": 200, "batch_size": 64, "optimizer": "adam", "lr": 1e-3, "weight_decay": 2e-4}
            | {"schedule": "steps", "objective": "adp", "objective_options": {"alpha": 2.0, "beta": 0.5}}
            | {"shift": 3, "flip": True},
            {"num_members": 3, "depth": 20, "width": 16, "batch_norm": True},
        ),
        ("adp", "mnist", {"epochs": 40, "batch_size": 64, "schedule": "steps", "flip": False}, {"depth": 20}),
        (
            "tanh_ensemble",
            "cifar10",
            {"epochs": 400, "batch_size": 200, "optimizer": "adam", "lr": 2e-4, "schedule": "constant"}
            | {"objective_options": {"noise": 0.032, "blend": 0.032, "rotation": 15.0, "margin": 1.0}}
            | {"weight_decay": 0.0, "flip": True},
            {"filters": [32, 64, 128], "bit_filters": 16, "batch_norm": True, "image_size": [32, 32]},
        ),
        (
            "tanh_ensemble",
            "mnist",
            {"epochs": 150, "batch_size": 200, "lr": 3e-4, "flip": False, "shift": 0}
            | {"objective_options": {"noise": 0.3, "blend": 0.3, "rotation": 0.0, "margin": 1.0}},
            {"filters": [32, 32, 32], "bit_filters": 4, "batch_norm": False, "image_size": [28, 28]},
        ),
        (
            "feature_squeezing",
            "cifar10",
            {"objective": "cross_entropy", "epochs": 200},
            {"bits": 5, "window": 2},
        ),
        ("feature_squeezing", "mnist", {"flip": False}, {"bits": 1, "window": 2}),
        (
            "empir",
            "cifar10",
            {"objective": "empir", "objective_options": {}},
            {"precisions": [[32, 32], [2, 4], [2, 2]]},
        ),
        (
            "independent_ecoc",
            "cifar10",
            {"objective": "member_hinge", "diversity_weight": 0.1}
            | {"objective_options": {"margin": 1.0, "diversity": "own", "scale": 1.0}},
            {"share_trunk": False, "share_head": False},
        ),
        ("ecnn", "gtsrb", {"objective": "member_hinge", "flip": False}, {"share_head": True}),
        ("adp", "digits", {"epochs": 30, "objective": "adp", "diversity_weight": 0.0}, {}),
    ],
)
def test_what_is_chosen(kind: str, data: str, train: dict[str, Any], model: dict[str, Any]) -> None:
    spec = planned(kind, data).spec
    assert {key: spec.train.get(key, {}) for key in train} == train
    assert {key: spec.model[key] for key in model} == model


def test_published_recipes_count_published_parameters() -> None:
    for kind, data, parameters in (
        ("adp", "cifar10", 819_198),
        ("adp", "mnist", 818_334),
        ("tanh_ensemble", "cifar10", 2_313_104),
        ("tanh_ensemble", "mnist", 401_168),
    ):
        assert count(planned(kind, data).model) == parameters


def test_another_recipe_keeps_the_models_objective() -> None:
    made = planned("adp", "cifar10", train={"recipe": "onecycle"}, objective={"beta": 0.1})
    assert objective_of(made.recipe) == ADPObjective(alpha=2.0, beta=0.1)
    assert resolve_recipe(made.recipe, objective="member_cross_entropy") == RECIPES["onecycle"]
    made = planned("tanh_ensemble", "mnist", train={"recipe": "onecycle"}, objective={"noise": 0.1})
    assert objective_of(made.recipe) == TanhEnsembleObjective(noise=0.1, blend=0.3)
    assert objective_of(planned("ecnn", "cifar10", train={"recipe": "onecycle"}).recipe) == MemberObjective(
        "cross_entropy"
    )
    assert planned("ecnn", "cifar10", train={"recipe": "adp"}).recipe.objective == "member_hinge"
    assert (
        planned("ecnn", "cifar10", train={"objective": "cross_entropy"}).recipe.objective == "cross_entropy"
    )


def test_a_flip_that_was_asked_for_stays() -> None:
    assert not planned("ecnn", "mnist", train={"recipe": "onecycle"}).recipe.flip
    assert planned("ecnn", "mnist", train={"flip": True}).recipe.flip


def test_trades_takes_its_radius_from_the_attack_and_is_judged_by_it() -> None:
    attack: dict[str, Any] = {"norm": "linf", "eps": "8/255", "steps": 10, "step_size": 0.01, "on": "members"}
    attack |= {"loss": "cross_entropy", "keep": "last"}
    trades = {"objective": "trades"}
    whole = {**trades, "recipe": "robust", "attack": attack}
    made = planned("ecnn", "cifar10", train=whole, objective={"beta": 3})
    assert objective_of(made.recipe) == TRADESObjective(eps="8/255", steps=10, step_size=0.01, beta=3)
    assert made.attack is None
    assert made.val_attack == PGD(**attack)
    assert "attack" not in made.spec.train
    assert made.spec.train["val_attack"] == {"kind": "pgd", **attack}
    assert made.spec.train["objective_options"] == {
        "eps": "8/255",
        "steps": 10,
        "step_size": 0.01,
        "beta": 3,
    }
    alone: dict[str, Any] = {"eps": 0.031, "steps": 10, "step_size": 0.007}
    made = planned("resnet", "cifar10", train=trades, objective=alone)
    assert made.val_attack == PGD(norm="linf", loss="cross_entropy", keep="last", on="scores", **alone)
    plain = planned("ecnn", "cifar10", train={"recipe": "robust", "attack": attack})
    assert (plain.attack, plain.val_attack) == (PGD(**attack), None)


def test_every_model_has_objectives_that_exist() -> None:
    needed = {"eps": 0.1, "steps": 1, "step_size": 0.1}, {"noise": 0.1, "blend": 0.1}
    for name in {name for kind in MODELS.values() for name in kind.objectives}:
        options = {"trades": needed[0], "tanh_ensemble": needed[1]}.get(name, {})
        make_objective(name, known=OBJECTIVES, **options)


def test_settings_of_an_objective_are_spelled_out() -> None:
    full = spell_out(resolve_recipe("small"))
    assert full.objective_options == {"margin": 1.0, "diversity": "own", "scale": 1.0}
    assert objective_of(full) == objective_of(RECIPES["small"])
    assert spell_out(full) == full
    assert resolve_recipe("adp", objective="empir").objective_options == {}
    assert resolve_recipe("adp", objective="adp").objective_options == {"alpha": 2.0, "beta": 0.5}


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        (
            "adp",
            {"train": {"objective": "member_hinge"}},
            "adp can be trained by adp, empir, cross_entropy, trades",
        ),
        (
            "resnet",
            {"train": {"objective": "adp"}},
            "resnet can be trained by cross_entropy, trades, not by 'adp'",
        ),
        ("ecnn", {"train": {"objective": "fame"}}, "ecnn can be trained by member_hinge"),
        ("adp", {"objective": {"gamma": 1}}, "'adp' has no option 'gamma'; it has alpha, beta"),
        ("empir", {"objective": {"gamma": 1}}, "it has none"),
        ("adp", {"objective": {"beta": -1}}, "beta must be a number from 0 up"),
        ("ecnn", {"objective": {"diversity_weight": 1}}, "an entry of the recipe itself"),
        ("ecnn", {"objective": {"kind": "hinge"}}, "no option 'kind'"),
        ("adp", {"train": {"diversity_weight": 0.1}}, "the objective 'adp' has no diversity_weight"),
        ("resnet", {"train": {"objective": "trades"}}, "'trades' needs eps, steps, step_size"),
        ("tanh_ensemble", {"objective": {"blend": 2}}, "blend must be a number from 0 to 1"),
        ("tanh_ensemble", {"model": {"filters": [1, 2]}}, "filters three"),
        ("adp", {"model": {"wide": 3}}, "'adp' has no option 'wide'; .* did you mean 'width'"),
        ("feature_squeezing", {"model": {"bits": 0}}, "bits must be"),
        ("specialists", {}, "docs/baselines.md says how to find them"),
        ("specialists", {"model": {"sets": [[0]]}}, "one for each of the 10 classes"),
        ("adp", {"code": {"name": "10x30"}}, "'adp' takes no code"),
        ("independent_ecoc", {"code": {"name": "43x30"}}, "has 43 classes"),
        ("adq", {}, "model.kind must be one of ecnn, resnet, .*did you mean .adp."),
        ("adp", {"train": {"recipe": "adq"}}, "recipe must be one of paper"),
    ],
)
def test_refusals(kind: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        planned(kind, "digits", **changes)


def test_the_command(tmp_path: Path) -> None:
    """By name, with settings of all three tables; what the spec records is what a second call accepts."""
    command = ["train", "--model", "adp", "--data", "digits", "--out", str(tmp_path), "--epochs", "1"]
    for setting in (
        "model.depth=8",
        "model.width=2",
        "model.num_members=2",
        "objective.beta=0.25",
        "train.weight_decay=1e-4",
    ):
        command += ["--set", setting]
    first, second = (CliRunner().invoke(app, [*command, "--device", "cpu", "--json"]) for _ in range(2))
    assert json.loads(first.stdout)["test_accuracy"] == json.loads(second.stdout)["test_accuracy"]
    assert json.loads(second.stdout)["notes"] == ["already finished: nothing was trained"]
    spec = files.read_toml(tmp_path / "spec.toml")
    assert (spec["model"]["kind"], spec["model"]["num_members"]) == ("adp", 2)
    assert spec["train"]["objective_options"] == {"alpha": 2.0, "beta": 0.25}
    assert spec["train"]["weight_decay"] == 1e-4
    wrong = CliRunner().invoke(app, [*command, "--code", "10x30"])
    assert wrong.exit_code == 2
    assert wrong.stderr == "ecnn: a model of kind 'adp' takes no code: leave it out.\n"


# Randomness


DRAWING: dict[str, tuple[Any, Any]] = {
    "tanh_ensemble": (
        lambda: TanhEnsemble(10, 1, image_size=8, filters=(2, 3, 4), bit_filters=2),
        TanhEnsembleObjective(noise=0.1, blend=0.1, rotation=15),
    ),
    "trades": (
        lambda: ResNet(10, 1, **SMALL),
        TRADESObjective(eps=EPS, steps=2, step_size=0.05),
    ),
}


def weights(model: nn.Module) -> Tensor:
    return torch.cat([values.detach().flatten().double() for values in model.state_dict().values()])


@pytest.mark.parametrize("name", DRAWING)
def test_noise_comes_from_the_seed_and_survives_a_kill(name: str, digits: Dataset, tmp_path: Path) -> None:
    """Whatever torch's own generator does, one seed is one run; stopped in its third epoch and resumed, too."""
    make, objective = DRAWING[name]

    def trained(torch_seed: int, seed: int = 0, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = make()
        torch.manual_seed(torch_seed)
        fit(model, digits.train.take(96), val=None, recipe=RECIPE, objective=objective, seed=seed, **options)
        return model

    straight = weights(trained(1))
    assert torch.equal(straight, weights(trained(2)))
    assert not torch.equal(straight, weights(trained(1, seed=1)))

    def stop_in_third_epoch(done: int, total: int, news: str) -> None:
        if done == 2 * 3 + 2:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        trained(3, run_dir=tmp_path, progress=stop_in_third_epoch)
    assert torch.equal(straight, weights(trained(4, run_dir=tmp_path)))


def test_noise_differs_from_step_to_step(digits: Dataset) -> None:
    seen: list[Tensor] = []

    def watch(model: Any, images: Tensor, labels: Tensor, *, generator: torch.Generator) -> Tensor:
        seen.append(torch.randn(5, generator=generator))
        loss: Tensor = model(images).sum() * 0
        return loss

    model = ResNet(10, 1, **SMALL)
    fit(model, digits.train.take(96), val=None, recipe=RECIPE, epochs=2, objective=watch, seed=0)
    assert len({tuple(draws.tolist()) for draws in seen}) == 6


@pytest.mark.parametrize("name", DRAWING)
def test_compiled_parts_draw_the_same_noise(
    name: str, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced as torch.compile does, but run as written: the same random numbers, the same weights."""
    make, objective = DRAWING[name]
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))

    def trained(compile_parts: bool) -> Tensor:
        torch.manual_seed(0)
        model: nn.Module = make()
        fit(
            model,
            digits.train.take(64),
            val=None,
            recipe=RECIPE,
            epochs=1,
            objective=objective,
            seed=0,
            compile_parts=compile_parts,
        )
        return weights(model)

    torch.testing.assert_close(trained(True), trained(False), atol=1e-6, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("compile_parts", [False, True])
@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("adp", ADPObjective()),
        ("tanh_ensemble", TanhEnsembleObjective(noise=0.03, blend=0.03, rotation=15)),
        ("adp", TRADESObjective(eps=EPS, steps=2, step_size=0.05)),
        ("specialists", SpecialistsObjective()),
        ("empir", EMPIRObjective()),
    ],
)
def test_a_cuda_graph_holds_the_step(name: str, objective: Any, compile_parts: bool, digits: Dataset) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = (
        {"filters": (4, 8, 8), "bit_filters": 4} if name == "tanh_ensemble" else {"depth": 8}
    )
    if name == "specialists":
        options["sets"] = RING
    model = MODELS[name].build(10, 1, mean=digits.mean_image, **options).cuda()
    history = fit(
        model,
        digits.train,
        val=digits.val,
        recipe=RECIPE,
        objective=objective,
        seed=0,
        compile_parts=compile_parts,
    )
    assert history.note == ""
    assert accuracy(model, digits.test) >= 0.85


@pytest.mark.gpu
def test_a_graph_draws_what_the_eager_step_draws(digits: Dataset, tmp_path: Path) -> None:
    """An objective whose loss is its draw: the logged losses of a graph, of eager steps and of a resumed graph."""

    def draw(model: Any, images: Tensor, labels: Tensor, *, generator: torch.Generator) -> Tensor:
        zero: Tensor = 0 * model(images).sum()
        return zero + torch.randn((), generator=generator, device=images.device)

    def losses(torch_seed: int, **options: Any) -> list[float]:
        model = ResNet(10, 1, **SMALL).cuda()
        torch.manual_seed(torch_seed)
        history = fit(
            model, digits.train.take(96), val=None, recipe=RECIPE, objective=draw, **{"seed": 0, **options}
        )
        assert history.note == ""
        return [record["loss"] for record in history.epochs]

    def stop_in_third_epoch(done: int, total: int, news: str) -> None:
        if done == 2 * 3 + 2:
            raise TimeoutError

    straight = losses(1)
    assert len(set(straight)) == 5
    assert losses(2, graph=False) == pytest.approx(straight, abs=1e-6)
    with pytest.raises(TimeoutError):
        losses(3, run_dir=tmp_path, progress=stop_in_third_epoch)
    assert losses(4, run_dir=tmp_path) == pytest.approx(straight, abs=1e-6)
    assert losses(1, seed=1) != pytest.approx(straight, abs=1e-3)
