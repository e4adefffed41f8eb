"""Shared by all figures: colours, checks of names and paths, and writing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ecnn import files
from ecnn.checks import check_choice, shown
from ecnn.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET, ACCENT, PAPER = "#1f2933", "#7b8794", "#c2410c", "#f5f1e8"
FORMATS = (".png", ".pdf", ".svg")


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes a figure atomically; returns the path."""
    check_figure_path(path)
    return files.write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=160))


def names_of(class_names: Sequence[str] | None, count: int) -> list[str]:
    """The names of `count` classes; their numbers if none are given. InputError if there are not as many names."""
    if class_names is None:
        return [str(number) for number in range(count)]
    if isinstance(class_names, str) or not isinstance(class_names, Sequence):
        raise InputError(f"class_names must be a list of names, not {shown(class_names)}.")
    if len(class_names) != count:
        raise InputError(f"class_names must name {count} classes, not {len(class_names)}.")
    return [str(name) for name in class_names]


def check_figure_path(path: str | os.PathLike[str]) -> None:
    """Raises InputError unless a figure can be written in the format that the suffix asks for."""
    check_choice(f"the suffix of {path}", Path(path).suffix.lower(), FORMATS)


def tidy(axes: Axes) -> None:
    """Removes the top and right borders of the axes and formats the ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
