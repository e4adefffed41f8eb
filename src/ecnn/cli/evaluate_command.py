"""`ecnn evaluate`: attacks a saved model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import ecnn
from ecnn.cli import options
from ecnn.cli.statuses import prints_aside, telling_if_finished


def evaluate(
    model: options.ModelOrModule = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            help=f"pgd, autoattack, cw, ...; or {options.OWN_ATTACK_HELP} Runs its code. Repeatable; their worst "
            "case is given.  [required]"
        ),
    ] = None,
    module: options.Module = None,
    norm: Annotated[str | None, typer.Option(help=f"{options.NORM_HELP}  [default: linf]")] = None,
    eps: Annotated[
        list[str] | None, typer.Option(help="Radius, 0.04 or 8/255. Repeatable, for a curve.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Iterations.")] = None,
    step_size: Annotated[str | None, typer.Option(help="Length of each step, 0.02 or 2/255.")] = None,
    loss: Annotated[str | None, typer.Option(help="margin, cross_entropy or dlr.")] = None,
    on: Annotated[str | None, typer.Option(help=options.VIEW_HELP)] = None,
    keep: Annotated[
        str | None, typer.Option(help="best, or last: the last iterate, as the paper's protocol counts.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other field: attack.restarts=5. Repeatable.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="How many test images, from the first on; of a folder, equally many of each class.  [default: all]"
        ),
    ] = None,
    classes: options.Classes = None,
    seed: Annotated[int, typer.Option(help="Same seed, same random numbers for every image.")] = 0,
    data: options.TestData = None,
    root: options.Root = Path("data"),
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep outcomes per image there, and resume from them.")
    ] = None,
    save_images: Annotated[Path | None, typer.Option(help="Write the attacked images to this .npz.")] = None,
    resume: options.Resume = True,
    cluster: options.Cluster = None,
    device: options.Device = "auto",
    dry_run: options.DryRun = False,
    as_json: options.JsonFlag = False,
) -> None:
    """Attack a saved model and count, image by image, what survives."""
    from ecnn import pipeline, runs
    from ecnn.spec import parse_settings_of

    asked = parse_settings_of("attack", settings or [])
    flags = {"norm": norm, "steps": steps, "step_size": step_size, "loss": loss, "on": on, "keep": keep}
    asked |= {name: value for name, value in flags.items() if value is not None}
    if not attack:
        raise ecnn.InputError("--attack says what to attack with: --attack autoattack is usual.")
    kinds, radii = [name for name in attack if not pipeline.is_own(name)], eps or []
    own = [name for name in attack if pipeline.is_own(name)]
    presets = pipeline.presets_for(kinds, asked, radii)
    tables = pipeline.attack_tables(kinds, asked, radii, with_own=bool(own))
    with prints_aside():
        own_attacks = pipeline.own_attacks(own, asked.get("norm", "linf"), radii, seed)
        spec = pipeline.evaluation_spec(model, tables, data=data, limit=limit)
        opened = pipeline.open_model(
            model, module=module, spec=spec, data=data, root=root, image_size=image_size, device=device
        )
        made = pipeline.plan_evaluation(
            spec,
            opened,
            classes=classes,
            own=own_attacks,
            eps=radii,
            presets=presets,
        )
    for line in (opened.note, *presets.values()):
        if line is not None:
            typer.echo(str(line), err=True)
    if dry_run:
        typer.echo(f"about {made.cost}", err=True)
        return
    with (
        telling_if_finished(out, runs.RESULTS),
        prints_aside(),
        ecnn.progress_bar("attacking") as progress,
    ):
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
