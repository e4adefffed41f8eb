"""`ecnn evaluate`: attack a saved model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import ecnn
from ecnn.cli.options import NORM_HELP, Device, DryRun, JsonFlag, Resume, Root, SavedModel
from ecnn.cli.statuses import telling_if_finished


def evaluate(
    model: SavedModel,
    attack: Annotated[
        list[str], typer.Option(help="pgd, autoattack, cw, ... Repeatable; their worst case is given.")
    ],
    norm: Annotated[str | None, typer.Option(help=f"{NORM_HELP}  [default: linf]")] = None,
    eps: Annotated[list[str] | None, typer.Option(help="Radius, 0.04 or 8/255. Repeatable: a curve.")] = None,
    steps: Annotated[int | None, typer.Option(help="Iterations.")] = None,
    step_size: Annotated[str | None, typer.Option(help="Of each iteration, 0.02 or 2/255.")] = None,
    loss: Annotated[str | None, typer.Option(help="margin, cross_entropy or dlr.")] = None,
    on: Annotated[str | None, typer.Option(help="Where it looks: scores, linear, tempered, members.")] = None,
    keep: Annotated[
        str | None, typer.Option(help="best, or last: the last iterate, as the paper's protocol counts.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other field: attack.restarts=5. Repeatable.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="The first so many test images; of a folder, of all classes alike.  [default: all]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same random numbers for every image.")] = 0,
    data: Annotated[str | None, typer.Option(help="Other data than the model was trained on.")] = None,
    root: Root = Path("data"),
    batch_size: Annotated[int | None, typer.Option(help="Images at a time; changes no result.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep outcomes per image there, and resume from them.")
    ] = None,
    save_images: Annotated[Path | None, typer.Option(help="Write the attacked images to this .npz.")] = None,
    resume: Resume = True,
    device: Device = "auto",
    dry_run: DryRun = False,
    as_json: JsonFlag = False,
) -> None:
    """Attack a saved model and count, image by image, what survives."""
    from ecnn import pipeline, runs
    from ecnn.spec import parse_settings_of

    options = parse_settings_of("attack", settings or [])
    flags = {"norm": norm, "steps": steps, "step_size": step_size, "loss": loss, "on": on, "keep": keep}
    options |= {name: value for name, value in flags.items() if value is not None}
    spec = runs.read_spec(model).changed(
        {"attacks": pipeline.attack_tables(attack, options, eps or ()), "data.test_limit": limit}
    )
    made = pipeline.plan_evaluation(model, spec, data=data, root=root, device=device)
    if dry_run:
        typer.echo(f"about {made.cost}", err=True)
        return
    with telling_if_finished(out, runs.RESULTS), ecnn.progress_bar("attacking") as progress:
        found = pipeline.evaluate_run(
            made,
            seed=seed,
            batch_size=batch_size,
            out=out,
            save_images=save_images,
            resume=resume,
            progress=progress,
        )
    typer.echo(json.dumps(found.to_json()) if as_json else found.table())
