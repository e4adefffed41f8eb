"""The record of a run of an experiment: two small files with all that a table, or a dispute about it, needs.

    record.json    spec, number of parameters, accuracy on all test images, times, settings of the attacks, results of
                   the audits and transfer matrices; once all of it is there, also the hash of the spec that it answers
    outcomes.npz   for each attack: labels, predictions before and after, and the L2 distance of each image from its
                   attacked form; columns that attacks on the same images share are stored once

A new audit is appended to the earlier ones with its version, so that a stronger one replaces no number silently.

While a run is made, asked.json in its folder keeps for each part (the network, each attack, the audit) a hash of the
settings that it was made with. The record takes them over, so that no number is ever printed for other settings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ecnn import files, runs
from ecnn.auditing.report import RESULT, load_audit
from ecnn.checks import check_entries, check_number, parse_eps
from ecnn.data import NAMES
from ecnn.errors import InputError
from ecnn.evaluation import Rate
from ecnn.evaluation.provenance import describe
from ecnn.evaluation.records import file_stem, read_all
from ecnn.experiment import AUDIT, CLEAN
from ecnn.models import resolve_recipe
from ecnn.pipeline.training import SIGNS
from ecnn.recipes import MEMBER_OPTIONS
from ecnn.spec import AuditTable, Spec, make_attack
from ecnn.training.checkpoints import load_checkpoint
from ecnn.training.loop import BEST

RECORD, OUTCOMES, ASKED = "record.json", "outcomes.npz", "asked.json"
NETWORK = "network"
FORMAT, VERSION = "ecnn-record", 1
#: Folders in a run folder: audits by later versions, transfer matrices, outcomes on other images.
AUDITS, TRANSFERS, ELSEWHERE = "audits", "transfers", "on"
_COLUMNS = {"label": "uint16", "clean_prediction": "int16", "prediction": "int16", "l2": "float16"}
_SHARED = ("label", "clean_prediction")
# Entries of a recipe that a kind of model or a dataset may replace where the spec does not give them.
_LEFT_TO_KINDS = ("objective", "objective_options", "flip", *MEMBER_OPTIONS)
_SETTINGS_KINDS: dict[str, Any] = {NETWORK: str | None, AUDIT: str | None, "attacks": dict[str, str] | None}
_AUDIT_KEYS = (
    "verdict", "accuracy", "interval", "clean_accuracy", "plain_accuracy", "images", "norm", "eps", "budget",
    "seed", "environment",
)  # fmt: skip


def place_of(folder: Path, data: str | None) -> Path:
    """The folder for outcomes on the dataset `data`; for None, the run's own images, that is the run folder itself."""
    if data is None:
        return folder
    return folder / ELSEWHERE / (data if data in (*NAMES, SIGNS) else f"{Path(data).name}-{_hash(data)}")


def transfer_path(folder: Path, name: str) -> Path:
    """The file for the transfer matrix of an attack between members."""
    return folder / TRANSFERS / f"{file_stem(name)}.json"


def network_spec(asked: Spec) -> Spec:
    """The part of a spec that decides the network: without attacks, audit and their number of images."""
    bare = dataclasses.replace(asked, attacks={}, audit=None)
    return dataclasses.replace(bare, data=dataclasses.replace(bare.data, test_limit=None))


def settings_of(asked: Spec) -> dict[str, Any]:
    """Hashes of the settings that decide the parts of a run: "network", "attacks" by name, and "audit" if asked for."""
    found: dict[str, Any] = {
        NETWORK: _hash(network_spec(asked).identity),
        "attacks": {
            name: _hash(
                {
                    "attack": _with_number(describe(make_attack({"kind": name, **table}))),
                    "seed": asked.seed,
                    "limit": table.get("limit", asked.data.test_limit),
                    **{key: table.get(key) for key in ("source", "data", "members")},
                }
            )
            for name, table in asked.attacks.items()
        },
    }
    if asked.audit is not None:
        found[AUDIT] = _hash(_with_number(dataclasses.asdict(asked.audit)))
    return found


def read_settings(folder: Path) -> dict[str, Any]:
    """The hashes of the settings that the parts in a run folder were made with; parts of older runs are missing."""
    path = folder / ASKED
    try:
        found: dict[str, Any] = files.read_json(path) if files.exists(path) else {}
        check_entries(ASKED, found, _SETTINGS_KINDS)
    except (InputError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged: delete the run folder to have the run made again.") from error
    return found


def note_settings(folder: Path, asked: Spec, part: str) -> None:
    """Notes that a part of a run was made as asked: NETWORK, AUDIT or the name of an attack."""
    noted, wanted = read_settings(folder), settings_of(asked)
    if part in (NETWORK, AUDIT):
        noted[part] = wanted[part]
    else:
        noted["attacks"] = {**noted.get("attacks", {}), part: wanted["attacks"][part]}
    files.write_json(folder / ASKED, noted)


def check_settings(folder: Path, asked: Spec, part: str) -> None:
    """Raises InputError if the folder holds that part of a run, made with other settings."""
    noted, wanted = read_settings(folder), settings_of(asked)
    if part not in (NETWORK, AUDIT):
        noted, wanted = noted.get("attacks", {}), wanted["attacks"]
    if noted.get(part, wanted[part]) != wanted[part]:
        raise InputError(f"{folder} holds numbers of other settings ({part}): choose another folder (--out).")


def _with_number(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with eps, if they have one, as a number: "8/255" and its value are the same radius."""
    return (
        {**settings, "eps": parse_eps(settings["eps"])} if settings.get("eps") is not None else {**settings}
    )


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


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
    outcomes = {name: found for name, found in read_all(folder).items() if name != CLEAN}
    for name, table in asked.attacks.items():
        if "data" in table:  # not what an attack of the same name left on the run's own images
            there = read_all(place_of(folder, table["data"]))
            outcomes = {key: found for key, found in outcomes.items() if key != name}
            outcomes |= {name: there[name]} if name in there else {}
    paths = {name: transfer_path(folder, name) for name, table in asked.attacks.items() if "members" in table}
    transfers = {name: files.read_json(path) for name, path in paths.items() if files.exists(path)}
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
            "audits": _audits(folder, asked.audit),
            **({"transfers": transfers} if transfers else {}),
            "settings": read_settings(folder),
        },
        {
            f"{name}.{column}": np.asarray(getattr(found, column)).astype(dtype)
            for name, found in outcomes.items()
            for column, dtype in _COLUMNS.items()
        },
    )
    if covers(record, asked):
        record.facts["asked"] = asked.content_hash
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


def _audits(folder: Path, asked: AuditTable | None) -> list[dict[str, Any]]:
    """The audits of the earlier record in their order, then those in the folder that it lacks, oldest version first.

    An audit in the folder that is not the one asked for, by its norm, radius, budget or seed, is left out.
    """
    before = files.read_json(folder / RECORD) if files.exists(folder / RECORD) else {}
    audits = [{**entry, "version": version_of(entry)} for entry in before.get("audits", [])]
    later = sorted(files.matching(folder, f"{AUDITS}/*/{RESULT}"), key=lambda path: int(path.parent.name))
    for path in (folder / RESULT, *later):
        if files.exists(path):
            found = load_audit(path).to_dict()
            entry = {**{key: found[key] for key in _AUDIT_KEYS}, "version": found["audit_version"]}
            is_asked = asked is None or answers(found, asked, found["images"])
            audits += [entry] if is_asked and entry not in audits else []
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
    if record.facts.get("asked") == asked.content_hash:
        return True
    noted = record.facts.get("settings", {}).get("attacks", {})
    known = all(made is not None or name in noted for name, made in descriptions(asked).items())
    return known and not made_otherwise(record, asked)


def made_otherwise(record: Record, asked: Spec) -> list[str]:
    """The parts of the record that were made with other settings than the spec's: NETWORK, AUDIT, names of attacks."""
    if record.facts.get("asked") == asked.content_hash:
        return []
    attacks, images = descriptions(asked), record.facts["test"]["images"]
    noted, wanted_now = record.facts.get("settings", {}), settings_of(asked)
    if NETWORK in noted:
        is_network = noted[NETWORK] == wanted_now[NETWORK]
    else:
        is_network = _holds(record.facts["spec"], _network_of(asked))
    found = [] if is_network else [NETWORK]
    for name, described in attacks.items():
        table = asked.attacks[name]
        if name in noted.get("attacks", {}):
            found += [name] if noted["attacks"][name] != wanted_now["attacks"][name] else []
            continue
        limit, seen = table.get("limit", asked.data.test_limit), len(record.arrays.get(f"{name}.label", ()))
        is_other = described is not None and record.facts["attacks"].get(name, described) != described
        wanted = seen if "data" in table else images if limit is None else min(limit, images)
        if is_other or seen not in (0, wanted):
            found.append(name)
    audit = asked.audit
    if audit is not None and record.audit is not None and AUDIT in noted:
        found += [AUDIT] if noted[AUDIT] != wanted_now[AUDIT] else []
    elif audit is not None and record.audit is not None:
        # How many images another dataset has is not known here.
        limit = audit.limit if audit.data is None else None
        if not answers(record.audit, audit, record.audit["images"] if limit is None else min(limit, images)):
            found.append(AUDIT)
    return found


def _network_of(asked: Spec) -> dict[str, Any]:
    """The tables of a spec that decide the network, in the form that the spec of a run has."""
    given = asked.to_dict()
    if "recipe" in asked.train:
        recipe = dataclasses.asdict(resolve_recipe(asked.train["recipe"]))
        train = {name: value for name, value in recipe.items() if name not in _LEFT_TO_KINDS}
        train |= {"attack": None, "val_attack": None}
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
    check_entries(owner, facts, {"outcomes": dict[str, str] | None, "settings": dict | None})
    check_entries(f"{owner}: settings", facts.get("settings") or {}, _SETTINGS_KINDS)
    known = facts.get("outcomes", {})
    try:
        is_own = known.items() <= _digests(whole).items()
    except KeyError:
        is_own = False
    if not is_own:
        raise InputError(f"{folder / OUTCOMES} does not belong to {folder / RECORD}.")
    return Record(facts, whole)
