"""Copies networks and results between arms: where tables share a column, its network is trained only once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ecnn import files, runs
from ecnn.auditing import load_audit, resolve_budget
from ecnn.auditing.report import RESULT
from ecnn.data import Dataset
from ecnn.errors import InputError
from ecnn.evaluation import Outcomes
from ecnn.evaluation.records import FOLDER
from ecnn.experiment import CLEAN
from ecnn.pipeline.recording import (
    RECORD,
    Record,
    answers,
    covers,
    descriptions,
    read_record,
    save_record,
    settings_of,
)
from ecnn.pipeline.training import AnyPath, load_spec_data, plan
from ecnn.spec import AuditTable, Spec
from ecnn.training.loop import BEST, LOG

_NETWORK = (runs.SPEC, runs.CODE, runs.CLASSES, runs.ENVIRONMENT, runs.RESULTS, BEST, LOG)


def adopt(folder: Path, network: Spec, asked: Spec, out: Path, root: AnyPath) -> None:
    """Copies a finished run of the same network from another arm, with the outcomes and the audit that this arm needs.

    If only the record of another arm is left, the record is copied, provided that it holds everything this arm asks
    for. Does nothing if no other arm has such a network.

    Args:
        folder: the run folder of this arm.
        network: its spec without attacks and audit, by which runs of the same network are recognised.
        asked: its whole spec.
        out: the folder of all experiments.
        root: where dataset files are.
    """
    twins = [path.parent for name in (runs.DONE, RECORD) for path in sorted(out.glob(f"*/*/*/{name}"))]
    if all(twin == folder for twin in twins):
        return
    data = load_spec_data(network, root)
    planned = plan(network, data).spec
    for twin in twins:
        if twin == folder:
            continue
        try:
            if files.exists(twin / runs.DONE):
                if runs.holds(twin, planned):
                    _copy_run(twin, folder, asked, data)
                    return
            elif _copy_record(twin, folder, planned.identity, asked, data):
                return
        except InputError:  # damaged, or no run of ours: no reason to stop this one
            continue


def _copy_run(twin: Path, folder: Path, asked: Spec, data: Dataset) -> None:
    # DONE comes last: until then the run counts as unfinished.
    known = [*(twin / name for name in _NETWORK), *_outcomes(twin, asked), *_audit(twin, asked, data)]
    for path in (*(path for path in known if files.exists(path)), twin / runs.DONE):
        files.copy(path, folder / path.relative_to(twin))


def _outcomes(twin: Path, asked: Spec) -> Iterator[Path]:
    """The twin's files of outcomes: without an attack, and of the attacks that this arm asks for."""
    attacks = descriptions(asked)
    for path in files.matching(twin / FOLDER, "[!.]*.npz"):
        found = Outcomes.load(path)
        if found.name == CLEAN or found.about["attack"] == attacks.get(found.name):
            yield path


def _audit(twin: Path, asked: Spec, data: Dataset) -> Iterator[Path]:
    """Files of the twin's audit, if it is the audit that this arm asks for."""
    path = twin / RESULT
    if (
        asked.audit is not None
        and files.exists(path)
        and _is_asked(load_audit(path).to_dict(), asked.audit, data)
    ):
        yield from (path.with_suffix(suffix) for suffix in (".md", ".png", ".json"))


def _copy_record(twin: Path, folder: Path, wanted: Mapping[str, Any], asked: Spec, data: Dataset) -> bool:
    """Copies the part of another arm's record that this arm asks for; False if the record lacks any of it."""
    record = read_record(twin)
    if record is None or record.facts["spec"] != wanted:
        return False
    attacks = descriptions(asked)
    if any(found is None or record.facts["attacks"].get(name) != found for name, found in attacks.items()):
        return False
    audits = [
        entry
        for entry in record.facts["audits"]
        if asked.audit is not None and _is_asked(entry, asked.audit, data)
    ]
    limits = {
        name: table.get("limit", asked.data.test_limit) or len(data.test)
        for name, table in asked.attacks.items()
    }
    arrays = {
        key: values[: limits[key.rpartition(".")[0]]]
        for key, values in record.arrays.items()
        if key.rpartition(".")[0] in limits
    }
    if any(len(arrays[f"{name}.label"]) < min(limit, len(data.test)) for name, limit in limits.items()):
        return False
    facts = {**record.facts, "arm": folder.parent.name, "times": {}, "attacks": attacks, "audits": audits}
    facts["settings"] = settings_of(asked)
    found = Record({**facts, "asked": asked.content_hash}, arrays)
    if not covers(found, asked):
        return False
    save_record(folder, found)
    return True


def _is_asked(found: Mapping[str, Any], table: AuditTable, data: Dataset) -> bool:
    """Whether a saved audit is the one that the table asks for; False for tables with other images or a claim."""
    limit = resolve_budget(table.budget).images if table.limit is None else table.limit
    return table.data is None and table.claim is None and answers(found, table, min(limit, len(data.test)))
