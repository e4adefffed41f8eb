"""From an experiment to its table: every arm, seed and attack, resumable, with the truth beside each number."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ecnn import files, runs
from ecnn.evaluation import Outcomes, Rate
from ecnn.evaluation.provenance import describe
from ecnn.evaluation.records import FOLDER
from ecnn.experiment import AUDIT, CLEAN, Arm, Experiment
from ecnn.pipeline.auditing import audit_run, plan_audit
from ecnn.pipeline.evaluating import evaluate_run
from ecnn.pipeline.recording import read_record, write_record
from ecnn.pipeline.training import AnyPath, load_spec_data, plan, train_run
from ecnn.progress import Progress
from ecnn.spec import Spec, make_attack
from ecnn.training.loop import BEST, LOG

TIMES = "times.json"
STAGES = ("train", "attack", "audit")
_ADOPTED = (runs.SPEC, runs.CODE, runs.ENVIRONMENT, runs.RESULTS, BEST, LOG)


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
    def spec(self) -> Spec:
        return self.arm.spec_for(self.seed)

    @property
    def folder(self) -> Path:
        """Where this run is kept."""
        return self.out / self.experiment.name / self.arm.name / str(self.seed)


def tasks_of(
    experiment: Experiment, out: Path, *, arms: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[Task]:
    """What is to be run, the first seed of every arm first; all arms and seeds, or those named."""
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
    """Trains, attacks and audits one run; whatever its folder holds already is not done again."""
    spec, folder = task.spec, task.folder
    if "train" in stages:
        only = dataclasses.replace(spec, attacks={}, audit=None)
        only = dataclasses.replace(only, data=dataclasses.replace(only.data, test_limit=None))
        if not (folder / runs.DONE).exists():
            _adopt(task, only, root)
        run = train_run(only, out=folder, root=root, device=device, progress=progress)
        if not run.was_finished:  # else it took its time before, or in another arm
            epochs = (json.loads(line) for line in (folder / LOG).read_text().splitlines())
            _note_time(folder, "train", sum(epoch["seconds"] for epoch in epochs))
    trained = runs.read_spec(folder)
    whole = dataclasses.replace(trained, attacks=spec.attacks, audit=spec.audit)
    whole = dataclasses.replace(whole, data=dataclasses.replace(whole.data, test_limit=spec.data.test_limit))
    if "attack" in stages:
        for name, table in spec.attacks.items():
            with _timed(folder, name):
                one = dataclasses.replace(whole, attacks={name: table})
                evaluate_run(
                    str(folder), one, root=root, seed=task.seed, out=folder, device=device, progress=progress
                )
    if "audit" in stages and spec.audit is not None:
        made = plan_audit(spec.audit, source=str(folder), root=root, device=device)
        with _timed(folder, AUDIT):
            audit_run(made, out=folder, progress=progress)
    write_record(folder, arm=task.arm.name, times=files.read_json(folder / TIMES))


def _adopt(task: Task, spec: Spec, root: AnyPath) -> None:
    """Copies a finished run of the same spec from another arm, with those of its outcomes that this arm asks for."""
    wanted = plan(spec, load_spec_data(spec, root)).spec.to_dict()
    attacks = {
        name: describe(make_attack({"kind": name, **table})) for name, table in task.spec.attacks.items()
    }
    for done in sorted(task.out.glob(f"*/*/*/{runs.DONE}")):
        twin = done.parent
        if twin == task.folder or files.read_toml(twin / runs.SPEC) != wanted:
            continue
        outcomes = [
            path
            for path in sorted((twin / FOLDER).glob("[!.]*.npz"))
            if (found := Outcomes.load(path)).name == CLEAN
            or found.about["attack"] == attacks.get(found.name)
        ]
        # DONE comes last: until then the run counts as unfinished.
        for path in (*(twin / name for name in _ADOPTED if (twin / name).exists()), *outcomes, done):
            files.copy(path, task.folder / path.relative_to(twin))
        return


def run_tasks(tasks: Sequence[Task], source: str, *, jobs: int, arguments: Sequence[str]) -> list[Task]:
    """Runs tasks in so many processes at a time, each with a log in its folder; returns those that failed.

    Args:
        source: name or file of the experiment.
        jobs: processes at a time; where there are several GPUs, each sees one.
        arguments: of `ecnn reproduce`, beside the arm and the seed.
    """
    gpus = torch.cuda.device_count()

    def run(number: int) -> bool:
        task = tasks[number]
        command = [sys.executable, "-m", "ecnn", "reproduce", source, *arguments]
        command += ["--arm", task.arm.name, "--seed", str(task.seed)]
        chosen = {"CUDA_VISIBLE_DEVICES": str(number % gpus)} if gpus > 1 else {}
        done = subprocess.run(  # noqa: S603 our own command
            command, capture_output=True, text=True, check=False, env={**os.environ, **chosen}
        )
        files.write_text(task.folder / "log.txt", done.stdout + done.stderr)
        return done.returncode == 0

    with ThreadPoolExecutor(jobs) as pool:
        succeeded = list(pool.map(run, range(len(tasks))))
    return [task for task, is_done in zip(tasks, succeeded, strict=True) if not is_done]


@contextmanager
def _timed(folder: Path, name: str) -> Iterator[None]:
    """Notes how long something took."""
    started = time.monotonic()
    yield
    _note_time(folder, name, time.monotonic() - started)


def _note_time(folder: Path, name: str, seconds: float) -> None:
    """Writes the seconds into the run's times.json; what is found finished takes a moment and hides nothing."""
    path = folder / TIMES
    known = files.read_json(path) if path.exists() else {}
    files.write_json(path, {**known, name: max(round(seconds, 1), known.get(name, 0.0))})


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
        median_l2: how far C&W of our own moves an image to break it, in the middle, over seeds; None for other rows.
    """

    row: str
    arm: str
    rates: tuple[Rate, ...]
    paper: float | None
    audited: tuple[float, ...]
    verdicts: tuple[str, ...] = ()
    median_l2: float | None = None

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
            sources = experiment.audited.get(row, ())
            truths = [truth for records in found if (truth := records.truth(sources)) is not None]
            verdicts = [records.audit["verdict"] for records in found if AUDIT in sources and records.audit]
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
                    tuple(verdicts),
                    float(np.median(known)) if known else None,
                )
            )
    return cells


def table_text(experiment: Experiment, cells: Sequence[Cell]) -> str:
    """The table for a terminal: ours, the paper's, the difference, the audited value, images."""
    head = ("arm", "row", "ours", "seeds", "paper", "differs", "audited", "images")
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
        )
        for cell in cells
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
    title = f"{experiment.title} ({experiment.paper}), per cent"
    return "\n".join([title, *lines])


def number(value: float | None, *, sign: bool = False) -> str:
    """A value in per cent as tables print it; a dash for none."""
    return "-" if value is None else f"{value:+.1f}" if sign else f"{value:.1f}"
