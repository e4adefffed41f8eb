"""Bounds: the paper's sizes, known optimal codes, and that nothing random beats them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import codes

from ecnn.bounds import (
    count_splits,
    max_entropy,
    min_column_distance_bound,
    min_row_distance_bound,
    plotkin_bound,
)
from ecnn.codes import CodeMatrix, variation_of_information


@pytest.mark.parametrize(
    ("num_classes", "code_length", "best"),
    [(10, 10, 5), (10, 15, 8), (10, 20, 10), (10, 25, 13), (10, 30, 16), (43, 30, 14), (100, 80, 40)],
)
def test_row_bound_at_the_paper_sizes(num_classes: int, code_length: int, best: int) -> None:
    assert min_row_distance_bound(num_classes, code_length) == best


@pytest.mark.parametrize(
    ("num_classes", "code_length", "arity", "best"),
    [
        (16, 7, 2, 3),  # Hamming code
        (17, 7, 2, 2),  # sphere packing forbids 3
        (4096, 23, 2, 7),  # Golay code
        (16, 8, 2, 4),  # extended Hamming code, Reed-Muller
        (64, 32, 2, 16),  # Reed-Muller, Mariner 9
        (729, 11, 3, 5),  # ternary Golay code
        (9, 4, 3, 3),  # tetracode
        (16, 5, 4, 4),  # extended Reed-Solomon, meets Singleton
        (2, 9, 2, 9),  # two complementary words
        (4, 3, 2, 2),  # even-weight words
        (4, 2, 2, 1),  # all words
        (3, 1, 3, 1),
    ],
)
def test_row_bound_is_met_by_famous_codes(num_classes: int, code_length: int, arity: int, best: int) -> None:
    assert min_row_distance_bound(num_classes, code_length, arity=arity) == best


def test_odd_even_refinement_is_stricter_than_plotkin() -> None:
    assert (plotkin_bound(10, 20), min_row_distance_bound(10, 20)) == (11, 10)
    assert (plotkin_bound(43, 30), min_row_distance_bound(43, 30)) == (15, 14)


@pytest.mark.parametrize(("num_classes", "code_length"), [(3, 3), (4, 4), (5, 4), (6, 4), (9, 4)])
def test_row_bound_is_never_below_the_true_optimum(num_classes: int, code_length: int) -> None:
    """All sets of words that contain the zero word, which translation lets us assume."""
    words = list(itertools.product((0, 1), repeat=code_length))
    best = 0
    for others in itertools.combinations(words[1:], num_classes - 1):
        rows = (words[0], *others)
        best = max(
            best,
            min(sum(x != y for x, y in zip(a, b, strict=True)) for a, b in itertools.combinations(rows, 2)),
        )
    assert best <= min_row_distance_bound(num_classes, code_length) <= best + 1


@given(codes(max_classes=14, max_length=12))
def test_no_code_beats_the_bounds(code: CodeMatrix) -> None:
    size = (code.num_classes, code.code_length)
    assert code.min_row_distance <= min_row_distance_bound(*size, arity=code.arity)
    assert code.min_column_distance <= min_column_distance_bound(*size, arity=code.arity) + 1e-9


@pytest.mark.parametrize("num_classes", [2, 3, 4, 5, 7, 10])
def test_column_bound_of_a_pair_is_the_largest_vi_there_is(num_classes: int) -> None:
    splits = [
        np.array(word)
        for word in itertools.product((0, 1), repeat=num_classes)
        if 0 < sum(word) < num_classes
    ]
    if num_classes == 10:  # a sample, with the pair that attains the bound
        splits = [*splits[::8], np.array([0] * 5 + [1] * 5), np.array([0, 0, 1, 1, 1] * 2)]
    largest = max(variation_of_information(a, b) for a, b in itertools.combinations(splits, 2))
    bound = min_column_distance_bound(num_classes, 2)
    if num_classes == 2:
        assert largest == bound == 0  # there is only one question about two classes
    else:
        assert largest == pytest.approx(bound, abs=1e-9)


def test_column_bound_of_many_columns_is_met() -> None:
    """What the design reaches at 10 x 15, 20 and 25 cannot be improved (tests/test_codebook.py has the codes)."""
    assert min_column_distance_bound(10, 2) == pytest.approx(1.366159, abs=1e-6)
    assert min_column_distance_bound(10, 10) == pytest.approx(1.346023, abs=1e-6)
    assert min_column_distance_bound(10, 15) == pytest.approx(1.281645, abs=1e-6)
    assert min_column_distance_bound(10, 20) == pytest.approx(1.193550, abs=1e-6)
    assert min_column_distance_bound(10, 30) == pytest.approx(1.193550, abs=1e-6)


@pytest.mark.parametrize("code_length", [2, 3, 4, 5, 6, 7])
def test_column_bound_is_never_below_the_true_optimum(code_length: int) -> None:
    """All sets of splits of four and five classes."""
    for num_classes in (4, 5):
        splits = [
            np.array((0, *word)) for word in itertools.product((0, 1), repeat=num_classes - 1) if any(word)
        ]
        vi = np.array([[variation_of_information(a, b) for b in splits] for a in splits])
        best = max(
            (
                min(vi[i, j] for i, j in itertools.combinations(chosen, 2))
                for chosen in itertools.combinations(range(len(splits)), code_length)
            ),
            default=0.0,
        )
        assert best <= min_column_distance_bound(num_classes, code_length) + 1e-9


@given(st.integers(2, 60), st.integers(2, 60))
def test_column_bound_never_grows_with_length(num_classes: int, code_length: int) -> None:
    longer = min_column_distance_bound(num_classes, code_length + 1)
    assert longer <= min_column_distance_bound(num_classes, code_length) + 1e-12


def test_counts_of_splits() -> None:
    assert count_splits(10, 2) == 511
    assert count_splits(4, 4) == 14  # Bell(4) = 15 without the trivial split
    assert min_column_distance_bound(3, 4) == 0  # only three questions about three classes
    assert min_column_distance_bound(5, 1) == math.inf


def test_max_entropy() -> None:
    assert max_entropy(10, 2) == pytest.approx(math.log(2))
    assert max_entropy(3, 8) == pytest.approx(math.log(3))
    assert max_entropy(5, 2) == pytest.approx(-(0.4 * math.log(0.4) + 0.6 * math.log(0.6)))
