"""Trains the model of a spec into a run folder, and loads the images that a spec names."""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ecnn import constructions, files, runs
from ecnn.attacks import ATTACKS, Attack
from ecnn.auditing.report import RESULT
from ecnn.baselines import FeatureSqueezing
from ecnn.checks import check_count, parse_eps
from ecnn.codes import CodeMatrix, codebook, load_code
from ecnn.data import NAMES, Dataset, Split, load_adversarial_signs, load_data
from ecnn.data.loading import find_folder, resolve_root
from ecnn.errors import InputError
from ecnn.evaluation.batch import BATCH_SIZE, check_attacks, check_request
from ecnn.evaluation.records import FOLDER
from ecnn.kinds import ModelKind
from ecnn.models import build_model, find_kind, resolve_recipe, spell_out
from ecnn.pipeline.threads import suitable_threads
from ecnn.progress import Progress
from ecnn.recipes import AUTO, MEMBER_OPTIONS, Recipe, auto_recipe
from ecnn.spec import CodeTable, Spec, attack_options, make_attack
from ecnn.training.checkpoints import load_checkpoint, model_tensors, save_checkpoint
from ecnn.training.loop import BEST, LOG, accuracy, fit

AnyPath = files.AnyPath
#: Name of a set of images that are already attacked, the adversarial traffic signs, for evaluations and audits.
SIGNS = "optprojtran"

_FALSE_POSITIVE_RATE = 0.05
# Defaults of attacks that are used in training; each takes those of the options that it has.
_ATTACK_STEPS = 10
_ATTACK_DEFAULTS = {"norm": "linf", "loss": "cross_entropy", "on": "scores", "keep": "last"}


@dataclass(frozen=True)
class TrainedRun:
    """The folder and the results of a run. The test images are used only once, after the best epoch was chosen.

    Attributes:
        val_accuracy: of the best epoch.
        seconds: that this call took; 0 if nothing was trained.
        notes: remarks for the user.
        was_finished: whether the folder held this run already, so that nothing was trained.
    """

    folder: Path
    parameters: int
    epochs: int
    best_epoch: int
    val_accuracy: float | None
    test_accuracy: float
    test_images: int
    seconds: float
    notes: tuple[str, ...] = ()
    was_finished: bool = False


@dataclass(frozen=True)
class Plan:
    """A spec with every choice made; the model is built and untrained.

    Attributes:
        spec: every choice spelled out; planning it again gives the same plan.
        attack: on the training images, or None.
        val_attack: on the validation images, if it differs from `attack`; otherwise None.
    """

    spec: Spec
    recipe: Recipe
    code: CodeMatrix | None
    model: nn.Module
    attack: Attack | None
    val_attack: Attack | None


def plan(spec: Spec, data: Dataset) -> Plan:
    """Chooses everything that the spec leaves open, and builds the untrained model with the spec's random seed."""
    spec.data.check_shape(data)
    if spec.data.fingerprint not in (None, data.fingerprint):
        raise InputError(f"the images of {data.name} are not those that the spec was written for.")
    kind = find_kind(spec.model.get("kind", "ecnn"))
    given = {name: value for name, value in spec.model.items() if name != "kind"}
    suited = kind.suited_to(data.in_channels, data.image_size)
    code, code_table = _code_for(spec, kind, data)
    recipe = recipe_for(
        spec,
        in_channels=data.in_channels,
        image_size=data.image_size,
        num_images=len(data.train),
        is_own=data.folder is not None,
        may_be_mirrored=data.may_be_mirrored,
    )
    attack, val_attack = _attacks_for(spec, recipe)
    torch.manual_seed(spec.seed)
    model = build_model(
        kind.name,
        code=code,
        num_classes=data.num_classes,
        in_channels=data.in_channels,
        mean=data.mean_image,
        **{**_own_image_options(spec, kind, data), **suited.options, **given},
    )
    resolved = dataclasses.replace(
        spec,
        data=dataclasses.replace(
            spec.data,
            num_classes=data.num_classes,
            in_channels=data.in_channels,
            image_size=list(data.image_size),
            fingerprint=data.fingerprint,
            path=data.folder,
        ),
        code=code_table,
        model=runs.describe_model(kind.name, model),
        train={**dataclasses.asdict(recipe), "attack": attack, "val_attack": val_attack},
    )
    made = [None if table is None else make_attack(table) for table in (attack, val_attack)]
    return Plan(Spec.from_dict(resolved.to_dict()), recipe, code, model, *made)


def try_plan(spec: Spec, *, root: AnyPath = "data", device: str = "auto") -> Plan:
    """The plan of a spec, after its model and attacks were tried on one training image: training can start."""
    place, data = runs.find_device(device), load_spec_data(spec, root)
    made = plan(spec, data)
    check_request(made.model.to(place), data.train, 1, BATCH_SIZE)
    _check_attacks(made, data)
    return made


def _check_attacks(made: Plan, data: Dataset) -> None:
    """Raises InputError unless the model has the parts that the views of the training and validation attacks read."""
    attacks = {"train.attack": made.attack, "train.val_attack": made.val_attack}
    check_attacks(made.model, data.train[0][0], attacks)


def recipe_for(
    spec: Spec,
    *,
    in_channels: int,
    image_size: tuple[int, int],
    num_images: int,
    is_own: bool,
    may_be_mirrored: bool,
) -> Recipe:
    """The recipe of a spec, with an objective that fits the model and with all settings of that objective.

    Args:
        in_channels, image_size: of the dataset.
        num_images: how many are trained on.
        is_own: whether they are the user's own images instead of a dataset with a name.
        may_be_mirrored: whether an image keeps its class when it is mirrored.
    """
    kind = find_kind(spec.model.get("kind", "ecnn"))
    suited = kind.suited_to(in_channels, image_size)
    changes = {
        name: value
        for name, value in spec.train.items()
        if name not in ("recipe", "attack", "val_attack", "objective_options")
    }
    named = _recipe_name(spec, kind, str(suited.recipe), is_own=is_own)
    auto = auto_recipe(num_images, image_size) if named == AUTO else None
    recipe = resolve_recipe(auto or named, **changes)
    own = kind.objectives[0]
    if "objective" in changes:
        if recipe.objective not in kind.objectives:
            known = ", ".join(kind.objectives)
            raise InputError(f"{kind.name} can be trained by {known}, not by {recipe.objective!r}.")
    elif not (own.startswith("member") and recipe.objective in kind.objectives):
        recipe = resolve_recipe(recipe, objective=own)
    if not recipe.objective.startswith("member"):
        defaults = {"diversity_weight": 0.0, "entropy_unit": "normalised"}
        for name in MEMBER_OPTIONS:
            if changes.get(name, defaults[name]) != defaults[name]:
                raise InputError(f"the objective {recipe.objective!r} has no {name}.")
        recipe = dataclasses.replace(recipe, diversity_weight=0.0)
    if not may_be_mirrored and "flip" not in changes:
        recipe = dataclasses.replace(recipe, flip=False)
    options = dict(recipe.objective_options)
    if recipe.objective == own and not options:
        options |= suited.settings
    if recipe.objective == "trades" and spec.train.get("attack"):
        asked = training_attack(spec.train["attack"])
        options |= {name: asked[name] for name in ("eps", "steps", "step_size")}
    options |= spec.train.get("objective_options", {})
    return spell_out(dataclasses.replace(recipe, objective_options=options))


def _recipe_name(spec: Spec, kind: ModelKind, suited: str, *, is_own: bool) -> str:
    """The name of the recipe: the spec's, otherwise the published one of the kind of model.

    For the user's own images, "auto" replaces the published recipe, unless the kind brings that recipe itself.
    """
    untuned = is_own and suited not in kind.own_recipes
    return str(spec.train.get("recipe") or (AUTO if untuned else suited))


def _own_image_options(spec: Spec, kind: ModelKind, data: Dataset) -> dict[str, Any]:
    """Options of the model where the recipe is "auto": batch norm, if the model has that option.

    With few images it gains five points of accuracy (docs/own_images.md). The paper's network has none.
    """
    suited = str(kind.suited_to(data.in_channels, data.image_size).recipe)
    is_auto = _recipe_name(spec, kind, suited, is_own=data.folder is not None) == AUTO
    return {"batch_norm": True} if is_auto and "batch_norm" in kind.options else {}


def _attacks_for(spec: Spec, recipe: Recipe) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The tables of the attacks on training and on validation images; None for no attack.

    The TRADES objective makes its own attack on training images, so that the first is None. Unless the spec names an
    attack on validation images, it is then one with the radius and steps of the objective, and it chooses the epoch.
    """
    asked, val_asked = (spec.train.get(name) or None for name in ("attack", "val_attack"))
    val_attack = None if val_asked is None else training_attack(val_asked)
    if recipe.objective != "trades":
        return (None if asked is None else training_attack(asked)), val_attack
    if val_attack is None:
        radius = {name: recipe.objective_options[name] for name in ("eps", "steps", "step_size")}
        val_attack = training_attack({"on": (asked or {}).get("on", "scores"), **radius})
    return None, val_attack


def training_attack(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table of an attack that is used in training, with defaults for what it leaves open.

    By default it maximises the cross-entropy of the scores, and its last iterate is trained on, as in Madry et al.
    (2018). The default step size is 2.5 * eps / steps.
    """
    kind = table.get("kind", "pgd")
    known = attack_options(kind)
    filled: dict[str, Any] = {name: value for name, value in _ATTACK_DEFAULTS.items() if name in known}
    if not ATTACKS[kind].has_last_iterate:
        del filled["keep"]
    if "steps" in known:
        filled["steps"] = steps = table.get("steps", _ATTACK_STEPS)
        check_count("train.attack.steps", steps, least=0)
        if "step_size" in known and "eps" in table:
            filled["step_size"] = 2.5 * parse_eps(table["eps"]) / max(1, steps)
    return {"kind": kind, **filled, **{name: value for name, value in table.items() if name != "kind"}}


def _code_for(spec: Spec, kind: ModelKind, data: Dataset) -> tuple[CodeMatrix | None, CodeTable | None]:
    """The code of the model and the table that describes it; both None for a kind of model without a code."""
    if not kind.needs_code:
        if spec.code is not None:
            raise InputError(f"a model of kind {kind.name!r} takes no code: leave it out.")
        return None, None
    table = spec.code or _default_code(data.num_classes, spec.seed)
    if table.name is not None:
        code = load_code(table.name)
    else:
        arity, objective = table.arity or 2, table.objective or "distance"
        seed = spec.seed if table.seed is None else table.seed
        table = dataclasses.replace(table, arity=arity, objective=objective, seed=seed)
        code = _designed(data.num_classes, int(table.code_length or 0), arity, objective, table.steps, seed)
    if table.doubled:
        code = constructions.doubled(code)
    if table.content_hash not in (None, code.content_hash):
        raise InputError(f"the code {table.name or 'designed'} is not the one that the spec was written for.")
    return code, dataclasses.replace(table, content_hash=code.content_hash)


@functools.lru_cache(maxsize=4)  # networks that are trained one after the other often share a code
def _designed(
    num_classes: int, code_length: int, arity: int, objective: str, steps: int | None, seed: int
) -> CodeMatrix:
    # Imported here because numba is slow to load, and most commands design no code.
    from ecnn.annealing import design_code

    options: Any = {"arity": arity, "objective": objective, "steps": steps, "seed": seed}
    code = design_code(num_classes, code_length, **options)
    if code.provenance["stopped_by"] == "interrupt":
        raise KeyboardInterrupt  # the best so far is not the code that the spec describes
    return code


def _default_code(num_classes: int, seed: int) -> CodeTable:
    """The table of the longest binary code that is shipped for so many classes; if there is none, of a new design."""
    shipped = [name for name in codebook() if name.startswith(f"{num_classes}x") and "-q" not in name]
    if shipped:
        return CodeTable(name=shipped[-1])
    return CodeTable(code_length=max(30, 2 * (num_classes - 1).bit_length()), steps=2_000_000, seed=seed)


def train_run(
    spec: Spec,
    *,
    out: AnyPath | None = None,
    root: AnyPath = "data",
    device: str = "auto",
    resume: bool = True,
    compile_parts: bool = False,
    progress: Progress | None = None,
) -> TrainedRun:
    """Trains the model of a spec and writes its run folder; a finished run of the same spec is not trained again.

    Args:
        out: the run folder; None for runs/DATA/KIND/SEED.
        root: where dataset files are.
        device: auto, cpu, cuda, mps.
        resume: goes on with what an earlier run left in the folder.
        compile_parts: as in `fit`.
    """
    place = runs.find_device(device)
    data = load_spec_data(spec, root)
    made = plan(spec, data)
    usual = Path("runs") / Path(data.name).name / str(made.spec.model["kind"]) / str(spec.seed)
    folder = usual if out is None else Path(out)
    files.check_writable(folder / runs.SPEC)
    if resume and runs.is_finished(folder, made.spec):
        files.tidy(folder)
        return _finished_run(folder, made.model)
    _check_attacks(made, data)
    with files.locked(folder, "training") if _is_first_process() else nullcontext():
        return _train(made, data, folder, place, resume, compile_parts, progress)


def _check_new(folder: Path) -> None:
    """Raises InputError if the folder holds an audit or outcomes of attacks, but not the run that they are of."""
    found = next((name for name in (RESULT, FOLDER) if files.exists(folder / name)), None)
    if found is not None and not files.exists(folder / runs.SPEC):
        raise InputError(
            f"{folder / found} describes another model, and would be mistaken for this one's: choose another folder."
        )


def _train(
    made: Plan,
    data: Dataset,
    folder: Path,
    place: torch.device,
    resume: bool,
    compile_parts: bool,
    progress: Progress | None,
) -> TrainedRun:
    """Trains the planned model and completes the run folder; DONE is written last."""
    model = made.model.to(place)
    damaged = runs.damaged_files(folder) if resume else ()
    if _is_first_process():
        _check_new(folder)
        runs.start_run(folder, made.spec, made.code, data.class_names)
    started = time.monotonic()
    with runs.kept_in(folder, resume=resume), suitable_threads(model, data.train):
        history = fit(
            model,
            data.train,
            val=data.val,
            recipe=made.recipe,
            attack=made.attack,
            val_attack=made.val_attack,
            seed=made.spec.seed,
            run_dir=folder,
            resume=resume,
            compile_parts=compile_parts,
            progress=progress,
        )
        _set_threshold(model, data.val.to(place), folder)
        test_accuracy = accuracy(model, data.test)
    repaired = f"damaged or missing, and written again by this run: {', '.join(damaged)}" if damaged else ""
    result = TrainedRun(
        folder=folder,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        epochs=len(history.epochs),
        best_epoch=history.best_epoch,
        val_accuracy=history.best_accuracy,
        test_accuracy=test_accuracy,
        test_images=len(data.test),
        seconds=time.monotonic() - started,
        notes=tuple(note for note in (repaired, history.note, *history.alarms) if note),
    )
    if _is_first_process():
        known = files.read_json(folder / runs.RESULTS) if files.exists(folder / runs.RESULTS) else {}
        files.write_json(
            folder / runs.RESULTS,
            {**known, "test_accuracy": result.test_accuracy, "images": result.test_images},
        )
        runs.finish_run(folder)
    return result


def _finished_run(folder: Path, model: nn.Module) -> TrainedRun:
    """The results of a finished run, read from its folder."""
    _, facts = load_checkpoint(folder / BEST)
    result = runs.read_results(folder)
    return TrainedRun(
        folder=folder,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        epochs=len(files.read_bytes(folder / LOG).splitlines()),
        best_epoch=facts["best_epoch"],
        val_accuracy=facts["best_accuracy"],
        test_accuracy=result["test_accuracy"],
        test_images=result["images"],
        seconds=0.0,
        notes=("already finished: nothing was trained",),
        was_finished=True,
    )


def load_spec_data(spec: Spec, root: AnyPath, other: str | None = None) -> Dataset:
    """The dataset of the spec, or the one named `other`, where dataset files are in `root`.

    Images are resized to the size in the spec, if it has one, except those of another dataset with a name.
    """
    size = spec.data.image_size if other not in NAMES else None
    path = spec.data.path
    is_there = path is not None and not other and _may_be_read(path)
    if not (other or is_there or path is None or find_folder(spec.data.name, resolve_root(root))):
        raise InputError(
            f"the images of the run were in {path}, and are not there, or may not be read: say where they are with "
            "--data."
        )
    return load_data(
        other or (path if path and is_there else spec.data.name),
        root,
        val_fraction=spec.data.val_fraction,
        image_size="auto" if size is None else (size[0], size[1]) if isinstance(size, list) else size,
    )


def _may_be_read(folder: str) -> bool:
    """Whether the folder exists and can be read; a spec from another machine may name somebody else's folder."""
    try:
        return files.is_folder(folder)
    except InputError:
        return False


def load_test_images(
    spec: Spec, root: AnyPath, other: str | None = None, class_names: Sequence[str] | None = None
) -> Split:
    """The test images to attack a model of this spec on: of its own dataset, of `other`, or the adversarial signs.

    Args:
        root: where dataset files are.
        other: another dataset, or `SIGNS`; None for the dataset of the spec.
        class_names: of the model; another dataset must name its classes the same way, or by the model's class numbers.
    """
    if other == SIGNS:
        return load_adversarial_signs(root).split
    if other is None:
        return load_own_data(spec, root).test
    found = load_spec_data(spec, root, other)
    spec.data.check_shape(found)
    if class_names is not None:
        for number, (name, own) in enumerate(zip(found.class_names, class_names, strict=False)):
            if name != own and not (name.isdecimal() and int(name) == number):
                raise InputError(
                    f"class {number} of {other} is {name!r}, and that of the model is {own!r}: name the classes as the "
                    "model does, or by their numbers."
                )
    return found.test


def load_own_data(spec: Spec, root: AnyPath) -> Dataset:
    """The dataset that a model of this spec was trained on; InputError if its folder now holds other images."""
    found = load_spec_data(spec, root)
    spec.data.check_shape(found)
    if found.folder and spec.data.fingerprint not in (None, found.fingerprint):
        raise InputError(
            f"the images in {found.folder} are not those that the model was trained on: put those back, or give "
            f"--data {shlex.quote(found.folder)} to evaluate and audit on these."
        )
    return found


def _set_threshold(model: nn.Module, val: Split, folder: Path) -> None:
    """Sets the threshold of a feature-squeezing detector on validation images, and saves it with the weights.

    Training does not set it. Models of other kinds are left as they are.
    """
    if not isinstance(model, FeatureSqueezing) or len(val) == 0:
        return
    model.fit_threshold(val[:][0], _FALSE_POSITIVE_RATE)
    if _is_first_process() and files.exists(folder / BEST):
        _, facts = load_checkpoint(folder / BEST)
        save_checkpoint(folder / BEST, model_tensors(model), facts)


def join_processes() -> None:
    """Under torchrun, makes this process one of the group; otherwise does nothing."""
    if "WORLD_SIZE" not in os.environ or torch.distributed.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def leave_processes() -> None:
    """Leaves the group of processes that `join_processes` has joined; otherwise does nothing."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"
