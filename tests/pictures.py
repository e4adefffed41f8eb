"""Pictures of the page and the report: every run of the browser tests takes them, `make pictures` for the README."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image

#: Those that README shows.
COMMITTED = Path(__file__).parents[1] / "docs" / "images"
#: Where the tests leave theirs.
FOLDER = Path(os.environ.get("ECNN_PICTURES") or Path(__file__).parents[1] / "out" / "pictures")
#: What `ecnn quickstart` left, to be shown; None shows networks that the tests have trained for a second.
DEMO = os.environ.get("ECNN_DEMO")
_CELL = (8, 20)  # pixels, down and across
_BAND, _SHIFT = 30, 10  # cells


def keep(name: str, taken: bytes) -> Path:
    """Writes a screenshot as a PNG with a palette, which is three times smaller: a page has few colours."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    picture = Image.open(io.BytesIO(taken)).convert("RGB")
    palette = picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    palette.save(FOLDER / name, optimize=True)
    return FOLDER / name


def check(taken: Path) -> None:
    """That the committed picture of this name has the same width, nearly the same height, and the same layout."""
    committed = COMMITTED / taken.name
    sizes = [Image.open(path).size for path in (taken, committed)]
    assert sizes[0][0] == sizes[1][0], f"{committed} is of another width than {taken}: make pictures"
    assert 0.8 < sizes[0][1] / sizes[1][1] < 1.25, (
        f"{committed} is of another height than {taken}: make pictures"
    )
    alike = likeness(
        taken, committed
    )  # at most 0.35 with another picture of ours, or with the same one mirrored
    assert alike > 0.5, f"{committed} is laid out otherwise than {taken}, {alike:.2f} of 1: make pictures"


def likeness(one: Path, other: Path) -> float:
    """How much alike two pictures of one width are laid out, 1 at most.

    Fonts and figures differ from machine to machine, and a sentence may take a line more; titles, tables and charts
    stay in their order. So each band of 240 pixels is looked for near its place in the other picture: the correlation
    of where there is ink, in cells, at the best shift of up to 80 pixels. Of all bands, the median.
    """
    first, second = _ink(one), _ink(other)
    found = []
    for top in range(0, min(len(first), len(second)) - _BAND + 1, _BAND):
        places = range(max(0, top - _SHIFT), min(len(second) - _BAND, top + _SHIFT) + 1)
        band = first[top : top + _BAND]
        found.append(max(_correlation(band, second[place : place + _BAND]) for place in places))
    return float(np.median(found))


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Pearson's, 0 where nothing varies."""
    apart, other_apart = one - one.mean(), other - other.mean()
    lengths = np.linalg.norm(apart) * np.linalg.norm(other_apart)
    return float((apart * other_apart).sum() / lengths) if lengths else 0.0


def _ink(path: Path) -> np.ndarray:
    """(row, column) share of each cell that is not of the colour of most pixels."""
    pixels = np.asarray(Image.open(path).convert("L")).astype(int)
    paper = np.bincount(pixels.ravel()).argmax()
    drawn = (np.abs(pixels - paper) > 24).astype(float)
    height, width = _CELL
    rows, columns = drawn.shape[0] // height, drawn.shape[1] // width
    cells = drawn[: rows * height, : columns * width].reshape(rows, height, columns, width)
    return np.asarray(cells.mean(axis=(1, 3)))
