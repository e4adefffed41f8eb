"""The record of a run of an experiment: two small files with all that a table, or a dispute about it, needs.

    record.json    spec, number of parameters, accuracy on all test images, times, settings of the attacks, results of
                   the audits and transfer matrices; once all of it is there, also the hash of the spec that it answers
    outcomes.npz   for each attack: labels, predictions before and after, and the L2 distance of each image from its
                   attacked form; columns that attacks on the same images share are stored once

A new audit is appended to the earlier ones with its version, so that a stronger one replaces no number silently.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ecnn import files, runs
from ecnn.auditing.report import RESULT, load_audit
from ecnn.checks import check_entries, check_number, parse_eps
from ecnn.errors import InputError
from ecnn.evaluation import Rate
from ecnn.evaluation.provenance import describe
from ecnn.evaluation.records import read_all
from ecnn.experiment import AUDIT, CLEAN
from ecnn.models import resolve_recipe
from ecnn.spec import AuditTable, Spec, make_attack
from ecnn.training.checkpoints import load_checkpoint
from ecnn.training.loop import BEST

RECORD, OUTCOMES = "record.json", "outcomes.npz"
NETWORK = "network"
FORMAT, VERSION = "ecnn-record", 1
#: Folders in a run folder: audits by later versions, transfer matrices, outcomes on other images.
AUDITS, TRANSFERS, ELSEWHERE = "audits", "transfers", "on"
_COLUMNS = {"label": "uint16", "clean_prediction": "int16", "prediction": "int16", "l2": "float16"}
_SHARED = ("label", "clean_prediction")
_AUDIT_KEYS = (
    "verdict", "accuracy", "interval", "clean_accuracy", "plain_accuracy", "images", "norm", "eps", "budget",
    "seed", "environment",
)  # fmt: skip


def place_of(folder: Path, data: str | None) -> Path:
    """The folder for outcomes on the dataset `data`; for None, the run's own images, that is the run folder itself."""
    return folder if data is None else folder / ELSEWHERE / data


def write_record(folder: Path, *, arm: str, asked: Spec, times: dict[str, float]) -> None:
    """Writes both files from the contents of the run folder, and keeps the audits of an earlier record.

    Args:
        folder: the run folder.
        arm: its name.
        asked: the arm's whole spec; the record gets its hash if it holds all that is asked for.
        times: seconds by the name of what took them.
    """
    tensors, facts = load_checkpoint(folder / BEST)
    summary = runs.read_results(folder)
    places = [folder, *(path.parent for path in files.matching(folder, f"{ELSEWHERE}/*/eval"))]
    outcomes = {name: found for place in places for name, found in read_all(place).items() if name != CLEAN}
    transfers = {path.stem: files.read_json(path) for path in files.matching(folder, f"{TRANSFERS}/*.json")}
    buffers = {"centre.mean", "threshold"}
    record = Record(
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
            "audits": _audits(folder),
            **({"transfers": transfers} if transfers else {}),
            "asked": asked.content_hash,
        },
        {
            f"{name}.{column}": np.asarray(getattr(found, column)).astype(dtype)
            for name, found in outcomes.items()
            for column, dtype in _COLUMNS.items()
        },
    )
    if not covers(record, asked):
        del record.facts["asked"]
    save_record(folder, record)


def save_record(folder: Path, record: Record) -> None:
    """Writes both files: record.json last, since it marks the record as there, with checksums of the outcomes."""
    arrays = _without_repeats(record.arrays)
    files.write_arrays(folder / OUTCOMES, arrays, {"what": "outcomes of attacks, image by image"})
    files.write_json(folder / RECORD, {**record.facts, "outcomes": _digests(record.arrays)})


def _digests(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Checksums of the outcomes, by attack.

    There is one per attack, so that an old record.json still matches an outcomes.npz with more attacks: a kill between
    writing the two files leaves such a pair.
    """
    names = sorted({name.rpartition(".")[0] for name in arrays})
    return {
        name: hashlib.sha256(
            b"".join(arrays[f"{name}.{column}"].tobytes() for column in _COLUMNS)
        ).hexdigest()[:16]
        for name in names
    }


def _without_repeats(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns without those that only repeat the start of the longest of their kind; `_with_repeats` undoes it."""
    kept = dict(arrays)
    for column in _SHARED:
        longest = _longest(arrays, column)
        for name, values in arrays.items():
            is_shared = name.endswith(f".{column}") and name != longest
            if is_shared and np.array_equal(values, arrays[longest][: len(values)]):
                del kept[name]
    return kept


def _with_repeats(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All columns of every attack: a missing one is the start of the longest of its kind."""
    whole = dict(arrays)
    for attack, _, column in (name.rpartition(".") for name in arrays):
        for shared in _SHARED if column == "prediction" else ():
            if (longest := _longest(arrays, shared)) and f"{attack}.{shared}" not in arrays:
                whole[f"{attack}.{shared}"] = arrays[longest][: len(arrays[f"{attack}.prediction"])]
    return whole


def _longest(arrays: Mapping[str, np.ndarray], column: str) -> str:
    """The name of the longest column of a kind, the first of equally long ones; "" if there is none."""
    names = [name for name in arrays if name.endswith(f".{column}")]
    return max(names, key=lambda name: len(arrays[name]), default="")


def _audits(folder: Path) -> list[dict[str, Any]]:
    """The audits of the earlier record in their order, then those in the folder that it lacks, oldest version first."""
    before = files.read_json(folder / RECORD) if files.exists(folder / RECORD) else {}
    audits = [{**entry, "version": version_of(entry)} for entry in before.get("audits", [])]
    later = sorted(files.matching(folder, f"{AUDITS}/*/{RESULT}"), key=lambda path: int(path.parent.name))
    for path in (folder / RESULT, *later):
        if files.exists(path):
            found = load_audit(path).to_dict()
            entry = {**{key: found[key] for key in _AUDIT_KEYS}, "version": found["audit_version"]}
            audits += [entry] if entry not in audits else []
    return audits


def version_of(entry: Mapping[str, Any]) -> int:
    """The version of the audit that made an entry; version 1 did not write its number down."""
    return int(entry.get("version", 1))


def answers(found: Mapping[str, Any], table: AuditTable, images: int) -> bool:
    """Whether a saved audit has the norm, radius, budget and seed of the table, and so many images."""
    wanted = {"norm": table.norm, "eps": parse_eps(table.eps), "budget": table.budget, "seed": table.seed}
    return all(found[name] == value for name, value in {**wanted, "images": images}.items())


def covers(record: Record, asked: Spec) -> bool:
    """Whether the record holds every attack and the audit that the spec asks for, made with its settings."""
    made = {*record.facts["attacks"], *record.transfers}
    if not made >= set(asked.attacks) or (asked.audit is not None and record.audit is None):
        return False
    if "asked" in record.facts:
        return bool(record.facts["asked"] == asked.content_hash)
    return None not in descriptions(asked).values() and not made_otherwise(record, asked)


def made_otherwise(record: Record, asked: Spec) -> list[str]:
    """The parts of the record that were made with other settings than the spec's: NETWORK, AUDIT, names of attacks."""
    if record.facts.get("asked") == asked.content_hash:
        return []
    attacks, images = descriptions(asked), record.facts["test"]["images"]
    found = [] if _holds(record.facts["spec"], _network_of(asked)) else [NETWORK]
    for name, described in attacks.items():
        table = asked.attacks[name]
        limit, seen = table.get("limit", asked.data.test_limit), len(record.arrays.get(f"{name}.label", ()))
        is_other = described is not None and record.facts["attacks"].get(name, described) != described
        wanted = seen if "data" in table else images if limit is None else min(limit, images)
        if is_other or seen not in (0, wanted):
            found.append(name)
    audit = asked.audit
    if audit is not None and record.audit is not None:
        # How many images another dataset has is not known here.
        limit = audit.limit if audit.data is None else None
        if not answers(record.audit, audit, record.audit["images"] if limit is None else min(limit, images)):
            found.append(AUDIT)
    return found


def _network_of(asked: Spec) -> dict[str, Any]:
    """The tables of a spec that decide the network, in the form that the spec of a run has."""
    recipe = dataclasses.asdict(resolve_recipe(asked.train["recipe"])) if "recipe" in asked.train else {}
    train = {name: recipe[name] for name in ("epochs", "batch_size", "optimizer", "lr", "schedule") if recipe}
    given = asked.to_dict()
    given["train"] = {**train, **{key: value for key, value in asked.train.items() if key != "recipe"}}
    given["data"].pop("test_limit", None)
    return {name: given[name] for name in ("seed", "data", "code", "model", "train") if name in given}


def _holds(found: Any, wanted: Any) -> bool:
    """Whether the tables found have every wanted entry with the same value; they may have more."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(_holds(found.get(name), wanted[name]) for name in wanted)
    return bool(found == wanted)


def descriptions(asked: Spec) -> dict[str, Any]:
    """The settings of each attack as records store them; None if they depend on more than the attack's table."""
    return {
        name: None
        if {"source", "data", "members"} & set(table)
        else describe(make_attack({"kind": name, **table}))
        for name, table in asked.attacks.items()
    }


@dataclass(frozen=True, eq=False)
class Record:
    """The record of a run, as read from its two files.

    Attributes:
        facts: contents of record.json.
        arrays: columns of outcomes.npz, named "attack.column", with those that are stored only once repeated.
    """

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def audit(self) -> dict[str, Any] | None:
        """The latest audit; None if there is none."""
        audits = self.facts["audits"]
        return audits[-1] if audits else None

    @property
    def transfers(self) -> dict[str, Any]:
        """Transfer matrices between members by the name of the attack, as `TransferMatrix.to_json` writes them."""
        found: dict[str, Any] = self.facts.get("transfers", {})
        return found

    def rate(self, row: str) -> Rate | None:
        """Accuracy under the paper's protocol: images right after the attack, whether or not they were right before.

        For CLEAN it is the accuracy on all test images. None if the record does not have the attack.
        """
        if row == CLEAN:
            test = self.facts["test"]
            return Rate(round(test["accuracy"] * test["images"]), test["images"])
        if f"{row}.label" not in self.arrays:
            return None
        right = self.arrays[f"{row}.prediction"] == self.arrays[f"{row}.label"].astype(int)
        return Rate(int(right.sum()), len(right))

    def truth(self, sources: Sequence[str]) -> float | None:
        """The share of images that are right without an attack and after each of the sources; None if one is missing.

        The images are those that all sources share. For the audit as the only source it is the audited accuracy.
        """
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
        """Median L2 distance by which the attack moved the images that it broke; None if there are none."""
        if f"{row}.label" not in self.arrays:
            return None
        label = self.arrays[f"{row}.label"].astype(int)
        broken = (self.arrays[f"{row}.clean_prediction"] == label) & (
            self.arrays[f"{row}.prediction"] != label
        )
        return float(np.median(self.arrays[f"{row}.l2"][broken].astype(float))) if broken.any() else None


def read_record(folder: Path) -> Record | None:
    """The record in a folder; None if there is none, and InputError if it is damaged."""
    if not files.exists(folder / RECORD):
        return None
    try:
        return _read_record(folder)
    except InputError as error:
        raise InputError(
            f"{error} Delete {RECORD} there: if the run is still in the folder, the next start writes it again."
        ) from error


def _read_record(folder: Path) -> Record:
    facts = files.read_json(folder / RECORD)
    if not isinstance(facts, dict) or facts.get("format") != FORMAT or facts.get("version") != VERSION:
        raise InputError(f"{folder / RECORD} is not a record that this version of ecnn can read.")
    owner, tables = str(folder / RECORD), {"spec": dict, "test": dict, "times": dict, "attacks": dict}
    check_entries(owner, facts, {"arm": str, "parameters": int, **tables, "audits": list[dict[str, Any]]})
    check_entries(owner, facts["test"], {"accuracy": float, "images": int})
    for audit in facts["audits"]:
        check_entries(owner, audit, {"accuracy": float, "eps": float, "norm": str, "budget": str})
    for found in (facts["test"], *facts["audits"]):
        check_number(f"{owner}: accuracy", found["accuracy"], most=1)
    arrays, _ = files.read_arrays(folder / OUTCOMES)
    for name, values in arrays.items():
        dtype = _COLUMNS.get(name.rpartition(".")[2])
        if values.ndim != 1 or str(values.dtype) != dtype:
            raise InputError(
                f"{folder / OUTCOMES} is damaged: {name!r} is not a column of {dtype or 'outcomes'}."
            )
    whole = _with_repeats(arrays)
    check_entries(owner, facts, {"outcomes": dict[str, str] | None})
    known = facts.get("outcomes", {})
    try:
        is_own = known.items() <= _digests(whole).items()
    except KeyError:
        is_own = False
    if not is_own:
        raise InputError(f"{folder / OUTCOMES} does not belong to {folder / RECORD}.")
    return Record(facts, whole)
