"""Figures: real pictures of the right content, and no half-written ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D
from toys import TINY, Saturated, images_of_classes, random_linear

from ecnn.attacks import FGSM, FMN, PGD
from ecnn.auditing import audit
from ecnn.codes import CodeMatrix, load_code
from ecnn.constructions import random_code
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation import MemberFlips, TransferMatrix, evaluate
from ecnn.plots import plot_audit, plot_code, plot_curve, plot_members, plot_transfer


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn and written, in their order."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def split_of(images: torch.Tensor, labels: torch.Tensor) -> Split:
    return Split((images * 255).round().to(torch.uint8), labels)


def linear_split(count: int = 24) -> tuple[torch.nn.Module, Split]:
    """A linear model and random images of 4 x 4 pixels, all of which it gets right."""
    model = random_linear(3, 16).float()
    images = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    split = split_of(images, torch.zeros(count, dtype=torch.int64))
    return model, Split(split.images, model(split[:][0]).argmax(dim=1))


def points_of(line: Line2D) -> tuple[list[float], list[float]]:
    """Its x and y values."""
    x, y = np.asarray(line.get_data(), dtype=float)
    return x.tolist(), y.tolist()


def texts(figure: Figure) -> str:
    """All that is written in it."""
    found = [str(axes.get_title(loc="left")) for axes in figure.axes]
    return " ".join([*found, *(text.get_text() for axes in figure.axes for text in axes.texts)])


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


def test_a_curve_shows_every_attack_at_every_radius(tmp_path: Path, drawn: list[Figure]) -> None:
    model, split = linear_split()
    radii = [0.05, 0.1, 0.2]
    pgd = PGD(norm="linf", eps=0.1, steps=5, step_size=0.05)
    curved = evaluate(model, split, {"pgd": pgd, "fmn": FMN(norm="l2", steps=20)}, eps=radii, limit=None)
    plot_curve(curved, tmp_path / "curve.png")
    (figure,) = drawn
    linf, l2 = figure.axes
    (line,) = linf.lines
    curve = curved.curve("pgd")
    x, y = points_of(line)
    assert x == pytest.approx([0, *radii])
    assert y == pytest.approx([100 * rate.accuracy for rate in curve.cumulative])
    (band,) = linf.collections
    low, high = (100 * end for end in curve.cumulative[-1].interval)
    edge = np.asarray(band.get_paths()[0].vertices)
    ends = edge[np.isclose(edge[:, 0], 0.2), 1]
    assert (min(ends), max(ends)) == pytest.approx((low, high))
    assert linf.get_xlim()[0] == l2.get_xlim()[0] == 0
    assert l2.get_xlabel() == "radius, L2"
    assert points_of(l2.lines[0])[1][-1] == pytest.approx(100 * curved.accuracy["fmn"])
    assert "24 images" in texts(figure)


def test_an_attack_at_one_radius_is_a_point(tmp_path: Path, drawn: list[Figure]) -> None:
    model, split = linear_split()
    found = evaluate(model, split, {"fgsm": FGSM(norm="linf", eps=0.1)}, limit=None)
    plot_curve(found, tmp_path / "curve.svg")
    (axes,) = drawn[0].axes
    x, y = points_of(axes.lines[0])
    assert x == [0.1]
    assert y == pytest.approx([100 * found.accuracy["fgsm"]])
    with pytest.raises(InputError, match="no attack of this evaluation has a radius"):
        plot_curve(evaluate(model, split, {}, limit=None), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_transfer_matrix_has_its_numbers(tmp_path: Path, drawn: list[Figure]) -> None:
    counts = np.array([[0, 7], [5, 1]])
    plot_transfer(TransferMatrix(("member 0", "member 3"), counts, np.array([10, 9]), 10), tmp_path / "t.png")
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.texts] == ["0", "70", "50", "10"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "3"]
    assert "10 images" in axes.get_title(loc="left")


def test_members_by_class_have_their_numbers(tmp_path: Path, drawn: list[Figure]) -> None:
    flips = MemberFlips(np.array([[1, 0], [2, 0]]), np.array([[4, 4], [2, 0]]), np.array([4, 2]))
    plot_members(flips, tmp_path / "m.png", class_names=["cat", "dog"])
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.texts] == [
        "25",
        "0",
        "100",
    ]  # of the last there is none to count
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat (4)", "dog (2)"]
    assert "6 images" in axes.get_title(loc="left")
    with pytest.raises(InputError, match="name 2 classes, not 1"):
        plot_members(flips, tmp_path / "n.png", class_names=["cat"])


def test_the_panels_of_an_audit_say_on_how_many_images_they_stand(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    images, labels = images_of_classes(2)
    found = audit(Saturated(), split_of(images, labels), norm="linf", eps=0.05, limit=20, budget=TINY)
    plot_audit(found, tmp_path / "audit.png")
    left, right = drawn[0].axes
    assert left.get_title(loc="left").startswith("20 images")
    assert "the first 8 of the 20 images" in right.get_title(loc="left")
    assert right.get_xscale() == "linear"
    assert right.get_xlim()[0] == 0
    x, y = points_of(right.lines[0])
    assert x[:3] == pytest.approx([0, 0.025, 0.05])
    assert y[0] == 100  # the eight without an attack
    plot_audit(replace(found, images=8), tmp_path / "audit.png")
    assert drawn[1].axes[1].get_title(loc="left").startswith("The same 8 images")
