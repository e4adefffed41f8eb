"""Figures: real pictures of the right content, and no half-written ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from ecnn.codes import CodeMatrix, load_code
from ecnn.constructions import random_code
from ecnn.errors import InputError
from ecnn.plots import plot_code


def test_png_shows_the_matrix(tmp_path: Path) -> None:
    code = CodeMatrix([[0, 1], [1, 0]])
    pixels = imread(plot_code(code, tmp_path / "code.png"))
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > pixels.shape[0]
    dark = pixels[..., 2] - pixels[..., 0] > 0.1  # the blue of symbol 1
    left = dark[:, : pixels.shape[1] // 2]
    rows, columns = left.shape[0] // 2, left.shape[1] // 2
    assert left[:rows, columns:].mean() > 0.3  # class 0 (above) writes 1 in task 1 (right) ...
    assert left[rows:, :columns].mean() > 0.3  # ... and class 1 in task 0
    assert left[:rows, :columns].mean() < 0.1
    assert left[rows:, columns:].mean() < 0.1


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_formats(tmp_path: Path, suffix: str) -> None:
    path = plot_code(random_code(6, 9, arity=3, seed=0), tmp_path / f"code{suffix}")
    head = path.read_bytes()[:200]
    assert {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix] in head


def test_large_and_tiny_codes(tmp_path: Path) -> None:
    for index, code in enumerate(
        (load_code("100x80"), CodeMatrix([[0], [1]]), random_code(300, 120, seed=0))
    ):
        assert plot_code(code, tmp_path / f"{index}.png").stat().st_size > 5_000


def test_bad_requests_write_nothing(tmp_path: Path) -> None:
    code = CodeMatrix([[0, 1], [1, 0]])
    with pytest.raises(InputError, match=r"must be one of \.png"):
        plot_code(code, tmp_path / "code.gif")
    with pytest.raises(InputError, match="name 2 classes, not 3"):
        plot_code(code, tmp_path / "code.png", class_names=["a", "b", "c"])
    assert list(tmp_path.iterdir()) == []
