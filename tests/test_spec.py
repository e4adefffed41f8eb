"""One spec: read, refused with the nearest name, changed, written, hashed, and planned to a fixed point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ecnn import runs
from ecnn.data import load_data
from ecnn.errors import InputError
from ecnn.models import MODELS
from ecnn.pipeline import plan
from ecnn.spec import AuditTable, DataTable, Spec, load_spec, parse_settings, save_spec

WHOLE: dict[str, Any] = {
    "seed": 3,
    "data": {"name": "digits", "val_fraction": 0.2, "test_limit": 50},
    "code": {"name": "10x10"},
    "model": {"kind": "ecnn", "width": 4, "depth": 8},
    "train": {
        "recipe": "small",
        "epochs": 2,
        "objective_options": {"margin": 2.0},
        "attack": {"kind": "fgsm", "eps": "8/255"},
    },
    "attacks": {
        "pgd": {"norm": "linf", "eps": [0.1, "8/255"], "steps": 3, "step_size": 0.05, "limit": 20},
        "pgd on members/z": {"kind": "pgd", "norm": "l2", "eps": 1, "steps": 3, "step_size": 0.5},
    },
    "audit": {"norm": "linf", "eps": 0.1, "seed": 0, "budget": "quick"},
}


def test_a_file_and_back(tmp_path: Path) -> None:
    spec = Spec.from_dict(WHOLE)
    save_spec(tmp_path / "spec.toml", spec)
    again = load_spec(tmp_path / "spec.toml")
    assert again == spec
    assert again.to_dict() == WHOLE
    assert again.content_hash == spec.content_hash


def test_the_hash_is_of_everything_in_it() -> None:
    spec = Spec.from_dict(WHOLE)
    seen = {spec.content_hash}
    for name, value in (
        ("seed", 4),
        ("data.test_limit", 51),
        ("train.attack.eps", "4/255"),
        ("attacks.pgd.steps", 4),
        ("audit.claim", 0.5),
        ("model.depth", 14),
    ):
        seen.add(spec.changed({name: value}).content_hash)
    assert len(seen) == 7
    assert spec.changed({"seed": None, "train.epochs": 2}).content_hash == spec.content_hash
    assert spec.to_dict() == WHOLE  # it is not changed itself


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("sead", 1, "a spec has no option 'sead'; .* did you mean 'seed'"),
        ("data.nam", 1, r"\[data\] has no option 'nam'; .* did you mean 'name'"),
        ("data.test_limit", 0, "data.test_limit must be a whole number from 1 up"),
        ("model.kind", "ecn", "did you mean 'ecnn'"),
        ("model.widht", 4, "'ecnn' has no option 'widht'; .* did you mean 'width'"),
        ("model", 4, r"\[model\] must be a table"),
        ("train.epoch", 4, "did you mean 'epochs'"),
        ("train.attack.kind", "pdg", "train.attack.kind must be .* did you mean 'pgd'"),
        ("train.attack.epss", 1, r"\[train.attack\] has no option 'epss'; .* did you mean 'eps'"),
        ("attacks.pgd.stepsize", 1, r"\[attacks.pgd\] has no option 'stepsize'; .* did you mean 'step_size'"),
        ("attacks.new", {"eps": 1}, "attacks.new.kind must be one of"),
        ("attacks.pgd", 3, r"\[attacks.pgd\] must be a table"),
        ("audit.eps", "x", "eps must be a number or a fraction"),
        ("audit.norm", "linff", "norm must be .* did you mean 'linf'"),
        ("audit.clam", 0.5, "did you mean 'claim'"),
        ("code.code_length", 10, "either the name of a code or the code_length"),
        ("code.arity", 3, "a name takes no arity"),
        ("seed.x", 3, "seed is a value, not a table"),
        ("seed", -1, "seed must be a whole number from 0 up"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Spec.from_dict(WHOLE).changed({name: value})


def test_a_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("data.name = 'digits'\nmodel.king = 'ecnn'")
    with pytest.raises(InputError, match=r"x\.toml: the model 'ecnn' has no option 'king'"):
        load_spec(tmp_path / "x.toml")


def test_settings_as_people_type_them() -> None:
    found = parse_settings(
        ["train.lr=0.1", "model.batch_norm=true", "train.objective=trades", "a.b=8/255", "a.c=[1]"]
    )
    assert found == {
        "train.lr": 0.1,
        "model.batch_norm": True,
        "train.objective": "trades",
        "a.b": "8/255",
        "a.c": [1],
    }
    for bad in ("lr=0.1", "train.lr", "", "=3"):
        with pytest.raises(InputError, match=r"--set takes TABLE\.NAME=VALUE"):
            parse_settings([bad])


@pytest.mark.parametrize("kind", MODELS)
def test_a_planned_spec_plans_to_itself(kind: str, tmp_path: Path) -> None:
    """What a run writes down asks for the same run again, whatever defaults become."""
    data = load_data("digits")
    sets = {"sets": [[digit, (digit + 1) % 10] for digit in range(10)]} if kind == "specialists" else {}
    small: dict[str, Any] = {} if kind in ("tanh_ensemble", "multiscale") else {"depth": 8, "width": 4}
    for train in ({}, {"attack": {"eps": 0.1}}, {"objective": "trades", "attack": {"eps": 0.1, "steps": 2}}):
        spec = Spec(data=DataTable(name="digits"), model={"kind": kind, **small, **sets}, train=train)
        first = plan(spec, data)
        save_spec(tmp_path / "spec.toml", first.spec)
        second = plan(load_spec(tmp_path / "spec.toml"), data)
        assert second.spec.to_dict() == first.spec.to_dict()
        assert (second.recipe, second.attack, second.val_attack) == (
            first.recipe,
            first.attack,
            first.val_attack,
        )


def test_a_plan_refuses_other_images_and_another_code() -> None:
    data = load_data("digits")
    made = plan(Spec.from_dict(WHOLE), load_data("digits", val_fraction=0.2)).spec
    with pytest.raises(InputError, match="are not those that the spec was written for"):
        plan(made, data)  # another validation split: other training images
    with pytest.raises(InputError, match="is not the one that the spec was written for"):
        plan(made.changed({"code.name": "10x15"}), load_data("digits", val_fraction=0.2))
    with pytest.raises(InputError, match=r"trained on num_classes = 7, and digits has 10"):
        plan(made.changed({"data.num_classes": 7}), data)


def test_designed_and_doubled_codes() -> None:
    data = load_data("digits")
    spec = Spec.from_dict(
        {"data": {"name": "digits"}, "code": {"code_length": 8, "steps": 20_000}, "seed": 5}
    )
    made = plan(spec, data)
    assert made.code is not None
    assert made.code.code_length == 8
    assert made.spec.code is not None
    assert (made.spec.code.seed, made.spec.code.arity) == (5, 2)
    twice = plan(
        Spec.from_dict({"data": {"name": "digits"}, "code": {"name": "10x10", "doubled": True}}), data
    )
    assert twice.code is not None
    assert twice.code.code_length == 20


def test_shipped_specs_are_read() -> None:
    for name in runs.models():
        spec = runs.read_spec(name)
        assert spec.to_dict() == load_spec(runs.zoo_folder(name) / "spec.toml").to_dict()
    assert runs.read_spec("cifar10-ecnn30-at").train["attack"]["eps"] == "8/255"


def test_an_audit_needs_a_radius() -> None:
    with pytest.raises(InputError, match=r"\[audit\] needs eps"):
        Spec.from_dict({"data": {"name": "digits"}, "audit": {"norm": "l2"}})
    assert AuditTable(eps="8/255").budget == "standard"
