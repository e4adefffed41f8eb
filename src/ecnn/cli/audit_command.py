"""`ecnn audit`: say whether to believe a robustness number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import ecnn
from ecnn.cli.options import NORM_HELP, Device, DryRun, JsonFlag, Resume, Root
from ecnn.cli.statuses import telling_if_finished


def audit(
    eps: Annotated[str, typer.Option(help="Radius it is said to be robust in, 0.04 or 8/255.")],
    model: Annotated[
        str | None, typer.Argument(help="A run folder or the name of a shipped model; or use --module.")
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            help="file.py:name of a torch module from [0, 1] pixels to scores, or of a function that returns one. Runs "
            "the file's code."
        ),
    ] = None,
    norm: Annotated[str, typer.Option(help=NORM_HELP)] = "linf",
    claim: Annotated[
        float | None,
        typer.Option(help="The accuracy in question, 0.72; without it only what is found is judged."),
    ] = None,
    min_accuracy: Annotated[
        float | None, typer.Option(help="The least to ask for, 0.5: exit status 1 below it.")
    ] = None,
    budget: Annotated[str, typer.Option(help="quick, standard or thorough.")] = "standard",
    limit: Annotated[
        int | None,
        typer.Option(help="The first so many test images.  [default: 100, 1,000 or 10,000 by budget]"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="A dataset or a folder of images.  [default: what the run was trained on]"),
    ] = None,
    root: Root = Path("data"),
    image_size: Annotated[
        int | None, typer.Option(help="Pixels of a side, of a folder of images for --module.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same audit.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Keep records, audit.json, audit.md and audit.png there, and resume.")
    ] = None,
    resume: Resume = True,
    device: Device = "auto",
    dry_run: DryRun = False,
    as_json: JsonFlag = False,
) -> int:
    """Find the accuracy that is left under attack, and say whether to believe a claimed one."""
    from ecnn import pipeline
    from ecnn.spec import AuditTable

    table = AuditTable(
        norm=norm, eps=eps, claim=claim, min_accuracy=min_accuracy, limit=limit, budget=budget, seed=seed
    )
    made = pipeline.plan_audit(
        table, source=model, module=module, data=data, root=root, image_size=image_size, device=device
    )
    typer.echo(f"at most {made.cost} for {made.images:,} images, and diagnostics", err=True)
    if dry_run:
        return 0
    with telling_if_finished(out, "audit.json"), ecnn.progress_bar("auditing") as progress:
        found = pipeline.audit_run(made, out=out, resume=resume, progress=progress)
    typer.echo(json.dumps(found.to_dict()) if as_json else found.markdown(), nl=as_json)
    return found.exit_code
