"""The numbers of a table, from the records of runs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ecnn.evaluation import Rate
from ecnn.experiment import AUDIT, CLEAN, Experiment
from ecnn.pipeline.recording import read_record, version_of


@dataclass(frozen=True)
class Cell:
    """One number of a table: ours, the paper's and the audited one.

    Attributes:
        row: "clean" or the name of an attack.
        arm: name of the column.
        rates: per seed, under the paper's protocol: right after the attack, whatever it was before.
        paper: the paper's value in per cent; None where it has none.
        audited: per seed, robust accuracy found with care, 0 to 1; empty where it is not defined or not yet there.
        verdicts: per seed, the audit's verdict, where the audited value is the audit's.
        versions: of the audits behind `audited`, each once.
        median_l2: how far C&W of our own moves an image to break it, in the middle, over seeds; None for other rows.
    """

    row: str
    arm: str
    rates: tuple[Rate, ...]
    paper: float | None
    audited: tuple[float, ...]
    verdicts: tuple[str, ...] = ()
    versions: tuple[int, ...] = ()
    median_l2: float | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """What to know of the audited value: the version of the audit that made it, and whether it is sure."""
        named = tuple(f"audit {version}" for version in self.versions)
        return (*named, "inconclusive") if "inconclusive" in self.verdicts else named

    @property
    def ours(self) -> float | None:
        """Mean over seeds in per cent; None before anything was run."""
        return 100 * float(np.mean([rate.accuracy for rate in self.rates])) if self.rates else None

    @property
    def truth(self) -> float | None:
        """The audited value, mean over seeds, in per cent."""
        return 100 * float(np.mean(self.audited)) if self.audited else None


def read_cells(experiment: Experiment, out: Path) -> list[Cell]:
    """Every number of the table, from the records of the runs alone: no model, no images, no GPU."""
    cells = []
    for arm in experiment.arms:
        folders = [out / experiment.name / arm.name / str(seed) for seed in arm.seeds]
        found = [record for folder in folders if (record := read_record(folder)) is not None]
        for row in experiment.rows:
            if row != CLEAN and row not in arm.spec.attacks:
                continue
            rates = [rate for records in found if (rate := records.rate(row)) is not None]
            sources = experiment.audited_by(row, arm)
            truths = [truth for records in found if (truth := records.truth(sources)) is not None]
            audits = [records.audit for records in found if AUDIT in sources and records.audit]
            own = [source for source in sources if arm.spec.attacks.get(source, {}).get("kind") == "cw"]
            lengths = [records.median_l2(source) for records in found for source in own[-1:]]
            known = [length for length in lengths if length is not None]
            cells.append(
                Cell(
                    row,
                    arm.name,
                    tuple(rates),
                    arm.paper.get(row),
                    tuple(truths),
                    tuple(audit["verdict"] for audit in audits),
                    tuple(sorted({version_of(audit) for audit in audits})),
                    float(np.median(known)) if known else None,
                )
            )
    return cells


def table_text(experiment: Experiment, cells: Sequence[Cell]) -> str:
    """The table for a terminal: ours, the paper's, the difference, the audited value, images, flags."""
    head = ("arm", "row", "ours", "seeds", "paper", "differs", "audited", "images", "flags")
    rows = [
        (
            cell.arm,
            cell.row,
            number(cell.ours),
            str(len(cell.rates)),
            number(cell.paper),
            number(None if None in (cell.ours, cell.paper) else cell.ours - cell.paper, sign=True),  # type: ignore[operator]
            number(cell.truth),
            f"{cell.rates[0].n:,}" if cell.rates else "-",
            ", ".join(cell.flags),
        )
        for cell in cells
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(
            text.ljust(width) if column in (0, 1, len(head) - 1) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
    title = f"{experiment.title} ({experiment.paper}), per cent"
    return "\n".join([title, *(line.rstrip() for line in lines)])


def number(value: float | None, *, sign: bool = False) -> str:
    """A value in per cent as tables print it; a dash for none."""
    return "-" if value is None else f"{value:+.1f}" if sign else f"{value:.1f}"
