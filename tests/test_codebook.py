"""The shipped codes are what their provenance says, and as good as the bounds allow."""

from __future__ import annotations

import numpy as np
import pytest

from ecnn.annealing import design_code
from ecnn.codes import codebook, load_code
from ecnn.constructions import doubled, first_columns

# name: d_H, its bound, d_VI at least
SHIPPED = {
    "10x10": (5, 5, 1.28),
    "10x15": (8, 8, 1.28),
    "10x20": (10, 10, 1.19),
    "10x25": (13, 13, 1.19),
    "10x30": (16, 16, 1.0008),
    "10x30-q2": (16, 16, 1.0008),
    "10x30-q3": (21, 22, 1.24),
    "10x30-q4": (24, 24, 1.31),
    "43x30": (14, 14, 1.31),
    "100x80": (40, 40, 1.34),
}


def test_names() -> None:
    assert codebook() == tuple(SHIPPED)


@pytest.mark.parametrize(("name", "figures"), SHIPPED.items())
def test_shipped_code(name: str, figures: tuple[int, int, float]) -> None:
    code = load_code(name)
    report = code.report()
    assert (report.min_row_distance, report.min_row_distance_bound) == figures[:2]
    assert report.min_column_distance >= figures[2]
    size, _, arity = name.partition("-q")
    assert f"{code.num_classes}x{code.code_length}" == size
    assert code.arity == int(arity or 2)
    assert code.provenance["objective"] == "distance"
    if code.num_classes == 10 and code.arity == 2:
        assert report.smallest_group >= 3


@pytest.mark.parametrize("name", ["10x15", "10x20", "10x25"])
def test_these_column_distances_cannot_be_improved(name: str) -> None:
    report = load_code(name).report()
    assert report.min_column_distance == pytest.approx(report.min_column_distance_bound, abs=1e-9)


def test_two_output_members_learn_the_same_tasks() -> None:
    assert load_code("10x30-q2") == load_code("10x30")


def test_the_doubled_ablation_differs_in_its_columns_alone() -> None:
    code = load_code("10x30")
    half = first_columns(code, 15)
    assert doubled(half).min_row_distance >= 14
    assert doubled(half).min_column_distance == 0
    assert half.min_column_distance >= 1.0008


def test_the_codes_that_take_long_to_design_are_those_that_were_designed() -> None:
    """`make test-all` designs them again, by the test below."""
    assert load_code("10x30").content_hash.startswith("4fb070c5b4daa97a")
    assert load_code("10x30-q4").content_hash.startswith("15b45bf0537fc922")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "10x15",
        pytest.param("10x30", marks=pytest.mark.full),
        pytest.param("10x30-q4", marks=pytest.mark.full),
    ],
)
def test_the_provenance_reproduces_the_code(name: str) -> None:
    code = load_code(name)
    again = design_code(
        code.num_classes,
        code.code_length,
        arity=code.arity,
        objective="distance",
        chains=code.provenance["chains"],
        steps=code.provenance["steps"],
        seed=code.provenance["seed"],
    )
    order = code.provenance.get("column_order", list(range(code.code_length)))
    assert np.array_equal(again.symbols[:, order], code.symbols)
