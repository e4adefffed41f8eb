"""Figures of an evaluation: accuracy against the radius, transfer matrices, and members that attacks made wrong."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ecnn.checks import check_kind
from ecnn.errors import InputError
from ecnn.plots.figures import INK, QUIET, names_of, save_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ecnn.evaluation import Curve, Evaluation, MemberFlips, TransferMatrix

#: Colours of lines, which also differ in lightness.
LINES = ("#c2410c", "#1d4e89", "#15803d", "#7e22ce", "#b45309", "#0f766e", "#be185d", "#4b5563")
_MOST_NUMBERS = 40  # cells in a row or column that still have room for a number


def plot_curve(evaluation: Evaluation, path: str | os.PathLike[str]) -> Path:
    """Draws the accuracy against the radius for every attack, with 95 % intervals; one panel per norm.

    An attack that was run at a single radius is a point, because its accuracy at smaller radii is unknown.

    Args:
        evaluation: what `evaluate` returned, of attacks with radii (`eps=`) or of smallest distance.
        path: where to write; .png, .pdf or .svg.
    """
    from matplotlib.figure import Figure

    from ecnn.evaluation import Evaluation

    check_kind("evaluation", evaluation, Evaluation, "what `evaluate` returned")
    curves = evaluation.curves()
    if not curves:
        raise InputError("no attack of this evaluation has a radius: evaluate with eps=[...].")
    figure = Figure(figsize=(1.6 + 4.8 * len(curves), 4.2), layout="constrained", facecolor="white")
    for axes, (norm, attacks) in zip(
        figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
    ):
        for number, (name, curve) in enumerate(attacks.items()):
            _draw_curve(axes, name, curve, LINES[number % len(LINES)])
        # A margin for intervals that end at 0 or 100 %, whose lines have some thickness.
        axes.set(xlabel=f"radius, {norm.capitalize()}", ylabel="right before and after, %", ylim=(-2, 102))
        axes.set_xlim(left=0)
        axes.set_title(f"{len(evaluation):,} images, 95 % intervals", loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=9)
        tidy(axes)
    return save_figure(figure, path)


def _draw_curve(axes: Axes, name: str, curve: Curve, colour: str) -> None:
    shares = np.array(
        [[100 * float(rate), *(100 * end for end in rate.interval)] for rate in curve.cumulative]
    )
    if len(curve.eps) > 2:
        axes.plot(curve.eps, shares[:, 0], marker="o", ms=3.5, lw=1.6, color=colour, label=name, zorder=3)
        axes.fill_between(curve.eps, shares[:, 1], shares[:, 2], color=colour, alpha=0.13, lw=0)
        return
    middle, low, high = shares[-1]
    reach = [[middle - low], [high - middle]]
    axes.errorbar(curve.eps[-1], middle, reach, fmt="o", ms=5, capsize=3, color=colour, label=name, zorder=3)


def plot_transfer(matrix: TransferMatrix, path: str | os.PathLike[str], *, title: str = "") -> Path:
    """Draws the accuracy of each model or member on images attacked on each other one, in per cent; dark is robust.

    Args:
        matrix: what `member_transfer` or `model_transfer` returned.
        path: where to write; .png, .pdf or .svg.
        title: a line above the figure's own title, which has the number of images.
    """
    from matplotlib.figure import Figure

    from ecnn.evaluation import TransferMatrix

    check_kind("matrix", matrix, TransferMatrix, "what `member_transfer` or `model_transfer` returned")
    check_kind("title", title, str, "text")
    side = float(np.clip(0.42 * len(matrix.names), 3.0, 12.0))
    figure = Figure(figsize=(side + 1.8, side + 1.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    names = [name.removeprefix("member ") for name in matrix.names]
    draw_transfer(axes, matrix.accuracy, names)
    are_members = all(name.startswith("member ") for name in matrix.names)
    axes.set(xlabel=f"shown to {'member' if are_members else 'model'}")
    axes.set(ylabel=f"crafted on {'member' if are_members else 'model'}")
    head = f"{title}\n" if title else ""
    axes.set_title(f"{head}Per cent right, {matrix.n:,} images", loc="left", fontsize=10, color=INK)
    return save_figure(figure, path)


def draw_transfer(axes: Axes, shares: np.ndarray, names: Sequence[str]) -> None:
    """Draws a transfer matrix (source, victim) of accuracies from 0 to 1, with its numbers in per cent."""
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    _write_numbers(axes, shares, dark_from=0.6)
    axes.set_xticks(range(shares.shape[1]), names, rotation=90 if max(map(len, names)) > 3 else 0)
    axes.set_yticks(range(shares.shape[0]), names)
    _finish_matrix(axes)


def plot_members(
    flips: MemberFlips, path: str | os.PathLike[str], *, class_names: Sequence[str] | None = None
) -> Path:
    """Draws how often an attack made each member wrong, by class: per cent of the images on which it was right before.

    Args:
        flips: what `member_flips` returned.
        path: where to write; .png, .pdf or .svg.
        class_names: one per class; their numbers if not given.
    """
    from matplotlib.figure import Figure

    from ecnn.evaluation import MemberFlips

    check_kind("flips", flips, MemberFlips, "what `member_flips` returned")
    classes, members = flips.share.shape
    names = names_of(class_names, classes)
    size = (float(np.clip(0.34 * members, 4.0, 14.0)) + 2.0, float(np.clip(0.3 * classes, 2.0, 12.0)) + 1.4)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = figure.subplots()
    shown: Any = np.ma.masked_invalid(flips.share)
    axes.imshow(shown, cmap="Oranges", vmin=0, vmax=1, aspect="auto")
    axes.set_facecolor("#e4e7eb")  # cells without such images
    _write_numbers(axes, flips.share, dark_from=0.7)
    axes.set_xticks(range(members), [str(member) for member in range(members)])
    axes.set_yticks(
        range(classes), [f"{name} ({count})" for name, count in zip(names, flips.images, strict=True)]
    )
    axes.set(xlabel="member", ylabel="class (images)")
    axes.set_title(
        f"Members turned by the attack, % of images on which they were right; {flips.n:,} images",
        loc="left",
        fontsize=10,
        color=INK,
    )
    _finish_matrix(axes)
    return save_figure(figure, path)


def _write_numbers(axes: Axes, shares: np.ndarray, *, dark_from: float) -> None:
    """Writes the per cent into every cell, unless the matrix is too large for them to be read."""
    if max(shares.shape) > _MOST_NUMBERS:
        return
    for (row, column), share in np.ndenumerate(shares):
        if not np.isnan(share):
            ink = "white" if share > dark_from else INK
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7.5, color=ink)


def _finish_matrix(axes: Axes) -> None:
    axes.tick_params(length=0, colors=INK, labelsize=8, labelcolor=INK)
    axes.spines[:].set_color(QUIET)
    axes.spines[:].set_linewidth(0.5)
