"""The numbers of an experiment's table, read from the records of its runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ecnn import files
from ecnn.errors import InputError
from ecnn.evaluation import Rate
from ecnn.experiment import AUDIT, CLEAN, Arm, Experiment
from ecnn.pipeline.recording import NETWORK, RECORD, Record, made_otherwise, read_record, version_of


@dataclass(frozen=True)
class Cell:
    """One cell of a table: our accuracy, the paper's and the audited one.

    Attributes:
        row: "clean" or the name of an attack.
        arm: name of the column.
        rates: per seed, accuracy under the paper's protocol: images that are right after the attack, whether or not
            they were right before.
        paper: the paper's value in per cent; None where it has none.
        audited: per seed, robust accuracy from 0 to 1, by the audit or by the attacks that the experiment names for the
            row, taken together; empty where it names none, or where they were not run yet.
        verdicts: per seed, the audit's verdict; empty where the audited value does not come from an audit.
        versions: of the audits behind `audited`, without repeats.
        audited_images: their numbers of images, where these differ from the row's.
        is_of_other_settings: whether a record was left out because its settings are not those of the experiment now.
        median_l2: the median L2 distance at which our own C&W breaks an image (median over seeds); None for other rows.
        is_damaged: whether a record of the arm was left out because it cannot be read.
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
    is_damaged: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """Remarks: versions of the audit, its number of images, an inconclusive verdict, other settings, damage."""
        named = [f"audit {version}" for version in self.versions]
        named += [f"audited on {images:,}" for images in self.audited_images]
        named += ["inconclusive"] if "inconclusive" in self.verdicts else []
        named += ["of other settings"] if self.is_of_other_settings else []
        return (*named, "a damaged record") if self.is_damaged else tuple(named)

    @property
    def ours(self) -> float | None:
        """Mean accuracy over seeds, in per cent; None before any run."""
        return 100 * float(np.mean([rate.accuracy for rate in self.rates])) if self.rates else None

    @property
    def differs(self) -> float | None:
        """Our value minus the paper's, in percentage points; None if either is missing."""
        return None if self.ours is None or self.paper is None else self.ours - self.paper

    @property
    def truth(self) -> float | None:
        """Mean of the audited values over seeds, in per cent; None if there are none."""
        return 100 * float(np.mean(self.audited)) if self.audited else None


def read_cells(experiment: Experiment, out: Path) -> list[Cell]:
    """The cells of an experiment's table, read from the records of its runs: needs no model, no images and no GPU.

    Numbers whose settings are not those of the experiment now are left out.
    """
    cells = []
    for arm in experiment.arms:
        folders = {seed: out / experiment.name / arm.name / str(seed) for seed in arm.seeds}
        found, is_damaged = [], False
        for seed, folder in folders.items():
            if not files.exists(folder / RECORD):  # raises where the folder cannot be read
                continue
            try:
                record = read_record(folder)
            except InputError:  # running the arm tells what is damaged
                is_damaged = True
                continue
            if record is not None:
                found.append((record, made_otherwise(record, arm.spec_for(seed))))
        rows = [row for row in experiment.rows if row == CLEAN or row in arm.spec.attacks]
        made = [_cell(experiment, arm, row, found) for row in rows]
        cells += [dataclasses.replace(cell, is_damaged=is_damaged) for cell in made]
    return cells


def _cell(experiment: Experiment, arm: Arm, row: str, found: Sequence[tuple[Record, Sequence[str]]]) -> Cell:
    """One cell; `found` has the record of each seed, with what `made_otherwise` says of it."""
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
    """The table as text for a terminal: our value, the paper's, the difference, the audited value, images, flags."""
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
    """A value in per cent as tables print it, with one decimal; a dash for None."""
    return "-" if value is None else f"{value:+.1f}" if sign else f"{value:.1f}"
