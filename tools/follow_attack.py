"""Follows PGD on a network whose members have two outputs: does it change their difference or their common level?

Run: python tools/follow_attack.py RUN        measures on CPU in some minutes, writes results/common_level.json
     python tools/follow_attack.py            draws docs/images/common-level.png from it
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

import ecnn
from ecnn import files
from ecnn.attacks import PGD
from ecnn.plots.figures import ACCENT, INK, QUIET, save_figure

ROOT = Path(__file__).parents[1]
RECORD, FIGURE = ROOT / "results/common_level.json", ROOT / "docs/images/common-level.png"
IMAGES, STEPS, EPS, STEP_SIZE = 100, 200, 0.04, 0.02
ATTACKS = {"scores": "on the scores, as the paper", "linear": "on the members, without their common level"}


def measure(run: str) -> dict[str, dict[str, list[float]]]:
    """For each attack and each of `QUANTITIES`, its value at every iterate, summarised over images and members."""
    model = ecnn.load_model(run).eval()
    assert isinstance(model, ecnn.ECNN)
    images, labels = ecnn.load_data("cifar10", root=ROOT / "data").test[:IMAGES]
    right = torch.tensor(model.code.symbols)[labels].long().unsqueeze(-1)
    own = model.member_logits
    found: dict[str, dict[str, list[float]]] = {}

    for on in ATTACKS:
        rows: list[tuple[float, ...]] = []

        def follow(points: torch.Tensor, rows: list[tuple[float, ...]] = rows) -> torch.Tensor:
            logits = own(points)
            with torch.no_grad():
                rows.append(describe(model, logits, labels, right))
            return logits

        model.member_logits = follow  # type: ignore[method-assign, assignment]
        attack = PGD(
            norm="linf",
            eps=EPS,
            steps=STEPS,
            step_size=STEP_SIZE,
            loss="margin",
            loss_slack=50,
            on=on,
            keep="last",
        )
        with torch.no_grad():
            follow(images)
            # Given a generator, an attack also goes on with misclassified images, as the authors' program does.
            follow(attack(model, images, labels, generator=torch.Generator().manual_seed(0)))
        found[on] = dict(zip(QUANTITIES, np.round(rows, 4).T.tolist(), strict=True))
        model.member_logits = own  # type: ignore[method-assign]
    return found


QUANTITIES = ("level", "difference", "margin", "bits", "accuracy")


def describe(
    model: ecnn.ECNN, logits: torch.Tensor, labels: torch.Tensor, right: torch.Tensor
) -> tuple[float, ...]:
    """Medians of the common level's size, of right minus other output and of the score margin; right bits, accuracy."""
    preferred = logits.gather(2, right).squeeze(-1)
    difference = 2 * preferred - logits.sum(-1)
    scores = model.decode(logits)
    true = scores.gather(1, labels[:, None]).squeeze(1)
    margin = true - scores.scatter(1, labels[:, None], -torch.inf).amax(1)
    return (
        float(logits.mean(-1).abs().median()),
        float(difference.median()),
        float(margin.median()),
        float((difference > 0).float().mean()),
        float((margin > 0).float().mean()),
    )


def draw(found: dict[str, dict[str, list[float]]]) -> None:
    """Draws four small panels with one line per attack, and writes the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.1), layout="constrained", facecolor="white")
    panels = {
        "level": "common level of a member's outputs",
        "difference": "right output minus the other",
        "margin": "margin of the class scores",
        "accuracy": "images right",
    }
    for axes, (quantity, title) in zip(figure.subplots(1, 4), panels.items(), strict=True):
        for (on, words), colour in zip(ATTACKS.items(), (ACCENT, INK), strict=True):
            axes.plot(found[on][quantity], color=colour, label=f"PGD {words}")
        axes.set_title(title, fontsize=9, loc="left", color=INK)
        axes.set_xlabel("step", fontsize=8, color=QUIET)
        axes.tick_params(labelsize=8, colors=QUIET)
        axes.spines[["top", "right"]].set_visible(False)
        axes.axhline(0, color=QUIET, linewidth=0.6)
        if quantity == "accuracy":
            axes.set_ylim(-0.03, 1.03)
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, fontsize=9, frameon=False)
    save_figure(figure, FIGURE)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        files.write_json(RECORD, measure(sys.argv[1]))
    draw(files.read_json(RECORD))
