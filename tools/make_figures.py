"""Draws the figures of docs/concepts.md from a small network that it trains on the embedded digits.

Run: python tools/make_figures.py; writes to docs/images, in about half a minute.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from matplotlib.figure import Figure
from torch import Tensor

import ecnn
from ecnn.attacks import PGD
from ecnn.plots.figures import ACCENT, INK, PAPER, QUIET, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGES = Path(__file__).parents[1] / "docs" / "images"
FIRST, SECOND = PAPER, "#243b53"  # the two symbols, as in `plot_code`
EPS = 0.12


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    code, data = ecnn.load_code("10x30"), ecnn.load_data("digits")
    ecnn.plot_code(ecnn.load_code("10x15"), IMAGES / "concepts-code.png", class_names=data.class_names)
    model = ecnn.ECNN(code, 1, depth=8, width=6, mean=data.mean_image)
    ecnn.fit(model, data.train, val=data.val, recipe="small", epochs=15, seed=0)
    images, labels = data.test[:60]
    attack = PGD(norm="linf", eps=EPS, steps=40, step_size=EPS / 8, on="members")
    attacked = attack.run(model, images, labels)
    # The image with the fewest wrong members, of those that the attack breaks.
    wrong = (bits_of(model, images) != symbols_of(code)[labels]).sum(dim=1)
    wrong[~attacked.success] = code.code_length
    one = int(wrong.argmin())
    clean, broken, label = images[one], attacked.images[one], int(labels[one])
    draw({"a picture": clean}, model, label, IMAGES / "concepts-members.png")
    draw({"as it was": clean, "attacked": broken}, model, label, IMAGES / "concepts-attack.png")


def symbols_of(code: ecnn.CodeMatrix) -> Tensor:
    """(class, task) symbols of the code, 0 or 1."""
    return torch.from_numpy(code.symbols.astype("int64"))


def bits_of(model: ecnn.ECNN, images: Tensor) -> Tensor:
    """(batch, member) symbol that each member predicts, 0 or 1."""
    with torch.no_grad():
        return (model.member_logits(images) > 0).long()


def draw(pictures: dict[str, Tensor], model: ecnn.ECNN, label: int, path: Path) -> None:
    """Draws a row per picture: the picture, the members' answers above the codeword of its class, the distances."""
    figure = Figure(figsize=(10.5, 2.3 * len(pictures) + 0.3), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(len(pictures), 3, width_ratios=[1.5, 6.2, 2.6])
    for row, (title, picture) in enumerate(pictures.items()):
        answers = bits_of(model, picture[None])[0]
        draw_picture(figure.add_subplot(grid[row, 0]), picture, title)
        draw_answers(figure.add_subplot(grid[row, 1]), answers, symbols_of(model.code)[label], label)
        draw_distances(
            figure.add_subplot(grid[row, 2]), (answers != symbols_of(model.code)).sum(dim=1), label
        )
    save_figure(figure, path)


def draw_picture(axes: Axes, picture: Tensor, title: str) -> None:
    axes.imshow(picture[0], cmap="gray_r", vmin=0, vmax=1)
    axes.set_axis_off()
    axes.set_title(title, fontsize=10, color=INK, loc="left")


def draw_answers(axes: Axes, answers: Tensor, codeword: Tensor, label: int) -> None:
    for line, row in enumerate((answers, codeword)):
        for task, symbol in enumerate(row.tolist()):
            is_wrong = line == 0 and symbol != int(codeword[task])
            axes.bar(
                task,
                0.8,
                bottom=line - 0.4,
                width=0.86,
                color=SECOND if symbol else FIRST,
                edgecolor=ACCENT if is_wrong else QUIET,
                linewidth=2.4 if is_wrong else 0.4,
            )
    wrong = int((answers != codeword).sum())
    axes.set_yticks([0, 1], ["members say", f"codeword of {label}"])
    axes.set_xticks(range(0, len(codeword), 5))
    axes.set_xlim(-0.6, len(codeword) - 0.4)
    axes.set_ylim(-0.6, 1.6)
    axes.set_xlabel("member", fontsize=9, color=INK)
    axes.set_title(f"{wrong} of {len(codeword)} members are wrong", fontsize=10, color=INK, loc="left")
    tidy(axes)


def draw_distances(axes: Axes, distances: Tensor, label: int) -> None:
    nearest = int(distances.argmin())
    colours = [QUIET] * len(distances)
    colours[nearest] = SECOND if nearest == label else ACCENT
    axes.bar(range(len(distances)), distances.tolist(), color=colours)
    axes.set_xticks(range(len(distances)))
    axes.set_xlabel("class", fontsize=9, color=INK)
    axes.set_ylim(0, 24)
    axes.set_yticks([0, 8, 16, 24])
    axes.set_ylabel("distance", fontsize=9, color=INK)
    axes.set_title(f"the codeword of {nearest} is nearest", fontsize=10, color=INK, loc="left")
    tidy(axes)


def tidy(axes: Axes) -> None:
    axes.tick_params(length=0, colors=INK, labelsize=8)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    main()
