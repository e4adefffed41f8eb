"""The numbers of a table, from the records of runs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ecnn.evaluation import Rate
from ecnn.experiment import AUDIT, CLEAN, Arm, Experiment
from ecnn.pipeline.recording import NETWORK, Record, made_otherwise, read_record, version_of


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
        audited_images: how many images these saw, where that is another number than of the row's.
        is_of_other_settings: a record was left out, because it was made otherwise than the experiment says now.
        median_l2: how far C&W of our own moves an image to break it, in the middle, over seeds; None for other rows.
    """

    row: str
    arm: str
    rates: tuple[Rate, ...]
    paper: float | None
    audited: tuple[float, ...]
    verdicts: tuple[str, ...] = ()
    versions: tuple[int, ...] = ()
    audited_images: tuple[int, ...] = ()
    is_of_other_settings: bool = False
    median_l2: float | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """What to know of the audited value: the version of the audit that made it, and whether it is sure."""
        named = [f"audit {version}" for version in self.versions]
        named += [f"audited on {images:,}" for images in self.audited_images]
        named += ["inconclusive"] if "inconclusive" in self.verdicts else []
        return (*named, "of other settings") if self.is_of_other_settings else tuple(named)

    @property
    def ours(self) -> float | None:
        """Mean over seeds in per cent; None before anything was run."""
        return 100 * float(np.mean([rate.accuracy for rate in self.rates])) if self.rates else None

    @property
    def differs(self) -> float | None:
        """How many points ours lies above the paper's; None where one of them is not there."""
        return None if self.ours is None or self.paper is None else self.ours - self.paper

    @property
    def truth(self) -> float | None:
        """The audited value, mean over seeds, in per cent."""
        return 100 * float(np.mean(self.audited)) if self.audited else None


def read_cells(experiment: Experiment, out: Path) -> list[Cell]:
    """Every number of the table, from the records of the runs alone: no model, no images, no GPU.

    What was made otherwise than the experiment says now is left out.
    """
    cells = []
    for arm in experiment.arms:
        folders = {seed: out / experiment.name / arm.name / str(seed) for seed in arm.seeds}
        found = [
            (record, made_otherwise(record, arm.spec_for(seed)))
            for seed, folder in folders.items()
            if (record := read_record(folder)) is not None
        ]
        rows = [row for row in experiment.rows if row == CLEAN or row in arm.spec.attacks]
        cells += [_cell(experiment, arm, row, found) for row in rows]
    return cells


def _cell(experiment: Experiment, arm: Arm, row: str, found: Sequence[tuple[Record, Sequence[str]]]) -> Cell:
    """One number, from records and what each of them holds that was made otherwise."""
    sources = experiment.audited_by(row, arm)
    records = [record for record, others in found if not {NETWORK, row} & set(others)]
    rates = [rate for record in records if (rate := record.rate(row)) is not None]
    trusted = [record for record, others in found if not {NETWORK, *sources} & set(others)]
    truths = [truth for record in trusted if (truth := record.truth(sources)) is not None]
    audits = [record.audit for record in trusted if AUDIT in sources and record.audit]
    own = [source for source in sources if arm.spec.attacks.get(source, {}).get("kind") == "cw"]
    lengths = [record.median_l2(source) for record in trusted for source in own[-1:]]
    known = [length for length in lengths if length is not None]
    images = {rate.n for rate in rates}
    return Cell(
        row=row,
        arm=arm.name,
        rates=tuple(rates),
        paper=arm.paper.get(row),
        audited=tuple(truths),
        verdicts=tuple(audit["verdict"] for audit in audits),
        versions=tuple(sorted({version_of(audit) for audit in audits})),
        audited_images=tuple(sorted({audit["images"] for audit in audits} - images)) if images else (),
        is_of_other_settings=len(records) < len(found) or len(trusted) < len(found),
        median_l2=float(np.median(known)) if known else None,
    )


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
            number(cell.differs, sign=True),
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
