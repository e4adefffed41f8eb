"""Seeded mutations of what people write and files hold: each ends in a result or in one sentence, never otherwise."""

from __future__ import annotations

import copy
import datetime
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ecnn
from ecnn import files, runs
from ecnn.codes import CodeMatrix, load_code
from ecnn.errors import InputError
from ecnn.pipeline import plan, recording
from ecnn.spec import Spec, load_spec, make_attack, parse_settings
from ecnn.training.checkpoints import load_checkpoint, save_checkpoint
from ecnn.training.loop import BEST, LAST

VALUES: list[Any] = [
    -1, 0, 1, 2, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.5, math.nan, math.inf, -math.inf, 1e308, 1e-320, True,
    False, "", "x", "linf", "../../x", "a" * 300, "\0", "nan", [], [1], [1, 2], [0, 0], [-1, 8], ["x"], [[1]], {},
    {"x": 1}, {"kind": "pgd"}, datetime.date(2000, 1, 1), datetime.datetime(2000, 1, 1), datetime.time(1, 2),
    [[[[[[[[[[1]]]]]]]]]],
]  # fmt: skip


def places(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, (*above, key))


def changed(table: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(table)
    inner = result
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return result


def outcome(use: Callable[[], object]) -> str | None:
    """The sentence that it ends in, or None; any other error escapes."""
    sentence = None
    try:
        use()
    except InputError as error:
        sentence = str(error)
    assert sentence is None or ("\n" not in sentence and len(sentence) < 1000)
    return sentence


@pytest.fixture(scope="module")
def digits() -> ecnn.data.Dataset:
    return ecnn.load_data("digits")


@pytest.fixture(scope="module")
def whole_spec(digits: ecnn.data.Dataset) -> dict[str, Any]:
    attack = {"kind": "pgd", "norm": "linf", "eps": 0.1, "steps": 5, "step_size": 0.02}
    model = {"width": 4, "depth": 8, "feature_dim": 8}
    tables = {"data": {"name": "digits"}, "model": model, "train": {"attack": attack}}
    tables |= {"attacks": {"pgd": {**attack, "limit": 10}}, "audit": {"eps": 0.1, "claim": 0.5, "limit": 10}}
    return plan(Spec.from_dict(tables), digits).spec.to_dict()


def test_values_of_a_spec(whole_spec: dict[str, Any], digits: ecnn.data.Dataset) -> None:
    rng = random.Random(0)

    def use(tables: dict[str, Any], with_model: bool) -> None:
        spec = Spec.from_dict(tables)
        Spec.from_dict(json.loads(json.dumps(spec.to_dict(), allow_nan=False)))
        for name, attack in spec.attacks.items():
            make_attack({"kind": name, **attack})
        if with_model:
            plan(spec, digits)

    for place in places(whole_spec):
        for value in rng.sample(VALUES, 12):
            found = outcome(lambda: use(changed(whole_spec, place, value), rng.random() < 0.02))  # noqa: B023
            if isinstance(value, datetime.date | datetime.time) or value == 10**400:
                assert found, (place, value)


def test_no_size_takes_the_memory_of_the_machine(
    whole_spec: dict[str, Any], digits: ecnn.data.Dataset
) -> None:
    for name in ("width", "depth", "feature_dim"):
        for value in (10**4 + 1, 2**31, 2**63):
            tables = changed(whole_spec, ("model", name), value)
            assert outcome(lambda: plan(Spec.from_dict(tables), digits)), (name, value)  # noqa: B023
    with pytest.raises(InputError, match=r"would have .* weights, more than the 268,435,456"):
        plan(Spec.from_dict(changed(whole_spec, ("model", "width"), 10**4)), digits)


def test_values_of_a_code() -> None:
    rng = random.Random(0)
    base = load_code("10x10").to_dict()
    values = [
        None,
        *VALUES,
        256,
        257,
        [[0, 1], [1]],
        [[2**64, 1], [0, 1]],
        [[0.5, 1], [1, 0]],
        [["a"]],
        [[None]],
        [{}],
    ]

    def use(table: Any) -> None:
        code = CodeMatrix.from_dict(table)
        assert CodeMatrix.from_dict(code.to_dict()) == code
        code.report(code.provenance.get("column_weight", "balanced"))

    for place in (*places(base), ("provenance", "column_weight")):
        for value in rng.sample(values, 20):
            table = changed(base, place, value)
            outcome(lambda: use(table))  # noqa: B023
            table.pop("hash", None)
            outcome(lambda: use(table))  # noqa: B023
    for value in values:
        assert outcome(lambda: use(value)), value  # noqa: B023


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("9" * 5000, "too many digits|not TOML"),
        ("x = " + "9" * 5000, "not JSON|not TOML"),
        ("[" * 100_000, "nested too deeply|not TOML"),
        ("x = " + "[" * 100_000, "nested too deeply|not JSON"),
        ("\ud800", "not a text file|not TOML"),
    ],
)
def test_files_that_no_reader_likes(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    for read in (files.read_json, files.read_toml, load_spec, load_code):
        with pytest.raises(InputError, match=sentence):
            read(path)


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "a" * 300 + ".json", "a\0b.json", "x/" * 3000])
def test_names_that_no_file_has(name: str) -> None:
    for use in (load_code, ecnn.load_model, ecnn.load_data, load_spec, files.check_writable):
        with pytest.raises(InputError):
            use(name)


def test_settings_that_are_no_numbers() -> None:
    for text in ("2000-01-01", "9" * 5000, "[" * 5000, "nan", "[[1]]", "{a=1}"):
        tables = {
            "data": {"name": "digits"},
            "train": {"lr": parse_settings([f"train.lr={text}"])["train.lr"]},
        }
        assert outcome(lambda: plan_recipe(tables))  # noqa: B023


def plan_recipe(tables: dict[str, Any]) -> object:
    from ecnn.models import resolve_recipe

    return resolve_recipe("small", **Spec.from_dict(tables).train)


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 2**64},
        {"seed": -1},
        {"seed": 1.5},
        {"column_weight": 1e308},
        {"column_weight": 1e18},
        {"column_weight": 10**400},
        {"code_length": 2**63},
        {"num_classes": 2**63},
        {"code_length": 2049},
        {"steps": 10**400},
    ],
)
def test_codes_that_cannot_be_designed(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be"):
        ecnn.design_code(**{"num_classes": 10, "code_length": 30, "seed": 0, "steps": 100, **options})


def test_a_large_image_size_is_refused_before_memory_is_taken() -> None:
    for size in (1_000_000, 1025, (2**63, 8)):
        with pytest.raises(InputError, match="from 1 to 1024"):
            ecnn.load_data("digits", image_size=size)
    with pytest.raises(InputError, match=r"would take 1\.8 GiB"):
        ecnn.load_data("digits", image_size=1024)


def test_facts_of_a_checkpoint(tmp_path: Path, digits: ecnn.data.Dataset) -> None:
    few, rng = digits.train.take(32), random.Random(0)
    values: list[Any] = [None, -1, 2**64, "x", [], [1], [{}], {}, True]

    def train(epochs: int) -> object:
        torch.manual_seed(0)
        model = ecnn.ResNet(10, 1, width=4, depth=8, mean=digits.mean_image)
        options: Any = {"objective": "cross_entropy", "seed": 0, "run_dir": tmp_path}
        return ecnn.fit(model, few, val=None, recipe="small", epochs=epochs, **options)

    train(1)
    last, best = tmp_path / LAST, tmp_path / BEST
    tensors, facts = load_checkpoint(last)
    for place in (*places(facts), *(("epochs", key) for key in ("epoch", "loss"))):
        for value in rng.sample(values, 3):
            if place[0] == "epochs" and len(place) == 2:
                changes = {**facts, "epochs": [{**facts["epochs"][0], place[1]: value}]}
            else:
                changes = changed(facts, place, value)
            save_checkpoint(last, tensors, changes)
            outcome(lambda: train(1))
    for name in tensors:
        if name.startswith("optimizer."):
            for other in (
                {f"{name}.x": tensors[name]},
                {name: torch.zeros(1, 2, 3)},
                {"optimizer.x.y": torch.ones(1)},
            ):
                save_checkpoint(
                    last, {**{key: value for key, value in tensors.items() if key != name}, **other}, facts
                )
                outcome(lambda: train(1))
            break
    tensors, facts = load_checkpoint(best)
    for place in places(facts):
        for value in rng.sample(values, 3):
            save_checkpoint(best, tensors, changed(facts, place, value))
            outcome(lambda: ecnn.load_model(tmp_path))
    for text in ("9" * 5000, "[" * 100_000, "{", "[]", "null"):
        files.write_tensors(best, tensors, {"format": "ecnn-checkpoint", "version": "1", "facts": text})
        assert outcome(lambda: ecnn.load_model(tmp_path))


def test_results_and_records_of_a_run(tmp_path: Path) -> None:
    result: dict[str, Any] = {"test_accuracy": 0.5, "images": 10}
    audit: dict[str, Any] = {"accuracy": 0.5, "eps": 0.1, "norm": "linf", "budget": "quick"}
    facts: dict[str, Any] = {
        "format": "ecnn-record",
        "version": 1,
        "arm": "a",
        "spec": {},
        "parameters": 3,
        "times": {},
    }
    facts |= {"test": {"accuracy": 0.5, "images": 10}, "attacks": {}, "audits": [audit]}
    files.write_arrays(tmp_path / "outcomes.npz", {}, {})
    for table, name, read in (
        (result, "eval.json", runs.read_results),
        (facts, "record.json", recording.read_record),
    ):
        files.write_json(tmp_path / name, table)
        assert read(tmp_path)
        for place in places(table):
            for value in (None, "x", [], [1], False, 2**64):
                files.write_json(tmp_path / name, changed(table, place, value))
                fine = (place, value) in ((("arm",), "x"), (("audits",), []))
                assert fine or outcome(lambda: read(tmp_path)), (place, value)  # noqa: B023
