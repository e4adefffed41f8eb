"""What is kept of a finished run of an experiment: two small files that a table, and a dispute, need.

    record.json    spec, parameters, accuracy on all test images, times, attacks, audits and transfer matrices, with
                   their figures; and, once all is there, the hash of what the arm asked for
    outcomes.npz   of each attack: labels, predictions before and after, and how far the image was moved (L2); what
                   attacks on the same images have in common stands there once

An audit is added to those before it with its version, so that a stronger one replaces no number silently.
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
#: In a run folder: the audit, audits by later versions, transfer matrices, outcomes on other images.
AUDITS, TRANSFERS, ELSEWHERE = "audits", "transfers", "on"
_COLUMNS = {"label": "uint16", "clean_prediction": "int16", "prediction": "int16", "l2": "float16"}
_SHARED = ("label", "clean_prediction")
_AUDIT_KEYS = (
    "verdict", "accuracy", "interval", "clean_accuracy", "plain_accuracy", "images", "norm", "eps", "budget",
    "seed", "environment",
)  # fmt: skip


def place_of(folder: Path, data: str | None) -> Path:
    """Where outcomes on those images are kept: the run folder itself, unless they are other images than its own."""
    return folder if data is None else folder / ELSEWHERE / data


def write_record(folder: Path, *, arm: str, asked: Spec, times: dict[str, float]) -> None:
    """Writes both files from what the run folder holds; audits that an earlier record has stay in it."""
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
    """Writes both files, the one that is looked for last; it says which outcomes are its own."""
    arrays = _without_repeats(record.arrays)
    files.write_arrays(folder / OUTCOMES, arrays, {"what": "outcomes of attacks, image by image"})
    files.write_json(folder / RECORD, {**record.facts, "outcomes": _digests(record.arrays)})


def _digests(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """A checksum of the outcomes of every attack.

    One for each, so that a record still fits outcomes to which a kill before the next record has added others.
    """
    names = sorted({name.rpartition(".")[0] for name in arrays})
    return {
        name: hashlib.sha256(
            b"".join(arrays[f"{name}.{column}"].tobytes() for column in _COLUMNS)
        ).hexdigest()[:16]
        for name in names
    }


def _without_repeats(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns but those that the longest of their kind begins with; `_with_repeats` has them again."""
    kept = dict(arrays)
    for column in _SHARED:
        longest = _longest(arrays, column)
        for name, values in arrays.items():
            is_shared = name.endswith(f".{column}") and name != longest
            if is_shared and np.array_equal(values, arrays[longest][: len(values)]):
                del kept[name]
    return kept


def _with_repeats(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns of every attack; one that is not there is the beginning of the longest of its kind."""
    whole = dict(arrays)
    for attack, _, column in (name.rpartition(".") for name in arrays):
        for shared in _SHARED if column == "prediction" else ():
            if (longest := _longest(arrays, shared)) and f"{attack}.{shared}" not in arrays:
                whole[f"{attack}.{shared}"] = arrays[longest][: len(arrays[f"{attack}.prediction"])]
    return whole


def _longest(arrays: Mapping[str, np.ndarray], column: str) -> str:
    """The name of the longest column of a kind, the first of equals; "" where there is none."""
    names = [name for name in arrays if name.endswith(f".{column}")]
    return max(names, key=lambda name: len(arrays[name]), default="")


def _audits(folder: Path) -> list[dict[str, Any]]:
    """The audits of an earlier record in their order, then those in the folder that it does not have."""
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
    """The version of the audit that made an entry; the first one was not written down."""
    return int(entry.get("version", 1))


def answers(found: Mapping[str, Any], table: AuditTable, images: int) -> bool:
    """Whether an audit, as its file or a record tells it, is of that ball and size."""
    wanted = {"norm": table.norm, "eps": parse_eps(table.eps), "budget": table.budget, "seed": table.seed}
    return all(found[name] == value for name, value in {**wanted, "images": images}.items())


def covers(record: Record, asked: Spec) -> bool:
    """Whether the record was made for what is asked, and holds all of it."""
    made = {*record.facts["attacks"], *record.transfers}
    if not made >= set(asked.attacks) or (asked.audit is not None and record.audit is None):
        return False
    if "asked" in record.facts:
        return bool(record.facts["asked"] == asked.content_hash)
    return None not in descriptions(asked).values() and not made_otherwise(record, asked)


def made_otherwise(record: Record, asked: Spec) -> list[str]:
    """What the record holds that was made in another way than is asked: NETWORK, AUDIT, names of attacks."""
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
        limit = audit.limit if audit.data is None else None  # of other images the number is not known here
        if not answers(record.audit, audit, record.audit["images"] if limit is None else min(limit, images)):
            found.append(AUDIT)
    return found


def _network_of(asked: Spec) -> dict[str, Any]:
    """What decides the network, as the spec of a run has it."""
    recipe = dataclasses.asdict(resolve_recipe(asked.train["recipe"])) if "recipe" in asked.train else {}
    train = {name: recipe[name] for name in ("epochs", "batch_size", "optimizer", "lr", "schedule") if recipe}
    given = asked.to_dict()
    given["train"] = {**train, **{key: value for key, value in asked.train.items() if key != "recipe"}}
    given["data"].pop("test_limit", None)
    return {name: given[name] for name in ("seed", "data", "code", "model", "train") if name in given}


def _holds(found: Any, wanted: Any) -> bool:
    """Whether all that is wanted is in tables that were found, whatever else they hold."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(_holds(found.get(name), wanted[name]) for name in wanted)
    return bool(found == wanted)


def descriptions(asked: Spec) -> dict[str, Any]:
    """What records say of each attack; None where that depends on more than its table."""
    return {
        name: None
        if {"source", "data", "members"} & set(table)
        else describe(make_attack({"kind": name, **table}))
        for name, table in asked.attacks.items()
    }


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

    @property
    def transfers(self) -> dict[str, Any]:
        """Matrices of transfer between members by the name of the attack, as `TransferMatrix.to_json` has them."""
        found: dict[str, Any] = self.facts.get("transfers", {})
        return found

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
        raise InputError(f"{folder / RECORD} is no record of this version of ecnn.")
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
        raise InputError(f"{folder / OUTCOMES} is of another record than {folder / RECORD}.")
    return Record(facts, whole)
