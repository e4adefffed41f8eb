"""The command `ecnn`: arguments in, rooms called, results on standard output, all else on standard error."""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

import ecnn
from ecnn.errors import InputError

if TYPE_CHECKING:
    from ecnn.pipeline import TrainedRun

app = typer.Typer(
    name="ecnn",
    help="Error-correcting neural networks: design codes, train on them, attack them, audit the result.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Arguments = ParamSpec("Arguments")
Root = Annotated[Path, typer.Option(help="Where dataset files are.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")]
SavedModel = Annotated[str, typer.Argument(help="A run folder or the name of a shipped model.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
DebugFlag = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]


def one_sentence_errors(command: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """The command with every InputError shown as a sentence and exit status 2."""

    @functools.wraps(command)
    def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except InputError as error:
            if kwargs.get("debug"):
                raise
            typer.echo(f"ecnn: {error}", err=True)
            raise typer.Exit(2) from None

    return guarded


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"ecnn {ecnn.__version__}")
        raise typer.Exit


class CodeObjective(StrEnum):
    energy = "energy"
    distance = "distance"


@app.command()
@one_sentence_errors
def code(
    classes: Annotated[int | None, typer.Option(help="Number of classes.")] = None,
    length: Annotated[int | None, typer.Option(help="Number of tasks, the members of the ensemble.")] = None,
    arity: Annotated[int, typer.Option(help="Symbols per task.")] = 2,
    objective: Annotated[
        CodeObjective, typer.Option(help="The paper's energy, or the largest row, then column distance.")
    ] = CodeObjective.energy,
    column_weight: Annotated[
        str, typer.Option(help='Weight of columns in the energy: "balanced" or a number.')
    ] = "balanced",
    chains: Annotated[int, typer.Option(help="Independent runs that share the steps.")] = 8,
    seed: Annotated[int, typer.Option(help="Same seed, same code.")] = 0,
    steps: Annotated[
        int | None, typer.Option(help="Proposals in all.  [default: 4 million, distance: 24 million]")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Stop after this long even if steps are left.")
    ] = None,
    init: Annotated[str | None, typer.Option(help="Start from this code: a file or a shipped name.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the code here as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the code here: .png, .pdf or .svg.")] = None,
    show: Annotated[str | None, typer.Option(help="Show a code instead: a file or a shipped name.")] = None,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Design a code and print its distances beside the bounds, or show one (--show)."""
    from ecnn import files, plots
    from ecnn.annealing import kernel

    for path in filter(None, (out, plot)):
        files.check_writable(path)
    if plot:
        plots.check_figure_path(plot)
    elapsed = None
    if show is not None:
        if classes is not None or length is not None:
            raise InputError("--show shows an existing code, so it takes no --classes or --length.")
        found = ecnn.load_code(show)
    else:
        if classes is None or length is None:
            raise InputError(
                "give --classes and --length to design a code, or --show FILE or NAME to see one."
            )
        if not kernel.COMPILED:
            typer.echo(
                "designing without numba; with it (pip install 'ecnn[fast]') this is about 100 times faster",
                err=True,
            )
        started = time.monotonic()
        with ecnn.progress_bar("designing") as progress:
            found = ecnn.design_code(
                classes,
                length,
                arity=arity,
                objective=objective.value,
                column_weight=_column_weight(column_weight),
                chains=chains,
                steps=steps,
                seconds=seconds,
                seed=seed,
                init=ecnn.load_code(init) if init is not None else None,
                progress=progress,
            )
        elapsed = time.monotonic() - started
    if out:
        found.save(out)
    if plot:
        plots.plot_code(found, plot)
    typer.echo(
        json.dumps(_code_as_json(found, elapsed)) if as_json else _code_as_text(found, elapsed, out, plot)
    )


def _column_weight(text: str) -> Any:
    try:
        return text if text == "balanced" else float(text)
    except ValueError:
        raise InputError(f'--column-weight must be "balanced" or a number, not {text!r}.') from None


def _code_as_json(found: ecnn.CodeMatrix, elapsed: float | None) -> dict[str, Any]:
    report = found.report(found.provenance.get("column_weight", "balanced"))
    values: dict[str, Any] = {**vars(report)}
    for key in ("objective", "seed", "steps", "proposals", "stopped_by"):
        values[key] = found.provenance.get(key)
    values.update(seconds=elapsed, hash=found.content_hash, symbols=found.symbols.tolist())
    # JSON has no infinity: the energy of a code that asks a question twice, the column distance of a single column.
    return {key: None if value in (math.inf, -math.inf) else value for key, value in values.items()}


def _code_as_text(found: ecnn.CodeMatrix, elapsed: float | None, out: Path | None, plot: Path | None) -> str:
    lines = [str(found.report(found.provenance.get("column_weight", "balanced")))]
    if elapsed is not None:
        why = {
            "steps": "all steps used",
            "seconds": "stopped by --seconds",
            "interrupt": "interrupted",
            "bounds": "both bounds met, so nothing better exists",
        }[found.provenance["stopped_by"]]
        lines.append(
            f"{found.provenance['proposals']:,} proposals in {elapsed:.1f} s, seed {found.provenance['seed']}: {why}"
        )
    else:
        lines += (
            ["", *("".join(f"{symbol:x}" for symbol in row) for row in found.symbols)]
            if found.arity <= 16
            else []
        )
        lines += [""] + [f"{key}: {value}" for key, value in found.provenance.items()]
    lines += [f"wrote {path}" for path in (out, plot) if path]
    return "\n".join(lines)


@app.command()
@one_sentence_errors
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
            help="ecnn, resnet, adp, tanh_ensemble, independent_ecoc, specialists, feature_squeezing or empir.  "
            "[default: ecnn]"
        ),
    ] = None,
    code: Annotated[
        str | None, typer.Option(help="Code of an ecnn or independent_ecoc: a file or a shipped name.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="paper, onecycle, robust, small, adp, ...  [default: what fits model and data]"),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same run.  [default: 0]")] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share of the training images that choose the epoch.  [default: 0.1]")
    ] = None,
    eps: Annotated[
        str | None,
        typer.Option(
            help="Train adversarially within this radius, for example 8/255; by TRADES with --set "
            "train.objective=trades."
        ),
    ] = None,
    attack: Annotated[
        str | None, typer.Option(help="What trains against it: pgd, fgsm, apgd, ...  [default: pgd]")
    ] = None,
    attack_steps: Annotated[int | None, typer.Option(help="Steps of that attack.  [default: 10]")] = None,
    attack_on: Annotated[
        str | None,
        typer.Option(help="Where it looks: scores, linear, tempered, members.  [default: scores]"),
    ] = None,
    image_size: Annotated[int | None, typer.Option(help="For a folder of images: resize to this.")] = None,
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved spec and stop.")] = False,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Train a model and write a run folder. Started by torchrun, the processes share the work."""
    from ecnn import files, pipeline
    from ecnn.spec import Spec, parse_settings, with_values
    from ecnn.training import TrainingError

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
        made = pipeline.plan(whole, pipeline.load_spec_data(whole, root))
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
    except TrainingError as error:
        raise InputError(str(error)) from error
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


@app.command()
@one_sentence_errors
def evaluate(
    model: SavedModel,
    attack: Annotated[
        list[str], typer.Option(help="pgd, autoattack, cw, ... Repeatable; their worst case is given.")
    ],
    norm: Annotated[str | None, typer.Option(help="linf, l2 or l1.  [default: linf]")] = None,
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
    limit: Annotated[int | None, typer.Option(help="The first so many test images.  [default: all]")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same random numbers for every image.")] = 0,
    data: Annotated[str | None, typer.Option(help="Other data than the model was trained on.")] = None,
    root: Root = Path("data"),
    batch_size: Annotated[int | None, typer.Option(help="Images at a time; changes no result.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep outcomes per image there, and resume from them.")
    ] = None,
    save_images: Annotated[Path | None, typer.Option(help="Write the attacked images to this .npz.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with what --out holds.")] = True,
    device: Device = "auto",
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Attack a saved model and count, image by image, what survives."""
    from ecnn import pipeline, runs
    from ecnn.spec import parse_settings

    options: dict[str, Any] = {}
    for name, value in parse_settings(settings or []).items():
        if not name.startswith("attack."):
            raise InputError(f"--set takes attack.NAME=VALUE here, not {name!r}.")
        options[name.removeprefix("attack.")] = value
    flags = {"norm": norm, "steps": steps, "step_size": step_size, "loss": loss, "on": on, "keep": keep}
    options |= {name: value for name, value in flags.items() if value is not None}
    spec = runs.read_spec(model).changed(
        {"attacks": pipeline.attack_tables(attack, options, eps or ()), "data.test_limit": limit}
    )
    with ecnn.progress_bar("attacking") as progress:
        found = pipeline.evaluate_run(
            model,
            spec,
            data=data,
            root=root,
            seed=seed,
            batch_size=batch_size,
            out=out,
            save_images=save_images,
            device=device,
            resume=resume,
            progress=progress,
        )
    typer.echo(json.dumps(found.to_json()) if as_json else found.table())


@app.command()
@one_sentence_errors
def audit(
    eps: Annotated[str, typer.Option(help="Radius it is said to be robust in, 0.04 or 8/255.")],
    model: Annotated[
        str | None, typer.Argument(help="A run folder or the name of a shipped model; or use --module.")
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(help="file.py:function that returns a torch module from [0, 1] pixels to scores."),
    ] = None,
    norm: Annotated[str, typer.Option(help="linf, l2 or l1.")] = "linf",
    claim: Annotated[
        float | None,
        typer.Option(help="The accuracy in question, 0.72.  [default: what a plain attack would report]"),
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
    resume: Annotated[bool, typer.Option(help="Go on with what --out holds.")] = True,
    device: Device = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would cost.")] = False,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Say whether to believe a robustness number; exit status 0 believable, 1 not believable, 3 inconclusive."""
    from ecnn import pipeline
    from ecnn.spec import AuditTable

    table = AuditTable(norm=norm, eps=eps, claim=claim, limit=limit, budget=budget, seed=seed)
    made = pipeline.plan_audit(
        table, source=model, module=module, data=data, root=root, image_size=image_size, device=device
    )
    cost = made.cost
    typer.echo(
        f"at most {cost.forwards:,} images forward and {cost.backwards:,} backward for {made.images:,} images, and "
        "diagnostics",
        err=True,
    )
    if dry_run:
        return
    with ecnn.progress_bar("auditing") as progress:
        found = pipeline.audit_run(made, out=out, resume=resume, progress=progress)
    typer.echo(json.dumps(found.to_dict()) if as_json else found.markdown(), nl=as_json)
    raise typer.Exit(found.exit_code)


@app.command()
@one_sentence_errors
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be run.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Only print the table of what is there.")] = False,
    debug: DebugFlag = False,
) -> None:
    """Run every arm, seed and attack of an experiment, then print its table; what is finished is not run again."""
    from ecnn import pipeline
    from ecnn.checks import check_choice
    from ecnn.experiment import load_experiment

    found = load_experiment(experiment)
    for name in stage or ():
        check_choice("--stage", name, pipeline.STAGES)
    tasks = pipeline.tasks_of(found, out, arms=arm or (), seeds=seed or ())
    if dry_run:
        for task in tasks:
            typer.echo(f"{task.arm.name} seed {task.seed}: {', '.join(task.spec.attacks)}  -> {task.folder}")
        return
    failed = []
    if jobs > 1 and not table:
        flags = [("--stage", name) for name in stage or ()]
        flags += [("--root", str(root)), ("--out", str(out)), ("--device", device)]
        arguments = [text for pair in flags for text in pair]
        failed = pipeline.run_tasks(tasks, experiment, jobs=jobs, arguments=arguments)
    elif not table:
        for task in tasks:
            with ecnn.progress_bar(f"{task.arm.name} seed {task.seed}") as progress:
                stages = stage or pipeline.STAGES
                pipeline.run_task(task, root=root, device=device, stages=stages, progress=progress)
    typer.echo(pipeline.table_text(found, pipeline.read_cells(found, out)))
    for task in failed:
        typer.echo(
            f"ecnn: {task.arm.name} with seed {task.seed} failed: {task.folder}/log.txt says why.", err=True
        )
    if failed:
        raise typer.Exit(1)


@app.command()
@one_sentence_errors
def models(as_json: JsonFlag = False, debug: DebugFlag = False) -> None:
    """List the models that come with the package."""
    from ecnn import runs

    found = {name: runs.describe_run(runs.zoo_folder(name)) for name in runs.models()}
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name, facts in found.items():
        trained = (
            f"adversarially trained at {facts['adversarial']}"
            if facts["adversarial"]
            else "no adversarial training"
        )
        typer.echo(f"{name:<22}{facts['data']:<10}test {100 * facts['test_accuracy']:.2f} %   {trained}")
