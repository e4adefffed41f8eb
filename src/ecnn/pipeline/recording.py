"""What is kept of a finished run of an experiment: two small files that a table, and a dispute, need.

    record.json    spec, parameters, accuracy on all test images, times, attacks and audits, with their figures
    outcomes.npz   of each attack: labels, predictions before and after, and how far the image was moved (L2)

An audit is added to those before it, so that a stronger one replaces no number silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ecnn import files, runs
from ecnn.auditing import load_audit
from ecnn.errors import InputError
from ecnn.evaluation import Rate
from ecnn.evaluation.records import read_all
from ecnn.experiment import AUDIT, CLEAN
from ecnn.training.checkpoints import load_checkpoint
from ecnn.training.loop import BEST

RECORD, OUTCOMES = "record.json", "outcomes.npz"
FORMAT, VERSION = "ecnn-record", 1
_COLUMNS = {"label": "uint16", "clean_prediction": "int16", "prediction": "int16", "l2": "float16"}
_AUDIT_KEYS = (
    "verdict", "accuracy", "interval", "clean_accuracy", "plain_accuracy", "images", "norm", "eps", "budget",
    "seed", "environment",
)  # fmt: skip


def write_record(folder: Path, *, arm: str, times: dict[str, float]) -> None:
    """Writes both files from what the run folder holds; audits that an earlier record has stay in it."""
    tensors, facts = load_checkpoint(folder / BEST)
    summary = files.read_json(folder / runs.RESULTS)
    outcomes = {name: found for name, found in read_all(folder).items() if name != CLEAN}
    buffers = {"centre.mean", "threshold"}
    before = files.read_json(folder / RECORD) if (folder / RECORD).exists() else {}
    audits = list(before.get("audits", []))
    if (folder / "audit.json").exists():
        found = load_audit(folder / "audit.json").to_dict()
        entry = {key: found[key] for key in _AUDIT_KEYS}
        audits = [*(known for known in audits if known != entry), entry]
    files.write_json(
        folder / RECORD,
        {
            "format": FORMAT,
            "version": VERSION,
            "arm": arm,
            "spec": files.read_toml(folder / runs.SPEC),
            "parameters": sum(
                value.numel()
                for name, value in tensors.items()
                if name not in buffers and "running_" not in name and "num_batches" not in name
            ),
            "best_epoch": facts["best_epoch"],
            "test": {"accuracy": summary["test_accuracy"], "images": summary["images"]},
            "times": times,
            "environment": files.read_json(folder / runs.ENVIRONMENT),
            "attacks": {name: found.about["attack"] for name, found in outcomes.items()},
            "audits": audits,
        },
    )
    arrays = {
        f"{name}.{column}": np.asarray(getattr(found, column)).astype(dtype)
        for name, found in outcomes.items()
        for column, dtype in _COLUMNS.items()
    }
    files.write_arrays(folder / OUTCOMES, arrays, {"what": "outcomes of attacks, image by image"})


@dataclass(frozen=True, eq=False)
class Record:
    """A finished run as its two files tell it.

    Attributes:
        facts: what record.json holds.
        arrays: what outcomes.npz holds.
    """

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def audit(self) -> dict[str, Any] | None:
        """The latest audit."""
        audits = self.facts["audits"]
        return audits[-1] if audits else None

    def rate(self, row: str) -> Rate | None:
        """Under the paper's protocol: right after the attack, whatever it was before; None if it was not made."""
        if row == CLEAN:
            test = self.facts["test"]
            return Rate(round(test["accuracy"] * test["images"]), test["images"])
        if f"{row}.label" not in self.arrays:
            return None
        right = self.arrays[f"{row}.prediction"] == self.arrays[f"{row}.label"].astype(int)
        return Rate(int(right.sum()), len(right))

    def truth(self, sources: Sequence[str]) -> float | None:
        """The share that is right when clean and survives all sources; None unless all of them are there."""
        if tuple(sources) == (AUDIT,):
            return None if self.audit is None else float(self.audit["accuracy"])
        if not sources or any(f"{name}.label" not in self.arrays for name in sources):
            return None
        fewest = min(len(self.arrays[f"{name}.label"]) for name in sources)
        alive = np.ones(fewest, dtype=bool)
        for name in sources:
            label = self.arrays[f"{name}.label"].astype(int)
            for column in ("clean_prediction", "prediction"):
                alive &= (self.arrays[f"{name}.{column}"] == label)[:fewest]
        return float(alive.mean())

    def median_l2(self, row: str) -> float | None:
        """How far the attack moved the images that it broke, in the middle; None where there are none."""
        if f"{row}.label" not in self.arrays:
            return None
        label = self.arrays[f"{row}.label"].astype(int)
        broken = (self.arrays[f"{row}.clean_prediction"] == label) & (
            self.arrays[f"{row}.prediction"] != label
        )
        return float(np.median(self.arrays[f"{row}.l2"][broken].astype(float))) if broken.any() else None


def read_record(folder: Path) -> Record | None:
    """The record in a folder; None where there is none."""
    if not (folder / RECORD).exists():
        return None
    facts = files.read_json(folder / RECORD)
    if not isinstance(facts, dict) or facts.get("format") != FORMAT or facts.get("version") != VERSION:
        raise InputError(f"{folder / RECORD} is no record of this version of ecnn.")
    arrays, _ = files.read_arrays(folder / OUTCOMES)
    return Record(facts, arrays)
