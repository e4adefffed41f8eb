"""CodeMatrix: validation, distances, energy, decoding, JSON."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import mutual_info_score
from strategies import codes, partitions

from ecnn.codes import (
    CodeMatrix,
    balanced_column_weight,
    entropy,
    hamming_distance,
    load_code,
    variation_of_information,
)
from ecnn.errors import InputError

PAPER_EXAMPLE = [[1, 0, 1, 0], [1, 1, 0, 1], [0, 0, 0, 1]]  # tab:ecn4


def test_paper_example_has_two_columns_that_ask_the_same() -> None:
    code = CodeMatrix(PAPER_EXAMPLE)
    assert (code.num_classes, code.code_length, code.arity) == (3, 4, 2)
    assert code.column_distances[2, 3] == 0
    assert code.min_column_distance == 0
    assert code.energy() == math.inf
    assert code.row_distances.tolist() == [[0, 3, 3], [3, 0, 2], [3, 2, 0]]
    assert code.min_row_distance == 2


def test_vi_by_hand() -> None:
    # Splits 5/5 and 4/6 of ten classes that meet in (1, 4, 3, 2) classes.
    a = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    b = np.array([0, 1, 1, 1, 1, 0, 0, 0, 1, 1])
    joint = np.array([1, 4, 3, 2]) / 10
    expected = 2 * entropy(joint) - math.log(2) - entropy(np.array([0.4, 0.6]))
    assert variation_of_information(a, b) == pytest.approx(expected, abs=1e-12)
    assert expected == pytest.approx(1.1935496, abs=1e-7)


def test_balanced_splits_of_ten_classes_take_two_distances() -> None:
    """Of 511 splits 126 are balanced; two distinct ones are 1.0008 or 1.3460 nats apart."""
    words = [[int(bit) for bit in f"{number:010b}"] for number in range(512)]  # class 0 always in group 0
    balanced = CodeMatrix(np.array([word for word in words if sum(word) == 5]).T)
    assert balanced.code_length == 126
    distinct = balanced.column_distances[np.triu_indices(126, 1)]
    assert {round(float(vi), 4) for vi in distinct} == {1.0008, 1.3460}


@given(st.data(), st.integers(2, 10))
def test_vi_is_a_metric_on_partitions(data: st.DataObject, num_classes: int) -> None:
    a, b, c = (data.draw(partitions(num_classes)) for _ in range(3))
    ab, bc, ac = (
        variation_of_information(a, b),
        variation_of_information(b, c),
        variation_of_information(a, c),
    )
    assert ab == pytest.approx(variation_of_information(b, a), abs=1e-12)
    assert ac <= ab + bc + 1e-12
    same_split = len({*zip(a.tolist(), b.tolist(), strict=True)}) == len({*a.tolist()}) == len({*b.tolist()})
    assert (ab == 0) == same_split


@given(st.data(), st.integers(2, 12))
def test_vi_is_the_mutual_information_identity(data: st.DataObject, num_classes: int) -> None:
    a, b = data.draw(partitions(num_classes)), data.draw(partitions(num_classes))
    identity = mutual_info_score(a, a) + mutual_info_score(b, b) - 2 * mutual_info_score(a, b)
    assert variation_of_information(a, b) == pytest.approx(identity, abs=1e-9)


@given(codes())
def test_distance_tables_equal_the_pairwise_functions(code: CodeMatrix) -> None:
    for i, a in enumerate(code.symbols):
        for j, b in enumerate(code.symbols):
            assert code.row_distances[i, j] == hamming_distance(a, b)
    for m, a in enumerate(code.symbols.T):
        for n, b in enumerate(code.symbols.T):
            assert code.column_distances[m, n] == pytest.approx(variation_of_information(a, b), abs=1e-9)


@given(codes(), st.integers(0, 2**32))
def test_distances_do_not_depend_on_order_or_names(code: CodeMatrix, seed: int) -> None:
    rng = np.random.default_rng(seed)
    symbols = code.symbols[rng.permutation(code.num_classes)][:, rng.permutation(code.code_length)]
    renamed = np.stack([rng.permutation(code.arity)[column] for column in symbols.T], axis=1)
    other = CodeMatrix(renamed, code.arity)
    assert other.min_row_distance == code.min_row_distance
    assert other.min_column_distance == pytest.approx(code.min_column_distance, abs=1e-9)
    assert other.energy(1.0) == pytest.approx(code.energy(1.0), rel=1e-9)
    upper_rows, upper_columns = np.triu_indices(code.num_classes, 1), np.triu_indices(code.code_length, 1)
    assert sorted(other.row_distances[upper_rows]) == sorted(code.row_distances[upper_rows])
    assert np.allclose(
        sorted(other.column_distances[upper_columns]), sorted(code.column_distances[upper_columns]), atol=1e-9
    )


@given(codes(), st.data())
def test_errors_up_to_half_the_distance_decode(code: CodeMatrix, data: st.DataObject) -> None:
    label = data.draw(st.integers(0, code.num_classes - 1))
    wrong = data.draw(
        st.lists(st.integers(0, code.code_length - 1), unique=True, max_size=code.correctable_errors)
    )
    received = code.symbols[label].copy()
    for task in wrong:
        received[task] = (received[task] + data.draw(st.integers(1, code.arity - 1))) % code.arity
    assert code.correctable_errors == (code.min_row_distance - 1) // 2
    assert code.nearest([received]).tolist() == [label]


def test_one_error_more_than_that_can_decode_wrongly() -> None:
    code = CodeMatrix([[0, 0, 0, 0], [1, 1, 1, 1]])
    assert code.correctable_errors == 1
    assert code.nearest([[1, 1, 1, 0]]).tolist() == [1]
    assert code.nearest([[1, 0, 0, 0]]).tolist() == [0]


@given(codes(), st.sampled_from([0.0, 0.3, 1.0]))
def test_energy_is_the_sum_over_unordered_pairs(code: CodeMatrix, weight: float) -> None:
    rows = [hamming_distance(a, b) for i, a in enumerate(code.symbols) for b in code.symbols[i + 1 :]]
    tasks = code.symbols.T
    columns = [variation_of_information(a, b) for i, a in enumerate(tasks) for b in tasks[i + 1 :]]
    if weight and 0 in columns:
        expected = math.inf
    else:
        expected = sum(h**-2 for h in rows) + (weight * sum(vi**-2 for vi in columns) if weight else 0)
    assert code.energy(weight) == pytest.approx(expected, rel=1e-9)


def test_energy_of_equal_rows_is_infinite() -> None:
    assert CodeMatrix([[0, 1], [0, 1], [1, 0]], allow_equal_rows=True).energy(0.0) == math.inf


@pytest.mark.parametrize(
    ("num_classes", "code_length", "arity"), [(10, 30, 2), (43, 30, 2), (100, 80, 2), (10, 30, 3)]
)
def test_balanced_weight_makes_both_sums_roughly_equal(
    num_classes: int, code_length: int, arity: int
) -> None:
    name = f"{num_classes}x{code_length}" + (f"-q{arity}" if arity > 2 else "")
    code = load_code(name)
    rows = code.energy(0.0)
    columns = code.energy(balanced_column_weight(num_classes, code_length, arity)) - rows
    assert 0.5 < columns / rows < 3


@pytest.mark.parametrize(
    ("symbols", "arity", "sentence"),
    [
        ([[0, 1], [1, 2]], 2, r"0\.\.1 .* row 1, task 1 is 2"),
        ([[0, -1], [1, 0]], 2, "row 0, task 1 is -1"),
        ([[0, 1], [0, 1]], 2, "classes 0 and 1 have the same codeword"),
        ([[0, 1], [1, 1]], 2, "column 1 gives every class the symbol 1"),
        ([[0], [1], [1]], 2, "3 different codewords, but 1 symbols of arity 2 spell only 2"),
        ([[0, 1]], 2, "num_classes must be a whole number from 2 up"),
        ([], 2, "shape"),
        ([0, 1], 2, "shape"),
        ([[[0]], [[1]]], 2, "shape"),
        ([[0, 1], [1]], 2, "rows of equal length"),
        ([[0.0, 1.0], [1.0, 0.0]], 2, "whole numbers"),
        ([["0", "1"], ["1", "0"]], 2, "whole numbers"),
        ([[0, None], [1, 0]], 2, "whole numbers"),
        ([[0, 1], [1, 0]], 1, "arity"),
        ([[0, 1], [1, 0]], 257, "arity"),
        ([[0, 1], [1, 0]], "2", "arity"),
        ([[0, 1], [1, 0]], True, "arity"),
    ],
)
def test_bad_symbols_are_refused_in_one_sentence(symbols: Any, arity: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        CodeMatrix(symbols, arity)
    assert "\n" not in str(caught.value)


def test_permissions() -> None:
    assert CodeMatrix([[0, 1], [1, 1]], allow_constant_columns=True).group_sizes.tolist() == [[1, 1], [0, 2]]
    assert CodeMatrix([[0, 1], [0, 1], [1, 0]], allow_equal_rows=True).min_row_distance == 0


def test_a_code_cannot_be_changed() -> None:
    source = np.array(PAPER_EXAMPLE)
    code = CodeMatrix(source)
    source[0, 0] = 0
    assert code.symbols[0, 0] == 1
    for array in (code.symbols, code.signed, code.one_hot, code.row_distances, code.column_distances):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 0
    with pytest.raises(AttributeError):
        code.arity = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        code.provenance["seed"] = 1  # type: ignore[index]


def test_views() -> None:
    code = CodeMatrix(PAPER_EXAMPLE)
    assert code.signed[0].tolist() == [1, -1, 1, -1]
    assert code.one_hot[0].tolist() == [[0, 1], [1, 0], [0, 1], [1, 0]]
    with pytest.raises(InputError, match="arity 3"):
        _ = CodeMatrix([[0, 1], [2, 0]], 3).signed


def test_equality_and_hash_are_about_content() -> None:
    a, b = (
        CodeMatrix(PAPER_EXAMPLE, provenance={"seed": 1}),
        CodeMatrix(np.array(PAPER_EXAMPLE, dtype=np.int8)),
    )
    assert a == b
    assert hash(a) == hash(b)
    assert a.content_hash == b.content_hash
    ternary = CodeMatrix(PAPER_EXAMPLE, 3)
    assert a != ternary
    assert a.content_hash != ternary.content_hash
    assert a != PAPER_EXAMPLE
    assert len({a, b, ternary}) == 2
    # Fixed for all time: saved runs refer to codes by this.
    assert a.content_hash == "5bc5a48e92c09a7bb48525f577e7337c097b57f5348dc03de1fd118ad97d5179"


@given(codes())
def test_json_brings_the_code_back(code: CodeMatrix) -> None:
    assert CodeMatrix.from_dict(json.loads(json.dumps(code.to_dict()))) == code
    back = pickle.loads(pickle.dumps(code))  # noqa: S301 our own bytes: workers of a cluster receive codes this way
    assert back == code
    assert back.provenance == code.provenance


def test_save_and_load(tmp_path: Path) -> None:
    code = CodeMatrix(PAPER_EXAMPLE, provenance={"from": "tab:ecn4"})
    path = code.save(tmp_path / "new" / "code.json")
    assert load_code(path) == load_code(str(path)) == code
    assert load_code(path).provenance == {"from": "tab:ecn4"}
    loose = CodeMatrix([[0, 1], [0, 1]], allow_equal_rows=True, allow_constant_columns=True)
    assert load_code(loose.save(tmp_path / "loose.json")) == loose
    text = path.read_text()
    assert "[1,0,1,0]" in text  # a row a line, for people and for diffs


def broken(**changes: Any) -> dict[str, Any]:
    value = {**CodeMatrix(PAPER_EXAMPLE).to_dict(), **changes}
    return {key: item for key, item in value.items() if item != "DROP"}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\x00\xff\xfe", "not a text file"),
        (b"[" * 100_000, "nested too deeply|is not JSON"),
        (b"[1, 2]", "not a code"),
        (broken(format="other"), "not a code"),
        (broken(version=2), "version 2"),
        (broken(version="DROP"), "version None"),
        (broken(symbols="DROP"), 'needs the key "symbols"'),
        (broken(arity="DROP"), 'needs the key "arity"'),
        (broken(symbols=[[0, 1, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0]]), "do not match the file's hash"),
        (broken(num_classes=4), "do not match the file's num_classes"),
        (broken(symbols=[[0, 9], [1, 0]]), "row 0, task 1 is 9"),
        (broken(symbols=[[0, 10**30], [1, 0]]), "whole numbers|is 1000"),
        (broken(symbols={"a": 1}), "shape"),
        (broken(symbols=None), "shape"),
        (broken(arity="two"), "arity"),
        (broken(provenance=[1]), "provenance"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, content: Any, sentence: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(InputError, match=sentence) as caught:
        load_code(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_codes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"one of 10x10, .*, not .11x30.; did you mean .10x30.\?"):
        load_code("11x30")
    with pytest.raises(InputError, match="No such file"):
        load_code(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot read"):
        load_code(tmp_path)


def test_report_puts_values_beside_bounds() -> None:
    report = load_code("10x30").report()
    assert (report.min_row_distance, report.min_row_distance_bound) == (16, 16)
    assert (report.correctable_errors, report.correctable_errors_bound) == (7, 7)
    lines = str(report).splitlines()
    assert lines[0].split()[-2:] == ["code", "bound"]
    assert lines[1].split()[-2:] == ["16", "16"]
    assert lines[3].split()[-2:] == ["1.0008", "1.1935"]


def test_report_of_one_column() -> None:
    report = CodeMatrix([[0], [1]]).report()
    assert report.min_column_distance == report.min_column_distance_bound == math.inf
    assert report.energy == 1.0
