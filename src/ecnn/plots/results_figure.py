"""Figures of the paper's tables: the paper's numbers, ours and the audited ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ecnn.plots.evaluation_figures import draw_transfer
from ecnn.plots.figures import ACCENT, INK, save_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_bars(
    groups: Mapping[str, Sequence[tuple[str, float | None, float | None, float | None]]],
    path: str | os.PathLike[str],
    *,
    title: str,
) -> Path:
    """Draws, for each number of a table, the paper's value, ours under the same protocol, and the audited one.

    Args:
        groups: network -> (attack, paper, ours, audited) in per cent; None where there is none.
        path: where to write; .png, .pdf or .svg.
    """
    from matplotlib.figure import Figure

    rows = sum(len(bars) for bars in groups.values())
    figure = Figure(
        figsize=(7.6, 1.2 + 0.46 * rows + 0.36 * len(groups)), layout="constrained", facecolor="white"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    axes = figure.subplots()
    places, names, place = [], [], 0.0
    for network, bars in groups.items():
        axes.text(0.8, place - 0.1, network, fontsize=9.5, fontweight="bold", color=INK, va="center")
        place += 0.72
        for name, *values in bars:
            _draw_three(axes, place, values)
            places.append(place)
            names.append(name)
            place += 1.0
    axes.set(yticks=places, yticklabels=names, xlim=(0, 108), ylim=(place - 0.4, -0.5), xlabel="accuracy, %")
    drawn = [any(bar[kind] is not None for bars in groups.values() for bar in bars) for kind in (1, 2, 3)]
    for name, colour, is_drawn in zip(
        ("the paper", "ours, same protocol", "audited"), _THREE, drawn, strict=True
    ):
        if is_drawn:
            axes.barh(0, 0, color=colour, label=name)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8.5, borderpad=0)
    tidy(axes)
    return save_figure(figure, path)


def plot_transfers(matrices: Mapping[str, np.ndarray], path: str | os.PathLike[str], *, title: str) -> Path:
    """Draws transfer matrices between members side by side, with numbers in per cent; dark is accurate.

    Args:
        matrices: by title, (source, victim) accuracies between 0 and 1.
        path: where to write; .png, .pdf or .svg.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.8 + 4.6 * len(matrices), 5.0), layout="constrained", facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    for axes, (name, shares) in zip(
        figure.subplots(1, len(matrices), squeeze=False)[0], matrices.items(), strict=True
    ):
        draw_transfer(axes, shares, [str(member) for member in range(len(shares))])
        axes.set(xlabel="shown to member", ylabel="crafted on member", title=name)
    return save_figure(figure, path)


_THREE = ("#9aa5b1", "#486581", ACCENT)  # colours of the paper's values, ours and the audited ones


def _draw_three(axes: Axes, place: float, values: Sequence[float | None]) -> None:
    """Draws three bars around a place, each with its number in its colour, so that bars of 0 can be told apart."""
    for kind, (value, colour) in enumerate(zip(values, _THREE, strict=True)):
        if value is not None:
            middle = place + 0.28 * (kind - 1)
            axes.barh(middle, value, height=0.26, color=colour, zorder=2)
            axes.text(value + 0.8, middle, f"{value:.1f}", va="center", fontsize=7.5, color=colour)
