"""`ecnn train`: trains a model and writes its run folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import ecnn
from ecnn.cli.options import VIEW_HELP, Device, JsonFlag, Root
from ecnn.errors import InputError

if TYPE_CHECKING:
    from ecnn.pipeline import TrainedRun

_InPlaceOfTheRecipes = Annotated[int | None, typer.Option(help="Replaces the value of the recipe.")]


def train(
    data: Annotated[
        str | None,
        typer.Option(help="digits, mnist, cifar10, cifar100, gtsrb, or a folder of images by class."),
    ] = None,
    spec: Annotated[
        Path | None, typer.Option(help="A spec.toml to start from; other options replace its entries.")
    ] = None,
    root: Root = Path("data"),
    out: Annotated[Path | None, typer.Option(help="Run folder.  [default: runs/DATA/MODEL/SEED]")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="ecnn, resnet, multiscale, adp, tanh_ensemble, independent_ecoc, specialists, feature_squeezing or "
            "empir.  [default: ecnn]"
        ),
    ] = None,
    code: Annotated[
        str | None, typer.Option(help="Code of an ecnn or independent_ecoc: a file or a shipped name.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="auto (by the number of images), paper, onecycle, robust, ...  [default: what fits model and data]"
        ),
    ] = None,
    epochs: _InPlaceOfTheRecipes = None,
    batch_size: _InPlaceOfTheRecipes = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same run.  [default: 0]")] = None,
    val_fraction: Annotated[
        float | None,
        typer.Option(help="Share of the training images held out to choose the epoch.  [default: 0.1]"),
    ] = None,
    eps: Annotated[
        str | None,
        typer.Option(
            help="Train adversarially within this radius, for example 8/255; by TRADES with --set "
            "train.objective=trades."
        ),
    ] = None,
    attack: Annotated[
        str | None, typer.Option(help="Attack to train against: pgd, fgsm, apgd, ...  [default: pgd]")
    ] = None,
    attack_steps: Annotated[int | None, typer.Option(help="Steps of that attack.  [default: 10]")] = None,
    attack_on: Annotated[str | None, typer.Option(help=f"{VIEW_HELP}  [default: scores]")] = None,
    image_size: Annotated[
        int | None,
        typer.Option(
            help="For a folder of images: resize to this.  [default: 32 if they differ or are large]"
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any entry of the spec: train.lr=0.05, model.width=8, train.attack.norm=l2; objective.beta=3 is short "
            "for train.objective_options.beta=3. Repeatable.",
        ),
    ] = None,
    device: Device = "auto",
    resume: Annotated[bool, typer.Option(help="Continue a run found in the folder.")] = True,
    compile_parts: Annotated[
        bool, typer.Option("--compile", help="torch.compile the parts: starts later, then runs faster.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved spec, try the model on one image and stop.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a model and write a run folder. Started by torchrun, the processes share the work."""
    from ecnn import files, pipeline
    from ecnn.spec import Spec, parse_settings, with_values

    if data is None and spec is None:
        raise InputError("give --data, the name of a dataset or a folder of images, or --spec, a spec.toml.")
    if eps is None and (attack, attack_steps, attack_on) != (None, None, None):
        raise InputError("an attack to train against needs its radius: give --eps.")
    values = {
        "seed": seed,
        "data.name": data,
        "data.val_fraction": val_fraction,
        "data.image_size": image_size,
        "code.name": code,
        "model.kind": model,
        "train.recipe": recipe,
        "train.epochs": epochs,
        "train.batch_size": batch_size,
        "train.attack.kind": attack,
        "train.attack.eps": eps,
        "train.attack.steps": attack_steps,
        "train.attack.on": attack_on,
    }
    for name, value in parse_settings(settings or []).items():
        values["train.objective_options." + name[10:] if name.startswith("objective.") else name] = value
    whole = Spec.from_dict(with_values({} if spec is None else files.read_toml(spec), values))
    if dry_run:
        made = pipeline.try_plan(whole, root=root, device=device)
        typer.echo(json.dumps(made.spec.to_dict(), indent=1))
        return
    pipeline.join_processes()
    try:
        with ecnn.progress_bar("training") as progress:
            run = pipeline.train_run(
                whole,
                out=out,
                root=root,
                device=device,
                resume=resume,
                compile_parts=compile_parts,
                progress=progress,
            )
    finally:
        pipeline.leave_processes()
    if os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps({**vars(run), "folder": str(run.folder)}) if as_json else _run_as_text(run))


def _run_as_text(run: TrainedRun) -> str:
    val = "no validation" if run.val_accuracy is None else f"validation {100 * run.val_accuracy:.2f} %"
    lines = [
        f"test accuracy {100 * run.test_accuracy:.2f} % on {run.test_images:,} images "
        f"(epoch {run.best_epoch + 1} of {run.epochs}, {val})",
        f"{run.parameters:,} parameters, {run.seconds:.1f} s, run folder {run.folder}",
    ]
    return "\n".join([*lines, *run.notes])
