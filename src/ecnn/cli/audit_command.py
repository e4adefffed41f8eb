"""`ecnn audit`: measures the accuracy under attack, and judges a claimed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import ecnn
from ecnn.cli import options
from ecnn.cli.statuses import prints_aside, telling_if_finished


def audit(
    model: options.ModelOrModule = None,
    eps: Annotated[
        str | None, typer.Option(help="Radius of the ball that attacks search, 0.04 or 8/255.  [required]")
    ] = None,
    module: options.Module = None,
    norm: Annotated[str, typer.Option(help=options.NORM_HELP)] = "linf",
    claim: Annotated[
        float | None,
        typer.Option(
            help="Claimed accuracy under attack, 0.72; without it only the audited accuracy is judged."
        ),
    ] = None,
    min_accuracy: Annotated[
        float | None, typer.Option(help="Least audited accuracy, 0.5: exit status 1 below it.")
    ] = None,
    budget: Annotated[str, typer.Option(help="quick, fast, standard or thorough.")] = "standard",
    limit: Annotated[
        int | None,
        typer.Option(
            help="How many test images, from the first on.  [default: 100, 1,000, 1,000 or 10,000 by budget]"
        ),
    ] = None,
    classes: options.Classes = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(help=f"Joins the suite: {options.OWN_ATTACK_HELP} Runs its code. Repeatable."),
    ] = None,
    data: options.TestData = None,
    root: options.Root = Path("data"),
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="End the search after this time; what was not run is named, and --out continues with it."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same audit.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Keep records, audit.json, audit.md and audit.png there, and resume.")
    ] = None,
    resume: options.Resume = True,
    cluster: options.Cluster = None,
    device: options.Device = "auto",
    dry_run: options.DryRun = False,
    as_json: options.JsonFlag = False,
) -> int:
    """Find the accuracy that is left under attack, and say whether to believe a claimed one."""
    from ecnn import pipeline
    from ecnn.attacks.presets import USUAL_EPS
    from ecnn.spec import AuditTable

    if eps is None:
        usual = USUAL_EPS.get(norm, USUAL_EPS["linf"])
        raise ecnn.InputError(f"an audit needs --eps, the radius of the ball: --eps {usual} is usual.")
    table = AuditTable(
        norm=norm, eps=eps, claim=claim, min_accuracy=min_accuracy, limit=limit, budget=budget, seed=seed
    )
    with prints_aside():
        opened = pipeline.open_model(
            model, module=module, data=data, root=root, image_size=image_size, device=device
        )
        settings: dict[str, Any] = {
            "out": out,
            "batch_size": batch_size,
            "cluster": cluster,
            "minutes": minutes,
        }
        made = pipeline.plan_audit(table, opened, classes=classes, attacks=attack or (), **settings)
    more = f" and {', '.join(made.attacks)}" if made.attacks else ""
    cost = (
        f"at most {made.cost} for {made.images:,} images, and diagnostics{more}; attacks that answer alarms come on "
        "top"
    )
    for line in (opened.note, cost):
        if line is not None:
            typer.echo(line, err=True)
    if dry_run:
        return 0
    with (
        telling_if_finished(out, "audit.json"),
        prints_aside(),
        ecnn.progress_bar("auditing") as progress,
    ):
        found = pipeline.audit_run(made, resume=resume, progress=progress, **settings)
    typer.echo(json.dumps(found.to_dict()) if as_json else found.markdown(), nl=as_json)
    return found.exit_code
