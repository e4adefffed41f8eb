"""Runs experiments: trains, attacks and audits every arm and seed, resumes what was stopped, and writes the records."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecnn import files, runs
from ecnn.auditing import AUDIT_VERSION, load_audit
from ecnn.auditing.report import RESULT
from ecnn.checks import check_entries
from ecnn.errors import InputError
from ecnn.evaluation import member_transfer
from ecnn.evaluation.provenance import describe
from ecnn.experiment import AUDIT, Arm, Experiment
from ecnn.pipeline.adopting import adopt
from ecnn.pipeline.auditing import PICTURE, audit_run, plan_audit
from ecnn.pipeline.evaluating import evaluate_run, plan_evaluation
from ecnn.pipeline.opening import open_model
from ecnn.pipeline.recording import (
    AUDITS,
    NETWORK,
    RECORD,
    Record,
    answers,
    check_settings,
    covers,
    made_otherwise,
    network_spec,
    note_settings,
    place_of,
    read_record,
    read_settings,
    transfer_path,
    version_of,
    write_record,
)
from ecnn.pipeline.training import AnyPath, load_spec_data, load_test_images, plan, train_run
from ecnn.plots import plot_audit
from ecnn.progress import Progress
from ecnn.spec import AuditTable, Spec, make_attack
from ecnn.training.loop import LOG

TIMES = "times.json"
STAGES = ("train", "attack", "audit")


@dataclass(frozen=True)
class Task:
    """One run of an experiment: an arm with one seed.

    Attributes:
        out: the folder of all experiments.
    """

    experiment: Experiment
    arm: Arm
    seed: int
    out: Path

    @property
    def name(self) -> str:
        """The name that messages give it."""
        return f"{self.experiment.name}/{self.arm.name} seed {self.seed}"

    @property
    def spec(self) -> Spec:
        return self.arm.spec_for(self.seed)

    @property
    def network(self) -> Spec:
        """The part of the spec that decides the network: without attacks, audit and their number of images."""
        return network_spec(self.spec)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.out / self.experiment.name / self.arm.name / str(self.seed)

    def is_done(self) -> bool:
        """Whether its record holds all that the arm asks for."""
        if not files.exists(self.folder / RECORD):  # raises where the folder cannot be read
            return False
        try:
            record = read_record(self.folder)
        except InputError:
            return False  # running the task tells what is damaged
        return record is not None and covers(record, self.spec)

    def is_trained(self) -> bool:
        """Whether its folder holds the finished network."""
        return files.exists(self.folder / runs.DONE)

    def source(self, name: str) -> Task:
        """The run of the arm of that name with its first seed; attacks of this run can be crafted on its network."""
        arm = self.experiment.arm(name)
        return Task(self.experiment, arm, arm.seeds[0], self.out)

    @property
    def sources(self) -> list[Task]:
        """The runs on whose networks attacks of this run are crafted, each once."""
        names = {table["source"]: None for table in self.spec.attacks.values() if "source" in table}
        return [self.source(name) for name in names]


def tasks_of(
    experiment: Experiment, out: Path, *, arms: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[Task]:
    """The runs of an experiment, first those with the first seed of their arm; all arms and seeds, or those named."""
    chosen = [experiment.arm(name) for name in arms] or list(experiment.arms)
    found = [
        Task(experiment, arm, seed, out) for arm in chosen for seed in arm.seeds if not seeds or seed in seeds
    ]
    return sorted(found, key=lambda task: task.arm.seeds.index(task.seed))


def run_task(
    task: Task,
    *,
    root: AnyPath = "data",
    device: str = "auto",
    stages: Sequence[str] = STAGES,
    progress: Progress | None = None,
) -> None:
    """Trains, attacks and audits one run and writes its record; skips what its folder already holds.

    InputError if the folder has a record made with other settings.
    """
    if task.is_done():
        files.tidy(task.folder)
        return
    record = read_record(task.folder)
    if record is not None:
        _check_record(task, record)
        if not task.is_trained():
            raise InputError(
                f"{task.folder} has a record but no network to attack: reproduce it in another folder (--out)."
            )
    with files.locked(task.folder, "reproduction"):
        _run_stages(task, root, device, stages, progress)


def _run_stages(
    task: Task, root: AnyPath, device: str, stages: Sequence[str], progress: Progress | None
) -> None:
    spec, folder = task.spec, task.folder
    if "train" in stages:
        if not task.is_trained():
            adopt(task.folder, task.network, spec, task.out, root)
            if task.is_done():
                return
        run = train_run(task.network, out=folder, root=root, device=device, progress=progress)
        note_settings(folder, spec, NETWORK)
        if not run.was_finished:  # otherwise nothing was trained now, and there is no time to note
            epochs = (json.loads(line) for line in files.read_bytes(folder / LOG).splitlines())
            _note_time(folder, "train", sum(epoch["seconds"] for epoch in epochs))
    else:
        _check_trained(task, root)
    if "attack" in stages:
        for name, table in spec.attacks.items():
            check_settings(folder, spec, name)
            with _timed(folder, name):
                _attack(task, name, table, root, device, progress)
            note_settings(folder, spec, name)
    if "audit" in stages and spec.audit is not None:
        check_settings(folder, spec, AUDIT)
        opened = open_model(str(folder), data=spec.audit.data, root=root, device=device)
        made = plan_audit(spec.audit, opened)
        if not _is_audited(folder, spec.audit, made.images):
            with _timed(folder, AUDIT):
                audit_run(made, out=folder, progress=progress)
        elif not files.exists(folder / PICTURE):  # a kill came between the audit and its picture
            plot_audit(load_audit(folder / RESULT), folder / PICTURE)
        note_settings(folder, spec, AUDIT)
    _write_record(task)


def _check_record(task: Task, record: Record) -> None:
    """Raises InputError if the record in the task's folder was made with other settings."""
    if others := made_otherwise(record, task.spec):
        raise InputError(
            f"{task.folder} holds numbers of other settings ({', '.join(others)}): choose another folder (--out)."
        )


def _check_trained(task: Task, root: AnyPath) -> None:
    """Raises InputError unless the folder holds the finished network of the task's spec."""
    if not task.is_trained():
        raise InputError(f"{task.folder} has no trained network yet: train it first (--stage train).")
    if NETWORK in read_settings(task.folder):
        check_settings(task.folder, task.spec, NETWORK)
    elif not runs.holds(task.folder, plan(task.network, load_spec_data(task.network, root)).spec):
        raise InputError(f"{task.folder} holds another network: choose another folder (--out).")


def _is_audited(folder: Path, table: AuditTable, images: int) -> bool:
    """Whether the folder holds that audit, by any version: a newer version is no reason to change a number."""
    path = folder / RESULT
    try:
        return files.exists(path) and answers(load_audit(path).to_dict(), table, images)
    except InputError as error:
        raise InputError(f"{error} Delete it to have the run audited again.") from error


def _attack(
    task: Task,
    name: str,
    table: Mapping[str, Any],
    root: AnyPath,
    device: str,
    progress: Progress | None,
) -> None:
    """Makes or resumes one attack on the trained network; trains the network that it is crafted on if need be."""
    trained = runs.read_spec(task.folder)
    if "members" in table:
        _transfer(task, name, table, root, device, progress)
        return
    if "source" in table:
        other = task.source(table["source"])
        if not other.is_done():  # else its record says that it has these settings
            run_task(other, root=root, device=device, stages=("train",), progress=progress)
        table = {**table, "source": str(other.folder)}
    limit = task.spec.data.test_limit
    one = dataclasses.replace(
        trained, attacks={name: table}, data=dataclasses.replace(trained.data, test_limit=limit)
    )
    opened = open_model(str(task.folder), spec=one, data=table.get("data"), root=root, device=device)
    made = plan_evaluation(one, opened)
    evaluate_run(made, seed=task.seed, out=place_of(task.folder, table.get("data")), progress=progress)


def _transfer(
    task: Task, name: str, table: Mapping[str, Any], root: AnyPath, device: str, progress: Progress | None
) -> None:
    """Measures how each member classifies images crafted on each other member, and writes the matrix once."""
    path = transfer_path(task.folder, name)
    if files.exists(path):
        return
    attack = make_attack({"kind": name, **table})
    matrix = member_transfer(
        runs.load_model(task.folder, device=runs.find_device(device)),
        load_test_images(runs.read_spec(task.folder), root, table.get("data")),
        attack,
        limit=table.get("limit", task.spec.data.test_limit),
        seed=task.seed,
        members=range(table["members"]),
        progress=progress,
    )
    files.write_json(path, {"attack": describe(attack), **matrix.to_json()})


def audit_again(
    task: Task, *, root: AnyPath = "data", device: str = "auto", progress: Progress | None = None
) -> bool:
    """Audits a finished run by the present version of the audit, if that can change anything; returns whether it did.

    It does nothing without a record, for an arm without an audit, if the record has this version already, or if the
    latest audited accuracy is 0, which no stronger audit can lower. The record keeps the values of older versions.
    """
    record, table = read_record(task.folder), task.spec.audit
    if record is None or table is None:
        return False
    _check_record(task, record)
    if record.audit is not None and (
        version_of(record.audit) >= AUDIT_VERSION or record.audit["accuracy"] == 0
    ):
        return False
    if not task.is_trained():
        raise InputError(
            f"{task.folder} has a record but no network to audit again: reproduce it in another folder (--out)."
        )
    _check_trained(task, root)
    made = plan_audit(table, open_model(str(task.folder), data=table.data, root=root, device=device))
    with _timed(task.folder, f"{AUDIT} {AUDIT_VERSION}"):
        audit_run(made, out=task.folder / AUDITS / str(AUDIT_VERSION), progress=progress)
    _write_record(task)
    return True


def _write_record(task: Task) -> None:
    write_record(task.folder, arm=task.arm.name, asked=task.spec, times=_times(task.folder))


def _times(folder: Path) -> dict[str, float]:
    """Seconds by the name of what took them; empty if the file is missing or damaged, since no result depends on it."""
    try:
        times: dict[str, float] = files.read_json(folder / TIMES)
        check_entries(TIMES, times, dict.fromkeys(times, float))
    except (InputError, OSError, AttributeError, TypeError):
        return {}
    return times


@contextmanager
def _timed(folder: Path, name: str) -> Iterator[None]:
    """Notes how long the block took; nothing if it raises."""
    started = time.monotonic()
    yield
    _note_time(folder, name, time.monotonic() - started)


def _note_time(folder: Path, name: str, seconds: float) -> None:
    """Writes the seconds into the run's times.json, unless it holds more: a repeated run finds the work done."""
    path, known = folder / TIMES, _times(folder)
    files.write_json(path, {**known, name: max(round(seconds, 1), known.get(name, 0.0))})
