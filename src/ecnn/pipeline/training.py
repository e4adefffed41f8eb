"""From a request to train to a finished run folder."""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ecnn import files, runs
from ecnn.annealing import design_code
from ecnn.attacks import PGD, Attack
from ecnn.baselines import SQUEEZERS, TANH_DISTURBANCES, TANH_SIZES, FeatureSqueezing
from ecnn.checks import parse_eps
from ecnn.codes import CodeMatrix, codebook, load_code
from ecnn.data import Dataset, Split, load_data
from ecnn.errors import InputError
from ecnn.pipeline.common import find_device
from ecnn.progress import Progress
from ecnn.training.checkpoints import load_checkpoint, model_tensors, save_checkpoint
from ecnn.training.loop import BEST, accuracy, fit
from ecnn.training.recipes import MEMBER_OPTIONS, Recipe, resolve_recipe, spell_out

#: model -> objectives that can train it, its own first.
OBJECTIVES_OF: dict[str, tuple[str, ...]] = {
    "ecnn": ("member_hinge", "member_cross_entropy", "cross_entropy", "trades"),
    "resnet": ("cross_entropy", "trades"),
    "adp": ("adp", "empir", "cross_entropy", "trades"),
    "tanh_ensemble": ("tanh_ensemble", "member_hinge", "member_cross_entropy", "cross_entropy", "trades"),
    "independent_ecoc": ("member_hinge", "member_cross_entropy", "cross_entropy", "trades"),
    "specialists": ("specialists", "cross_entropy", "trades"),
    "feature_squeezing": ("cross_entropy", "trades"),
    "empir": ("empir", "cross_entropy", "trades"),
}
CODED = ("ecnn", "independent_ecoc")
# Datasets whose mirrored images belong to another class, or to none.
_NEVER_MIRRORED = ("digits", "mnist", "gtsrb")
_FALSE_POSITIVE_RATE = 0.05


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What `ecnn train` was asked for; None means: choose what fits the data.

    Attributes:
        model: options of the model, as in the run's spec.toml.
        train: options that replace the recipe's.
        objective: settings of the objective.
        attack: options of `PGD` for adversarial training, or None. With the objective "trades", which attacks by
            itself, its radius and steps become the objective's, and the attack chooses the epoch.
        compile_parts: as in `fit`.
    """

    data: str
    root: Path = Path("data")
    out: Path | None = None
    kind: str = "ecnn"
    code: str | None = None
    recipe: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    attack: dict[str, Any] | None = None
    seed: int = 0
    val_fraction: float = 0.1
    image_size: int | None = None
    device: str = "auto"
    resume: bool = True
    compile_parts: bool = False


@dataclass(frozen=True)
class TrainedRun:
    """Where the run is and what came of it; the test images were looked at once, after the epoch was chosen."""

    folder: Path
    parameters: int
    epochs: int
    best_epoch: int
    val_accuracy: float | None
    test_accuracy: float
    test_images: int
    seconds: float
    notes: tuple[str, ...] = ()


def training_attack(eps: float | str, steps: int, on: str) -> dict[str, Any]:
    """Options of the PGD that adversarial training uses: steps that together could cross the ball 2.5 times."""
    step_size = 2.5 * parse_eps(eps) / max(1, steps)
    return {
        "norm": "linf",
        "eps": eps,
        "steps": steps,
        "step_size": step_size,
        "on": on,
        "loss": "cross_entropy",
        "keep": "last",
    }


@dataclass(frozen=True)
class Plan:
    """A request with every choice made; the model is built and untrained.

    Attributes:
        attack: on the training images, or None.
        val_attack: on the validation images, where it is another one.
    """

    spec: dict[str, Any]
    recipe: Recipe
    code: CodeMatrix | None
    model: nn.Module
    attack: Attack | None
    val_attack: Attack | None


def plan(request: TrainRequest, data: Dataset) -> Plan:
    """Chooses what the request left open and builds the model from its seed."""
    runs.check_kind(request.kind)
    code = _code_for(request, data)
    recipe = _recipe_for(request, data)
    attack, val_attack = request.attack, None
    if recipe.objective == "trades":
        attack, val_attack = None, _attack_like(recipe.objective_options, request.attack)
    torch.manual_seed(request.seed)
    model = runs.build_model(
        request.kind,
        code=code,
        num_classes=data.num_classes,
        in_channels=data.in_channels,
        mean=data.mean_image,
        **{**_published_options(request.kind, data), **request.model},
    )
    spec = {
        "seed": request.seed,
        "data": {
            "name": data.name,
            "val_fraction": request.val_fraction,
            "num_classes": data.num_classes,
            "in_channels": data.in_channels,
            "image_size": list(data.image_size),
            "fingerprint": data.fingerprint,
        },
        "model": runs.describe_model(request.kind, model),
        "train": dataclasses.asdict(recipe),
        "attack": {"kind": "pgd", **attack} if attack else None,
        "val_attack": {"kind": "pgd", **val_attack} if val_attack else None,
    }
    made = [PGD(**options) if options else None for options in (attack, val_attack)]
    return Plan(spec, recipe, code, model, *made)


def _recipe_for(request: TrainRequest, data: Dataset) -> Recipe:
    """The recipe with the objective that fits the model, every setting of which is spelled out."""
    recipe = resolve_recipe(request.recipe or _default_recipe(request.kind, data), **request.train)
    fitting = OBJECTIVES_OF[request.kind]
    own = fitting[0]
    if "objective" in request.train:
        if recipe.objective not in fitting:
            known = ", ".join(fitting)
            raise InputError(f"{request.kind} can be trained by {known}, not by {recipe.objective!r}.")
    elif not (own.startswith("member") and recipe.objective in fitting):
        recipe = resolve_recipe(recipe, objective=own)
    if not recipe.objective.startswith("member"):
        for name in MEMBER_OPTIONS:
            if name in request.train:
                raise InputError(f"the objective {recipe.objective!r} has no {name}.")
        recipe = dataclasses.replace(recipe, diversity_weight=0.0)
    if data.name in _NEVER_MIRRORED and "flip" not in request.train:
        recipe = dataclasses.replace(recipe, flip=False)
    options = {**_published_settings(recipe, data), **_radius_of(request, recipe), **request.objective}
    return spell_out(dataclasses.replace(recipe, objective_options={**recipe.objective_options, **options}))


def _default_recipe(kind: str, data: Dataset) -> str:
    like = _like(data)
    if like == "digits":
        return "small"
    if kind in ("adp", "tanh_ensemble"):
        return f"{kind}_mnist" if like == "mnist" else kind
    return "paper"


def _like(data: Dataset) -> str:
    """The dataset whose settings suit these images: by their size, then by their channels."""
    if data.image_size[0] < 20:
        return "digits"
    return "mnist" if data.in_channels == 1 else "cifar10"


def _published_options(kind: str, data: Dataset) -> dict[str, Any]:
    """Options of a model that its authors chose by dataset."""
    if kind == "tanh_ensemble":
        return {**TANH_SIZES[_like(data)], "image_size": list(data.image_size)}
    return dict(SQUEEZERS[_like(data)]) if kind == "feature_squeezing" else {}


def _published_settings(recipe: Recipe, data: Dataset) -> dict[str, Any]:
    """Settings of an objective that its authors chose by dataset, where the recipe has none."""
    needed = recipe.objective == "tanh_ensemble" and not recipe.objective_options
    return dict(TANH_DISTURBANCES[_like(data)]) if needed else {}


def _radius_of(request: TrainRequest, recipe: Recipe) -> dict[str, Any]:
    """What TRADES takes from the attack that was asked for."""
    if recipe.objective != "trades" or request.attack is None:
        return {}
    return {name: request.attack[name] for name in ("eps", "steps", "step_size")}


def _attack_like(options: dict[str, Any], asked: dict[str, Any] | None) -> dict[str, Any]:
    """Options of a PGD with the radius and steps of TRADES, looking where the attack asked for does."""
    attack = training_attack(options["eps"], options["steps"], (asked or {}).get("on", "scores"))
    return {**attack, "step_size": options["step_size"]}


def train_run(request: TrainRequest, *, progress: Progress | None = None) -> TrainedRun:
    """Trains as requested and leaves a run folder; a finished run with the same spec is not trained again."""
    device = find_device(request.device)
    data = load_data(
        request.data, request.root, val_fraction=request.val_fraction, image_size=request.image_size
    )
    made = plan(request, data)
    folder = request.out or Path("runs") / Path(data.name).name / request.kind / str(request.seed)
    files.check_writable(folder / runs.SPEC)
    model = made.model.to(device)
    if _is_first_process():
        runs.start_run(folder, made.spec, made.code)
    started = time.monotonic()
    history = fit(
        model,
        data.train,
        val=data.val,
        recipe=made.recipe,
        attack=made.attack,
        val_attack=made.val_attack,
        seed=request.seed,
        run_dir=folder,
        resume=request.resume,
        compile_parts=request.compile_parts,
        progress=progress,
    )
    _set_threshold(model, data.val.to(device), folder)
    result = TrainedRun(
        folder=folder,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        epochs=len(history.epochs),
        best_epoch=history.best_epoch,
        val_accuracy=history.best_accuracy,
        test_accuracy=accuracy(model, data.test),
        test_images=len(data.test),
        seconds=time.monotonic() - started,
        notes=tuple(note for note in (history.note, *history.alarms) if note),
    )
    if _is_first_process():
        known = files.read_json(folder / runs.RESULTS) if (folder / runs.RESULTS).exists() else {}
        files.write_json(
            folder / runs.RESULTS,
            {**known, "test_accuracy": result.test_accuracy, "images": result.test_images},
        )
        runs.finish_run(folder)
    return result


def _set_threshold(model: nn.Module, val: Split, folder: Path) -> None:
    """Gives a detector its threshold, which is no matter of training, and the run folder the weights with it."""
    if not isinstance(model, FeatureSqueezing) or len(val) == 0:
        return
    model.fit_threshold(val[:][0], _FALSE_POSITIVE_RATE)
    if _is_first_process() and (folder / BEST).exists():
        _, facts = load_checkpoint(folder / BEST)
        save_checkpoint(folder / BEST, model_tensors(model), facts)


def _code_for(request: TrainRequest, data: Dataset) -> CodeMatrix | None:
    if request.kind not in CODED:
        if request.code is not None:
            raise InputError(f"only {' and '.join(CODED)} take a code: leave it out for {request.kind}.")
        return None
    if request.code is not None:
        return load_code(request.code)
    shipped = [name for name in codebook() if name.startswith(f"{data.num_classes}x") and "-q" not in name]
    if shipped:
        return load_code(shipped[-1])
    length = max(30, 2 * (data.num_classes - 1).bit_length())
    return design_code(data.num_classes, length, objective="distance", steps=2_000_000, seed=request.seed)


def join_processes() -> None:
    """Under torchrun, makes this process one of the group; otherwise does nothing."""
    if "WORLD_SIZE" not in os.environ or torch.distributed.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def leave_processes() -> None:
    """The counterpart of `join_processes`."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"
