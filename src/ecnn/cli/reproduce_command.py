"""`ecnn reproduce`: runs experiments and prints their tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import ecnn
from ecnn.cli.options import Device, Root
from ecnn.cli.statuses import FAULT, failing_alone

if TYPE_CHECKING:
    from ecnn import pipeline


def reproduce(
    experiment: Annotated[
        list[str] | None, typer.Argument(help="Names of shipped experiments, or TOML files.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All shipped experiments.")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Their quick forms: on digits, in minutes on a CPU; numbers mean nothing."
        ),
    ] = False,
    arm: Annotated[list[str] | None, typer.Option(help="Only this column. Repeatable.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Only this seed. Repeatable.")] = None,
    stage: Annotated[list[str] | None, typer.Option(help="Only train, attack or audit. Repeatable.")] = None,
    audit_again: Annotated[
        bool,
        typer.Option(
            "--audit-again", help="Only audit finished runs anew, if the audit has become stronger."
        ),
    ] = False,
    jobs: Annotated[
        int, typer.Option(help="Processes at a time; where there are several GPUs, one each.")
    ] = 1,
    cluster: Annotated[
        str | None,
        typer.Option(help="ray: runs are tasks of a Ray cluster, or of a local one with --jobs workers."),
    ] = None,
    root: Root = Path("data"),
    out: Annotated[Path, typer.Option(help="Folder of all experiments.")] = Path("runs"),
    device: Device = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would cost, and try each model on one image.")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="Only print the tables of what is there.")] = False,
) -> int:
    """Run every arm, seed and attack of experiments, then print their tables; what is finished is not run again."""
    from ecnn import pipeline, runs
    from ecnn.checks import check_choice, check_count
    from ecnn.errors import InputError
    from ecnn.experiment import experiments, load_experiment, quick_form

    sources = [*experiments()] if every else experiment or []
    if bool(experiment) == every:
        raise InputError("give the names of experiments or TOML files, or --all.")
    for name in stage or ():
        check_choice("--stage", name, pipeline.STAGES)
    check_count("--jobs", jobs)
    if cluster is not None:
        check_choice("--cluster", cluster, pipeline.CLUSTERS)
    loaded = [load_experiment(source) for source in sources]
    found = [quick_form(one) for one in loaded] if quick else loaded
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise InputError(
            f"two of these experiments are called {max(names, key=names.count)!r}, and so is a folder."
        )
    tasks = [task for one in found for task in pipeline.tasks_of(one, out, arms=arm or (), seeds=seed or ())]
    for number in seed or ():
        if all(task.seed != number for task in tasks):
            known = sorted({one_seed for one in found for column in one.arms for one_seed in column.seeds})
            raise InputError(f"no arm that is asked for has the seed {number}; seeds are {known}.")
    failed: list[pipeline.Task] = []
    status = 0
    if not table and not dry_run and not audit_again and all(task.is_done() for task in tasks):
        typer.echo(f"already finished: this is what {out} holds", err=True)
        table = True
    if not table and not audit_again:
        typer.echo(pipeline.cost_text(pipeline.estimate_tasks(tasks, root)), err=not dry_run)
    if dry_run:
        _say_what_is_absent(tasks, root)
        return 0
    if not table and (jobs > 1 or cluster is not None):
        flags = [("--stage", name) for name in stage or ()]
        flags += [("--root", str(root)), ("--out", str(out)), ("--device", device)]
        arguments = [text for pair in flags for text in pair]
        arguments += [*(["--quick"] if quick else []), *(["--audit-again"] if audit_again else [])]
        named = {one.name: source for one, source in zip(found, sources, strict=True)}
        with runs.kept_in(out):
            failed = pipeline.run_tasks(tasks, named, jobs=jobs, arguments=arguments, cluster=cluster)
            status = FAULT if failed else 0
    elif not table:
        for task in tasks:
            with (
                failing_alone(task.name, len(tasks)) as ended,
                runs.kept_in(out),
                ecnn.progress_bar(task.name) as progress,
            ):
                if audit_again:
                    pipeline.audit_again(task, root=root, device=device, progress=progress)
                else:
                    stages = stage or pipeline.STAGES
                    pipeline.run_task(task, root=root, device=device, stages=stages, progress=progress)
            status = max([status, *ended])
    for one in found:
        typer.echo(pipeline.table_text(one, pipeline.read_cells(one, out)))
    for task in failed:
        typer.echo(f"ecnn: {task.name} failed: {task.folder}/log.txt says why.", err=True)
    return status


def _say_what_is_absent(tasks: list[pipeline.Task], root: Path) -> None:
    """Prints the missing dataset files that the unfinished runs need for training or attacks."""
    from ecnn.data.inventory import find_datasets

    specs = [task.spec for task in tasks if not task.is_done()]
    tables = [table for spec in specs for table in spec.attacks.values()]
    wanted = {spec.data.name for spec in specs} | {table.get("data") for table in tables}
    wanted |= {spec.audit.data for spec in specs if spec.audit is not None}
    for entry in find_datasets(root):
        if entry.name in wanted and entry.missing:
            typer.echo(
                f"ecnn: {entry.name} is not there yet: {', '.join(entry.missing)} (ecnn data says more).",
                err=True,
            )
