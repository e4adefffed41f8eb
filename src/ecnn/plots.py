"""Figures, written where the caller says; the format follows the suffix."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ecnn import files
from ecnn.checks import check_choice, check_kind
from ecnn.codes import CodeMatrix
from ecnn.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ecnn.auditing import Audit

INK, QUIET, ACCENT, PAPER = "#1f2933", "#7b8794", "#c2410c", "#f5f1e8"
FORMATS = (".png", ".pdf", ".svg")


def plot_code(
    code: CodeMatrix, path: str | os.PathLike[str], *, class_names: Sequence[str] | None = None
) -> Path:
    """Draws the matrix, and how far apart its rows and columns are beside the bounds.

    Args:
        path: where to write; .png, .pdf or .svg.
        class_names: one per class; their numbers if not given.
    """
    from matplotlib.figure import Figure

    check_kind("code", code, CodeMatrix, "a CodeMatrix")
    names = [str(name) for name in (class_names if class_names is not None else range(code.num_classes))]
    if len(names) != code.num_classes:
        raise InputError(f"class_names must name {code.num_classes} classes, not {len(names)}.")
    report = code.report()
    matrix_width = float(np.clip(0.24 * code.code_length, 3.2, 9.0))
    height = float(np.clip(0.24 * code.num_classes, 2.9, 9.0))
    figure = Figure(figsize=(matrix_width + 4.6, height + 1.2), layout="constrained", facecolor="white")
    # Beside a tall matrix the histograms keep their shape and leave the rest empty.
    heights = [2.6, 2.6, height - 5.2] if height > 5.4 else [1.0, 1.0]
    grid = figure.add_gridspec(len(heights), 2, width_ratios=[matrix_width, 3.6], height_ratios=heights)
    _draw_matrix(figure.add_subplot(grid[:, 0]), code, names)
    _draw_row_distances(figure.add_subplot(grid[0, 1]), code, report.min_row_distance_bound)
    _draw_column_distances(figure.add_subplot(grid[1, 1]), code, report.min_column_distance_bound)
    return save_figure(figure, path)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes a figure, all or nothing."""
    check_figure_path(path)
    return files.write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=160))


def check_figure_path(path: str | os.PathLike[str]) -> None:
    """Raises InputError unless a figure can be written in the format that the suffix asks for."""
    check_choice(f"the suffix of {path}", Path(path).suffix.lower(), FORMATS)


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
    """Marks the largest value that the smallest distance could have, and tidies the axes."""
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


def plot_audit(audit: Audit, path: str | os.PathLike[str]) -> Path:
    """Draws how the accuracy falls from attack to attack beside the claim, and under PGD as the radius grows.

    Args:
        path: where to write; .png, .pdf or .svg.
    """
    from matplotlib.figure import Figure

    from ecnn.auditing import Audit

    check_kind("audit", audit, Audit, "what `audit` returned")
    curve: list[dict[str, Any]] = next(
        (found.evidence.get("curve", []) for found in audit.findings if found.name == "radius"), []
    )
    has_curve = len(curve) > 1
    steps = _audit_steps(audit)
    height = max(3.4, 1.7 + 0.34 * len(steps))
    figure = Figure(figsize=(10.4 if has_curve else 6.6, height), layout="constrained", facecolor="white")
    axes = figure.subplots(1, 2, width_ratios=[1.5, 1]) if has_curve else [figure.subplots()]
    # Without a claim there is nothing to be green about: 0 % can be trusted too.
    colours = {"believable": "#15803d", "trustworthy": INK, "inconclusive": "#b45309"}
    colour = colours.get(audit.verdict, ACCENT)
    title = audit.headline.capitalize()
    if audit.claimed is not None:
        title += f": claimed {100 * audit.claimed:.1f} %, audited {100 * audit.accuracy:.1f} %"
    figure.suptitle(
        title,
        x=0.01,
        ha="left",
        color=colour,
        fontsize=13,
        fontweight="bold",
    )
    _draw_steps(axes[0], audit, steps, colour)
    if has_curve:
        _draw_radius(axes[1], audit, curve)
    return save_figure(figure, path)


def _audit_steps(audit: Audit) -> list[tuple[str, float]]:
    """(name, accuracy) without an attack, after the plain attack, and after each later one that broke an image."""
    telling = [stage for position, stage in enumerate(audit.stages) if position == 0 or stage.broken]
    return [("no attack", audit.clean_accuracy), *((stage.name, stage.accuracy) for stage in telling)]


def _draw_steps(axes: Axes, audit: Audit, steps: list[tuple[str, float]], colour: str) -> None:
    names, shares = [name for name, _ in steps], [100 * share for _, share in steps]
    places = list(range(len(steps)))
    colours = [QUIET, *[INK] * (len(steps) - 2), colour][-len(steps) :]
    axes.barh(places, shares, color=colours, height=0.62, zorder=2)
    for place, share in zip(places, shares, strict=True):
        box = {"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 0.8}
        axes.text(share + 1.2, place, f"{share:.1f}", va="center", fontsize=9, color=INK, bbox=box, zorder=4)
    low, high = (100 * bound for bound in audit.interval)
    axes.axvspan(low, high, color=colour, alpha=0.14, lw=0, zorder=1, label="audited, 95 % interval")
    for label, asked in (("claim", audit.claimed), ("minimum", audit.min_accuracy)):
        if asked is not None:
            axes.axvline(100 * asked, color=ACCENT, lw=1.6, ls=(0, (4, 2)), zorder=3, label=label)
    quiet = len(audit.stages) + 1 - len(steps)
    others = f"  ({quiet} more attack{'s' if quiet > 1 else ''} broke nothing)" if quiet else ""
    axes.set(yticks=places, yticklabels=names, xlim=(0, 106), xlabel=f"accuracy left, %{others}")
    axes.set_ylim(max(len(steps), 5) - 0.5, -0.5)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=9, borderpad=0)
    axes.set_title(
        f"{audit.images:,} images, {audit.norm.capitalize()}, eps {audit.eps:.4g}", loc="left", fontsize=10
    )
    _tidy(axes)


def _draw_radius(axes: Axes, audit: Audit, curve: list[dict[str, Any]]) -> None:
    """Accuracy under PGD on the scores as the radius grows; where it does not fall, the attack has failed."""
    radii, shares = [point["eps"] for point in curve], [100 * point["accuracy"] for point in curve]
    axes.plot(radii, shares, marker="o", ms=5, color=INK, lw=1.6, clip_on=False, zorder=3)
    axes.axvline(audit.eps, color=QUIET, lw=1, ls=(0, (1, 2)))
    axes.set(xscale="log", ylim=(0, 100), xlabel="radius", ylabel="left by PGD on the scores, %")
    axes.set_xticks(radii, [f"{radius:.3g}" for radius in radii])
    axes.minorticks_off()
    axes.set_title("Must fall toward 0 as the radius grows", loc="left", fontsize=10)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)


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
    for name, colour in zip(("the paper", "ours, same protocol", "audited"), _THREE, strict=True):
        axes.barh(0, 0, color=colour, label=name)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8.5, borderpad=0)
    _tidy(axes)
    return save_figure(figure, path)


def plot_transfers(matrices: Mapping[str, np.ndarray], path: str | os.PathLike[str], *, title: str) -> Path:
    """Draws matrices of transfer side by side, dark where the victim is right; numbers are per cent.

    Args:
        matrices: by their titles, (source, victim) shares between 0 and 1.
        path: where to write; .png, .pdf or .svg.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.8 + 4.6 * len(matrices), 5.0), layout="constrained", facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    for axes, (name, shares) in zip(
        figure.subplots(1, len(matrices), squeeze=False)[0], matrices.items(), strict=True
    ):
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for (row, column), share in np.ndenumerate(shares):
            ink = "white" if share > 0.6 else INK
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=ink)
        axes.set(xlabel="shown to member", ylabel="crafted on member", title=name)
        axes.set_xticks(range(shares.shape[1]))
        axes.set_yticks(range(shares.shape[0]))
        axes.tick_params(length=0, colors=INK, labelsize=8)
        axes.spines[:].set_visible(False)
    return save_figure(figure, path)


_THREE = ("#9aa5b1", "#486581", ACCENT)  # of the paper, of ours, of the audit


def _draw_three(axes: Axes, place: float, values: Sequence[float | None]) -> None:
    """Three bars around a place, each with its number in its colour, so that a zero can be told from another."""
    for kind, (value, colour) in enumerate(zip(values, _THREE, strict=True)):
        if value is not None:
            middle = place + 0.28 * (kind - 1)
            axes.barh(middle, value, height=0.26, color=colour, zorder=2)
            axes.text(value + 0.8, middle, f"{value:.1f}", va="center", fontsize=7.5, color=colour)
