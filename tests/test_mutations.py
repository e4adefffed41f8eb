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

import ecnn
from ecnn import files
from ecnn.codes import CodeMatrix, load_code
from ecnn.errors import InputError
from ecnn.pipeline import plan
from ecnn.spec import Spec, load_spec, make_attack, parse_settings

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
        for value in VALUES:
            found = outcome(lambda: use(changed(whole_spec, place, value), rng.random() < 0.01))  # noqa: B023
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
