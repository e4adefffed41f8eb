"""Makes the page of results from the records of experiments: our numbers beside the paper's and the audited ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ecnn.auditing import AUDIT_VERSION
from ecnn.evaluation import TransferMatrix
from ecnn.experiment import CLEAN, PARAMETERS, Experiment, experiments, load_experiment
from ecnn.pipeline.cells import Cell, number, read_cells
from ecnn.pipeline.costing import Sizes, estimate_tasks
from ecnn.pipeline.recording import read_record
from ecnn.pipeline.reproducing import Task, tasks_of
from ecnn.plots import plot_bars, plot_transfers

_NOWHERE = Path("/nonexistent")  # a folder without runs: cost estimates then count everything
_CORNER = 4  # members that the paper's figure shows
# Percentage points from the paper up to which a clean accuracy, and one under attack, counts as close.
_CLEAN_POINTS, _POINTS = 2.5, 5

HEAD = """# Results: the paper's numbers, ours, and the audited ones

`tools/make_results.py` makes this page from the records in `results/`, one for each network and seed.
`ecnn reproduce NAME` runs an experiment again.

- **paper** is the number that the paper prints.
- **ours** is measured as the paper describes and, where it is silent, as the authors' program for CIFAR-10 does it: its
  network, schedule, attack, loss, step size and number of steps, and the last iterate, but with true labels, and with
  the checkpoint chosen on validation images. Notes say where training differs. It is the share of images that are right
  after the attack, whether or not they were right before, and a mean over seeds.
- **audited** is the share of images that are right without an attack and under every attack of ours. For attacks in a
  ball it is the worst case of the audit at the same radius. For C&W and blind-spot it counts what withstands the
  paper's C&W and ours together (the text says where points of PGD count too), with the median L2 distance of ours. For
  JSMA it counts what withstands the paper's JSMA and ours together, and `sparse_pgd` where an arm has it, within the
  same share of pixels. 0.0 % by an older version of the audit cannot become less.
- A dash is a number that does not exist.
- The tables are computed from the records. Some numbers in the text below a table come from training logs and reports
  of audits, which are too large to keep here, and from [the log](log.md).
- GPU times are sums over runs that shared one H200; a network that another table has trained costs nothing again. Plans
  are computed from the number of operations, for all networks of a table and complete audits.
"""


def results_page(out: Path, *, figures: str) -> str:
    """The whole page as Markdown.

    Args:
        out: the folder of all records.
        figures: the folder of the figures, relative to the page.
    """
    found = {name: read_cells(load_experiment(name), out) for name in experiments()}
    parts, waiting, sizes = [HEAD, _overview(found)], [], Sizes()
    for name, cells in found.items():
        experiment = load_experiment(name)
        if any(cell.rates for cell in cells):
            planned = sum(
                cost.minutes for cost in estimate_tasks(tasks_of(experiment, _NOWHERE), sizes=sizes)
            )
            parts.append(_section(experiment, cells, out, figures, planned))
        else:
            waiting.append(name)
    if waiting:
        parts.append("## Not run yet\n\n" + ", ".join(f"`{name}`" for name in waiting) + ".\n")
    return "\n".join(parts)


def _overview(found: Mapping[str, Sequence[Cell]]) -> str:
    """The overview: how many of the paper's numbers are measured, and the highest accuracy under attack per table."""
    printed = {name: [cell for cell in cells if cell.paper is not None] for name, cells in found.items()}
    every = [cell for cells in printed.values() for cell in cells]
    count = _measured(every)
    how_many = f"Of the paper's {len(every)} accuracies {count} are measured."
    if count == len(every):
        how_many = f"All {count} accuracies of the paper are measured."
    if (different := _different(printed)) < len(every):
        how_many += f" Since some networks stand in several tables, {different} of them are different."
    lines = [
        how_many,
        "",
        *_in_short(every),
        "The highest accuracy under attack in each table, in per cent, for each column by itself:",
        "",
        _row(("table", "measured", "paper", "ours", "audited")),
        "|---" + 4 * "|---:" + "|",
    ]
    for name, cells in printed.items():
        attacked = [cell for cell in cells if cell.row != CLEAN and cell.rates]
        if attacked:
            title = load_experiment(name).title
            best = (
                number(max((value for value in values if value is not None), default=None))
                for values in zip(*((cell.paper, cell.ours, cell.truth) for cell in attacked), strict=True)
            )
            measured = f"{_measured(cells)} of {len(cells)}"
            lines.append(_row((f"[{title}](#{_anchor(title)})", measured, *best)))
    return "\n".join([*lines, "", *_older(found), ""])


def _different(printed: Mapping[str, Sequence[Cell]]) -> int:
    """How many of the paper's numbers are left when the same network under the same attack counts once."""
    found = set()
    for name, cells in printed.items():
        experiment = load_experiment(name)
        networks = {
            arm.name: Task(experiment, arm, arm.seeds[0], _NOWHERE).network.content_hash
            for arm in experiment.arms
        }
        found |= {(networks[cell.arm], cell.row, cell.paper) for cell in cells}
    return len(found)


def _in_short(printed: Sequence[Cell]) -> list[str]:
    """Three counts: clean accuracies near the paper's, accuracies under attack far from it, audited values up to 1 %.

    Empty while there are no numbers for one of them.
    """
    clean = [cell.differs for cell in printed if cell.row == CLEAN and cell.differs is not None]
    attacked = [cell for cell in printed if cell.row != CLEAN]
    differs = [cell.differs for cell in attacked if cell.differs is not None]
    audited = [cell.truth for cell in attacked if cell.truth is not None]
    if not clean or not differs or not audited:
        return []
    near = sum(abs(points) <= _CLEAN_POINTS for points in clean)
    below, above = (sum(sign * points > _POINTS for points in differs) for sign in (-1, 1))
    none = sum(value <= 1 for value in audited)
    unbounded = sum(cell.truth is not None and cell.median_l2 is not None for cell in attacked)
    return [
        f"- **Clean accuracy**: {near} of {len(clean)} are within {_CLEAN_POINTS} points of the paper.",
        f"- **Under the paper's own attacks**: of {len(differs)}, {below} are more than {_POINTS} points below the "
        f"paper, and {above} more than {_POINTS} points above.",
        f"- **Audited**: {none} of {len(audited)} are at most 1 %. {unbounded} of the {len(audited)} are of attacks "
        "without a bound on their distance, which break any network in the end: there the distance says more.",
        "",
    ]


def _older(found: Mapping[str, Sequence[Cell]]) -> list[str]:
    """A sentence on values above 0 by an older version of the audit, since a stronger audit may still lower these."""
    older = [
        f"{number(cell.truth)} % ({experiment.title}, {experiment.arm(cell.arm).title}, {cell.row})"
        for experiment, cells in ((load_experiment(name), cells) for name, cells in found.items())
        for cell in cells
        if cell.truth and cell.versions and min(cell.versions) < AUDIT_VERSION
    ]
    return (
        [f"Above 0 and audited by an older version than {AUDIT_VERSION}: {', '.join(older)}."]
        if older
        else []
    )


def _measured(cells: Sequence[Cell]) -> int:
    return sum(bool(cell.rates) for cell in cells)


def _anchor(title: str) -> str:
    """The anchor that Markdown renderers give to a heading."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def draw_results(out: Path, folder: Path) -> list[Path]:
    """Draws one figure per experiment that has numbers into the folder, and returns their paths."""
    drawn = []
    for name in experiments():
        experiment = load_experiment(name)
        cells = [cell for cell in read_cells(experiment, out) if cell.rates and cell.row != CLEAN]
        groups = {
            arm.title: [
                (cell.row, cell.paper, cell.ours, cell.truth) for cell in cells if cell.arm == arm.name
            ]
            for arm in experiment.arms
            if any(cell.arm == arm.name for cell in cells)
        }
        matrices = {title: found.accuracy for title, found in _transfers(experiment, out).items()}
        if groups:
            drawn.append(plot_bars(groups, folder / f"{name}.png", title=experiment.title))
        elif matrices:
            drawn.append(plot_transfers(matrices, folder / f"{name}.png", title=experiment.title))
    return drawn


def _section(experiment: Experiment, cells: Sequence[Cell], out: Path, figures: str, planned: float) -> str:
    lines = [f"## {experiment.title}", ""]
    source = (
        f"`{experiment.paper}`"
        if experiment.paper.startswith(("tab:", "fig:"))
        else experiment.paper.capitalize()
    )
    lines += [f"{source}; `ecnn reproduce {experiment.name}`. {experiment.note}", ""]
    head = ("network", "attack", "paper", "ours", "seeds", "differs", "audited", "images")
    lines += [_row(head), "|---|---" + 6 * "|---:" + "|"]
    for arm in experiment.arms:
        own = [cell for cell in cells if cell.arm == arm.name and cell.rates]
        # Only the first row of a network has its name.
        lines += [_row((arm.title if cell is own[0] else "", *_figures(cell))) for cell in own]
    missing = [arm.title for arm in experiment.arms if not any(c.rates for c in cells if c.arm == arm.name)]
    versions = sorted({version for cell in cells for version in cell.versions})
    lines += ["", *_arm_notes(experiment, out, versions, planned)]
    lines += [f"Not run yet: {'; '.join(missing)}.", ""] if missing else []
    lines += _transfer_lines(_transfers(experiment, out))
    has_figure = any(cell.rates and cell.row != CLEAN for cell in cells) or _transfers(experiment, out)
    if has_figure:
        lines += [f"![{experiment.title}]({figures}/{experiment.name}.png)", ""]
    return "\n".join([*lines, *(f"{remark}\n" for remark in experiment.remarks)])


def _transfers(experiment: Experiment, out: Path) -> dict[str, TransferMatrix]:
    """Transfer matrices between members by the title of the arm, each of the arm's first seed."""
    found = {}
    for arm in experiment.arms:
        record = read_record(out / experiment.name / arm.name / str(arm.seeds[0]))
        for values in record.transfers.values() if record is not None else ():
            found[arm.title] = TransferMatrix.from_json(values)
    return found


def _transfer_lines(matrices: Mapping[str, TransferMatrix]) -> list[str]:
    """Markdown of the transfer matrices: means over all members, and the corner that the paper's figure shows."""
    lines = []
    for title, matrix in matrices.items():
        share = 100 * matrix.accuracy
        own, others = np.diag(share).mean(), share[~np.eye(len(share), dtype=bool)].mean()
        lines += [
            f"{title}, {matrix.n:,} images, per cent right; rows: crafted on, columns: shown to. Of all {len(share)} "
            f"members: {100 * matrix.clean_accuracy.mean():.1f} without an attack, {own:.1f} on what was crafted on "
            f"the member itself, {others:.1f} on what was crafted on another.",
            "",
            _row(("", *matrix.names[:_CORNER])),
            "|---" + min(_CORNER, len(share)) * "|---:" + "|",
        ]
        lines += [
            _row((name, *(f"{value:.1f}" for value in row[:_CORNER])))
            for name, row in zip(matrix.names[:_CORNER], share, strict=False)
        ]
        lines.append("")
    return lines


def _figures(cell: Cell) -> tuple[str, ...]:
    audited = number(cell.truth)
    if cell.median_l2 is not None:
        audited += f" (L2 {cell.median_l2:.3f})"
    if "inconclusive" in cell.verdicts:
        audited += " (inconclusive)"
    values = (number(cell.paper), number(cell.ours), str(len(cell.rates)), number(cell.differs, sign=True))
    return (cell.row, *values, audited, f"{cell.rates[0].n:,}")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _arm_notes(experiment: Experiment, out: Path, versions: Sequence[int], planned: float) -> list[str]:
    """A Markdown list: parameters and note of each arm, versions of the audit, GPU time spent and planned."""
    lines, seconds = [], {"GPU": 0.0, "CPU": 0.0}
    for arm in experiment.arms:
        records = [read_record(out / experiment.name / arm.name / str(seed)) for seed in arm.seeds]
        found = [record for record in records if record is not None]
        for record in found:
            seconds["GPU" if record.facts["environment"].get("cuda") else "CPU"] += sum(
                record.facts["times"].values()
            )
        if not found:
            continue
        count, paper = found[0].facts["parameters"], arm.paper.get(PARAMETERS)
        same = (
            "" if paper is None else " (the paper's count)" if paper == count else f" (the paper: {paper:,})"
        )
        note = f" {arm.note}" if arm.note else ""
        lines.append(f"- {arm.title}: {count:,} parameters{same}.{note}")
    if versions:
        lines.append(f"- Audits by version {' and '.join(map(str, versions))}.")
    spent = f"{seconds['GPU'] / 60:.0f} min" + (
        f", and {seconds['CPU'] / 60:.0f} min of a CPU" if seconds["CPU"] else ""
    )
    lines.append(f"- GPU time: {spent}; planned: {planned:.0f} min.")
    return [*lines, ""]
