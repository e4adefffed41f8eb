"""`ecnn evaluate`: attack a saved model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import ecnn
from ecnn.cli.options import (
    NORM_HELP,
    BatchSize,
    Classes,
    Cluster,
    Device,
    DryRun,
    ImageSize,
    JsonFlag,
    ModelOrModule,
    Module,
    Resume,
    Root,
)
from ecnn.cli.statuses import telling_if_finished


def evaluate(
    model: ModelOrModule = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            help="pgd, autoattack, cw, ...; or file.py:function of one of yours, (model, images, labels, *, norm, eps, "
            "seed) -> images, which runs the file's code. Repeatable; their worst case is given.  [required]"
        ),
    ] = None,
    module: Module = None,
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
    classes: Classes = None,
    seed: Annotated[int, typer.Option(help="Same seed, same random numbers for every image.")] = 0,
    data: Annotated[
        str | None,
        typer.Option(help="A dataset or a folder of images.  [default: what the run was trained on]"),
    ] = None,
    root: Root = Path("data"),
    image_size: ImageSize = None,
    batch_size: BatchSize = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep outcomes per image there, and resume from them.")
    ] = None,
    save_images: Annotated[Path | None, typer.Option(help="Write the attacked images to this .npz.")] = None,
    resume: Resume = True,
    cluster: Cluster = None,
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
    if not attack:
        raise ecnn.InputError("--attack says what to attack with: --attack autoattack is usual.")
    kinds, radii = [name for name in attack if not pipeline.is_own(name)], eps or []
    own = [name for name in attack if pipeline.is_own(name)]
    presets = pipeline.presets_for(kinds, options, radii)
    tables = pipeline.attack_tables(kinds, options, radii, with_own=bool(own))
    spec = pipeline.evaluation_spec(model, tables, data=data, limit=limit)
    made = pipeline.plan_evaluation(
        model,
        spec,
        module=module,
        data=data,
        root=root,
        image_size=image_size,
        device=device,
        classes=classes,
        own=pipeline.own_attacks(own, options.get("norm", "linf"), radii, seed),
        eps=radii,
        presets=presets,
    )
    for preset in presets.values():
        typer.echo(str(preset), err=True)
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
            cluster=cluster,
            progress=progress,
        )
    typer.echo(json.dumps(found.to_json()) if as_json else found.table())
