"""`ecnn reproduce`: run an experiment and print its table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import ecnn
from ecnn.cli.options import Device, Root
from ecnn.cli.statuses import FAULT


def reproduce(
    experiment: Annotated[str, typer.Argument(help="Name of a shipped experiment, or a TOML file.")],
    arm: Annotated[list[str] | None, typer.Option(help="Only this column. Repeatable.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Only this seed. Repeatable.")] = None,
    stage: Annotated[list[str] | None, typer.Option(help="Only train, attack or audit. Repeatable.")] = None,
    jobs: Annotated[
        int, typer.Option(help="Processes at a time; where there are several GPUs, one each.")
    ] = 1,
    root: Root = Path("data"),
    out: Annotated[Path, typer.Option(help="Folder of all experiments.")] = Path("runs"),
    device: Device = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be run, and try each model on one image.")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="Only print the table of what is there.")] = False,
) -> int:
    """Run every arm, seed and attack of an experiment, then print its table; what is finished is not run again."""
    from ecnn import pipeline, runs
    from ecnn.checks import check_choice
    from ecnn.experiment import load_experiment

    found = load_experiment(experiment)
    for name in stage or ():
        check_choice("--stage", name, pipeline.STAGES)
    tasks = pipeline.tasks_of(found, out, arms=arm or (), seeds=seed or ())
    if dry_run:
        for task in tasks:
            typer.echo(f"{task.arm.name} seed {task.seed}: {', '.join(task.spec.attacks)}  -> {task.folder}")
        for task in {task.arm.name: task for task in tasks}.values():
            pipeline.try_plan(task.network, root=root, device=device)
        return 0
    failed = []
    if not table and all(task.is_done() for task in tasks):
        typer.echo(f"already finished: this is what {out} holds", err=True)
    elif jobs > 1 and not table:
        flags = [("--stage", name) for name in stage or ()]
        flags += [("--root", str(root)), ("--out", str(out)), ("--device", device)]
        arguments = [text for pair in flags for text in pair]
        with runs.kept_in(out):
            failed = pipeline.run_tasks(tasks, {found.name: experiment}, jobs=jobs, arguments=arguments)
    elif not table:
        for task in tasks:
            with runs.kept_in(out), ecnn.progress_bar(f"{task.arm.name} seed {task.seed}") as progress:
                stages = stage or pipeline.STAGES
                pipeline.run_task(task, root=root, device=device, stages=stages, progress=progress)
    typer.echo(pipeline.table_text(found, pipeline.read_cells(found, out)))
    for task in failed:
        typer.echo(
            f"ecnn: {task.arm.name} with seed {task.seed} failed: {task.folder}/log.txt says why.", err=True
        )
    return FAULT if failed else 0
