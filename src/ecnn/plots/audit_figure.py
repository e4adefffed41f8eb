"""Figure of an audit: accuracy after each attack, and under PGD as the radius grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecnn.checks import check_kind
from ecnn.plots.figures import ACCENT, INK, QUIET, save_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ecnn.auditing import Audit


def plot_audit(audit: Audit, path: str | os.PathLike[str]) -> Path:
    """Draws how the accuracy falls from attack to attack, with the claim, and under PGD as the radius grows.

    Args:
        audit: what `audit` returned.
        path: where to write; .png, .pdf or .svg.
    """
    from matplotlib.figure import Figure

    from ecnn.auditing import Audit

    check_kind("audit", audit, Audit, "what `audit` returned")
    radius = next((found.evidence for found in audit.findings if found.name == "radius"), {})
    curve: list[dict[str, Any]] = radius.get("curve", [])
    has_curve = len(curve) > 1
    steps = _audit_steps(audit)
    height = max(3.4, 1.7 + 0.34 * len(steps))
    figure = Figure(figsize=(10.4 if has_curve else 6.6, height), layout="constrained", facecolor="white")
    axes = figure.subplots(1, 2, width_ratios=[1.5, 1]) if has_curve else [figure.subplots()]
    # Without a claim the title is not green, because a trustworthy accuracy can be as low as 0 %.
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
        _draw_radius(axes[1], audit, curve, radius)
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
    if audit.certified is not None:
        proven = 100 * audit.certified.accuracy
        axes.axvline(proven, color="white", lw=3.2, zorder=3)  # so that the dots can be seen on dark bars
        axes.axvline(proven, color=INK, lw=1.8, ls=(0, (1, 1.2)), zorder=3, label="certified")
    quiet = len(audit.stages) + 1 - len(steps)
    others = f"  ({quiet} more attack{'s' if quiet > 1 else ''} broke nothing)" if quiet else ""
    axes.set(yticks=places, yticklabels=names, xlim=(0, 106), xlabel=f"accuracy left, %{others}")
    axes.set_ylim(max(len(steps), 5) - 0.5, -0.5)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=9, borderpad=0)
    axes.set_title(
        f"{audit.images:,} images, {audit.norm.capitalize()}, eps {audit.eps:.4g}", loc="left", fontsize=10
    )
    tidy(axes)


def _draw_radius(axes: Axes, audit: Audit, curve: list[dict[str, Any]], evidence: dict[str, Any]) -> None:
    """Draws the accuracy under PGD on the scores as the radius grows from 0. If it does not fall, PGD has failed.

    This diagnostic uses only the first images of the audit, so its accuracy at eps may differ from the other panel's.
    """
    radii, shares = [point["eps"] for point in curve], [100 * point["accuracy"] for point in curve]
    probed = evidence.get("probed")  # older audits lack it
    if probed:
        radii, shares = [0.0, *radii], [100 * evidence["images"] / probed, *shares]
    axes.plot(radii, shares, marker="o", ms=5, color=INK, lw=1.6, clip_on=False, zorder=3)
    axes.axvline(audit.eps, color=QUIET, lw=1, ls=(0, (1, 2)))
    axes.text(audit.eps, 100, f" eps {audit.eps:.3g}", color=QUIET, fontsize=9, va="top")
    axes.set(ylim=(0, 100), xlabel=f"radius, {audit.norm.capitalize()}")
    axes.set(ylabel="left by PGD on the scores, %")
    axes.set_xlim(left=0)
    if probed == audit.images:
        seen = f"The same {probed:,} images"
    else:
        some = f"{probed:,} of the {audit.images:,}" if probed else "few of the"
        seen = f"Only the first {some} images"
    axes.set_title(f"{seen}:\nmust fall toward 0 as the radius grows", loc="left", fontsize=10)
    tidy(axes)
