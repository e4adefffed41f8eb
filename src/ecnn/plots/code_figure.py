"""Figure of a code: its matrix, and histograms of the distances of rows and of columns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ecnn.checks import check_kind
from ecnn.codes import CodeMatrix
from ecnn.plots.figures import ACCENT, INK, PAPER, QUIET, names_of, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_code(
    code: CodeMatrix, path: str | os.PathLike[str], *, class_names: Sequence[str] | None = None
) -> Path:
    """Draws the matrix of a code, and histograms of its row and column distances with their bounds.

    Args:
        code: the code.
        path: where to write; .png, .pdf or .svg.
        class_names: one per class; their numbers if not given.
    """
    from matplotlib.figure import Figure

    check_kind("code", code, CodeMatrix, "a CodeMatrix")
    names = names_of(class_names, code.num_classes)
    report = code.report()
    matrix_width = float(np.clip(0.24 * code.code_length, 3.2, 9.0))
    height = float(np.clip(0.24 * code.num_classes, 2.9, 9.0))
    figure = Figure(figsize=(matrix_width + 4.6, height + 1.2), layout="constrained", facecolor="white")
    # Beside a tall matrix the histograms keep their shape, and the space below them stays empty.
    heights = [2.6, 2.6, height - 5.2] if height > 5.4 else [1.0, 1.0]
    grid = figure.add_gridspec(len(heights), 2, width_ratios=[matrix_width, 3.6], height_ratios=heights)
    _draw_matrix(figure.add_subplot(grid[:, 0]), code, names)
    _draw_row_distances(figure.add_subplot(grid[0, 1]), code, report.min_row_distance_bound)
    _draw_column_distances(figure.add_subplot(grid[1, 1]), code, report.min_column_distance_bound)
    return save_figure(figure, path)


def _draw_matrix(axes: Axes, code: CodeMatrix, names: list[str]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("symbols", [PAPER, "#6b9ac4", "#243b53"])
    axes.pcolormesh(
        code.symbols[::-1].astype(float),
        cmap=ramp,
        vmin=0,
        vmax=code.arity - 1,
        edgecolors="white",
        linewidth=1.0 if max(code.symbols.shape) <= 60 else 0.2,
    )
    step = max(1, -(-code.num_classes // 45))
    axes.set_yticks(
        np.arange(code.num_classes)[::step] + 0.5, names[::-1][::step] if step == 1 else _every(names, step)
    )
    axes.set_xticks(
        np.arange(0, code.code_length, 5) + 0.5, [str(task) for task in range(0, code.code_length, 5)]
    )
    axes.tick_params(length=0, colors=INK, labelsize=8)
    axes.set_xlabel("task", color=INK)
    axes.set_ylabel("class", color=INK)
    kind = "binary tasks" if code.arity == 2 else f"tasks with {code.arity} symbols"
    axes.set_title(
        f"{code.num_classes} classes, {code.code_length} {kind}", loc="left", color=INK, fontsize=11
    )
    axes.spines[:].set_visible(False)


def _every(names: list[str], step: int) -> list[str]:
    return [names[len(names) - 1 - index] for index in range(0, len(names), step)]


def _draw_row_distances(axes: Axes, code: CodeMatrix, bound: int) -> None:
    from matplotlib.ticker import MaxNLocator

    distances = code.row_distances[np.triu_indices(code.num_classes, k=1)]
    values, counts = np.unique(distances, return_counts=True)
    axes.bar(values, counts, width=0.8, color="#486581")
    axes.set_xlabel("Hamming distance between two rows", color=INK)
    title = f"rows: smallest {code.min_row_distance}, bound {bound}"
    low, high = min(values.min(), bound), max(values.max(), bound)
    axes.set_xlim(low - 1.2, high + 1.2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish_distances(axes, bound, title)


def _draw_column_distances(axes: Axes, code: CodeMatrix, bound: float) -> None:
    if code.code_length < 2:
        axes.set_axis_off()
        return
    distances = code.column_distances[np.triu_indices(code.code_length, k=1)]
    low, high = distances.min(), max(distances.max(), bound)
    margin = max(0.1 * (high - low), 0.02)
    axes.hist(distances, bins=np.linspace(max(low - margin, 0), high + margin, 41).tolist(), color="#486581")
    axes.set_xlabel("variation of information between two columns (nats)", color=INK)
    _finish_distances(axes, bound, f"columns: smallest {code.min_column_distance:.3f}, bound {bound:.3f}")


def _finish_distances(axes: Axes, bound: float, title: str) -> None:
    """Marks the bound on the smallest distance, and formats the axes."""
    axes.axvline(bound, color=ACCENT, linewidth=1.5, linestyle=(0, (4, 2)))
    axes.margins(y=0.2)
    side, label = ("right", "bound ") if bound > sum(axes.get_xlim()) / 2 else ("left", " bound")
    axes.text(
        bound, 1, label, color=ACCENT, fontsize=8, transform=axes.get_xaxis_transform(), va="top", ha=side
    )
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.set_ylabel("pairs", color=INK)
    axes.tick_params(colors=QUIET, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
