"""What all figures share: colours, and how one is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ecnn import files
from ecnn.checks import check_choice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET, ACCENT, PAPER = "#1f2933", "#7b8794", "#c2410c", "#f5f1e8"
FORMATS = (".png", ".pdf", ".svg")


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes a figure, all or nothing."""
    check_figure_path(path)
    return files.write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=160))


def check_figure_path(path: str | os.PathLike[str]) -> None:
    """Raises InputError unless a figure can be written in the format that the suffix asks for."""
    check_choice(f"the suffix of {path}", Path(path).suffix.lower(), FORMATS)


def tidy(axes: Axes) -> None:
    """Leaves only the axes that are read."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
