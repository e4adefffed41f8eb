"""Constructions: orthogonality, the sizes that theory promises, and hostile arguments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecnn.bounds import min_row_distance_bound
from ecnn.codes import CodeMatrix
from ecnn.constructions import (
    doubled,
    first_columns,
    hadamard_code,
    hadamard_matrices,
    hadamard_matrix,
    levenshtein_code,
    one_vs_rest,
    random_code,
    to_binary,
)
from ecnn.errors import InputError


def test_every_hadamard_matrix_below_92_is_one() -> None:
    for order in (1, 2, *range(4, 92, 4)):
        found = hadamard_matrices(order)
        assert found, order
        for matrix in found.values():
            assert np.array_equal(np.abs(matrix), np.ones((order, order)))
            assert np.array_equal(matrix @ matrix.T, order * np.eye(order))


@pytest.mark.parametrize(
    ("order", "kinds"),
    [
        (12, {"paley1", "paley2"}),
        (20, {"paley1", "paley2"}),
        (28, {"paley1", "paley2"}),  # over GF(27), and over GF(13)
        (32, {"paley1", "sylvester"}),
        (36, {"paley2"}),
        (52, {"paley2"}),  # over GF(25)
        (80, {"paley1", "sylvester"}),
    ],
)
def test_which_constructions_reach_an_order(order: int, kinds: set[str]) -> None:
    assert set(hadamard_matrices(order)) == kinds
    assert (hadamard_matrix(order)[0] == 1).all()
    assert (hadamard_matrix(order)[:, 0] == 1).all()


@pytest.mark.parametrize("order", [0, -4, 3, 6, 92])
def test_orders_out_of_reach(order: int) -> None:
    with pytest.raises(InputError, match=f"order {order}"):
        hadamard_matrix(order)


def test_hadamard_code() -> None:
    code = hadamard_code(28)
    assert (code.num_classes, code.code_length, code.min_row_distance) == (56, 28, 14)


def plotkin_optimum(length: int, distance: int) -> int:
    """A(n, d) for 2d >= n (d even) as Levenshtein proved, odd distances through one more column."""
    if distance % 2:
        length, distance = length + 1, distance + 1
    return 4 * distance if length == 2 * distance else 2 * (distance // (2 * distance - length))


def test_levenshtein_meets_plotkin_at_every_size() -> None:
    tried = 0
    for length in range(1, 41):
        for distance in range(1, length + 1):
            if length <= 2 * distance + distance % 2:
                code = levenshtein_code(length, distance)
                assert code.code_length == length
                assert code.num_classes == plotkin_optimum(length, distance)
                assert code.min_row_distance >= distance
                assert min_row_distance_bound(code.num_classes, length) >= distance
                tried += 1
    assert tried > 400


def test_levenshtein_refuses_short_distances() -> None:
    with pytest.raises(InputError, match="at least half"):
        levenshtein_code(30, 14)
    with pytest.raises(InputError, match="from 1 to"):
        levenshtein_code(5, 6)


@given(st.integers(2, 40), st.integers(1, 12), st.integers(2, 5), st.integers(0, 2**32))
def test_random_codes_are_codes(num_classes: int, code_length: int, arity: int, seed: int) -> None:
    if arity**code_length < num_classes:
        with pytest.raises(InputError, match="different codewords"):
            random_code(num_classes, code_length, arity=arity, seed=seed)
        return
    code = random_code(num_classes, code_length, arity=arity, seed=seed)
    assert (code.num_classes, code.code_length, code.arity) == (num_classes, code_length, arity)
    assert code == random_code(num_classes, code_length, arity=arity, seed=seed)


def test_random_codes_are_balanced_and_differ() -> None:
    code = random_code(10, 30, seed=0)
    assert (code.group_sizes == 5).all()
    assert {*random_code(10, 30, arity=3, seed=0).group_sizes.reshape(-1).tolist()} == {3, 4}
    assert code != random_code(10, 30, seed=1)


def test_random_code_of_every_word() -> None:
    code = random_code(32, 5, seed=3)
    assert len({tuple(row) for row in code.symbols.tolist()}) == 32


def test_one_vs_rest() -> None:
    code = one_vs_rest(10)
    assert np.array_equal(code.symbols, np.eye(10))
    assert code.min_row_distance == 2


def test_doubled_asks_every_question_twice() -> None:
    code = random_code(10, 15, seed=0)
    twice = doubled(code)
    assert twice.code_length == 30
    assert twice.min_row_distance == 2 * code.min_row_distance
    assert twice.min_column_distance == 0
    assert (twice.signed[:, :15] == -twice.signed[:, 15:]).all()
    with pytest.raises(InputError, match="arity 3"):
        doubled(random_code(10, 15, arity=3, seed=0))


def test_to_binary_asks_for_each_symbol() -> None:
    code = random_code(10, 6, arity=3, seed=0)
    binary = to_binary(code)
    assert (binary.arity, binary.code_length) == (2, 18)
    assert binary.min_row_distance == 2 * code.min_row_distance
    assert np.array_equal(binary.symbols[:, 3 * 4 + 2], code.symbols[:, 4] == 2)
    unused = CodeMatrix([[0, 1], [1, 0]], 3)
    assert to_binary(unused).code_length == 6


def test_first_columns() -> None:
    code = random_code(10, 15, seed=0)
    assert np.array_equal(first_columns(code, 8).symbols, code.symbols[:, :8])
    for length in (0, 16):
        with pytest.raises(InputError, match="from 1 to 15"):
            first_columns(code, length)
