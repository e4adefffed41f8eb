"""The only wiring: from a request to a finished run folder."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ecnn import files, runs
from ecnn.annealing import design_code
from ecnn.attacks import ATTACKS, PGD, Attack
from ecnn.attacks.ball import parse_eps
from ecnn.codes import CodeMatrix, codebook, load_code
from ecnn.data import Dataset, load_data
from ecnn.errors import InputError
from ecnn.evaluation import Evaluation, evaluate, load_images
from ecnn.progress import Progress
from ecnn.training.loop import accuracy, fit
from ecnn.training.recipes import Recipe, resolve_recipe


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What `ecnn train` was asked for; None means: choose what fits the data.

    Attributes:
        model: options of the model, as in the run's spec.toml.
        train: options that replace the recipe's.
        attack: options of `PGD` for adversarial training, or None.
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


def training_attack(eps: str, steps: int, on: str) -> dict[str, Any]:
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


def parse_settings(
    settings: list[str], names: tuple[str, ...] = ("train", "model")
) -> dict[str, dict[str, Any]]:
    """`["train.lr=0.1", "model.width=8"]` as {"train": {"lr": 0.1}, "model": {"width": 8}}."""
    tables: dict[str, dict[str, Any]] = {name: {} for name in names}
    for setting in settings:
        key, equals, text = setting.partition("=")
        table, dot, name = key.partition(".")
        if not equals or not dot or table not in tables:
            wanted = " or ".join(f"{known}.NAME=VALUE" for known in names)
            raise InputError(f"--set takes {wanted}, not {setting!r}.")
        try:
            tables[table][name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            tables[table][name] = text
    return tables


@dataclass(frozen=True)
class Plan:
    """A request with every choice made; the model is built and untrained."""

    spec: dict[str, Any]
    recipe: Recipe
    code: CodeMatrix | None
    model: nn.Module


def plan(request: TrainRequest, data: Dataset) -> Plan:
    """Chooses what the request left open and builds the model from its seed."""
    code = _code_for(request, data) if request.kind == "ecnn" else None
    recipe = resolve_recipe(
        request.recipe or ("small" if data.image_size[0] < 20 else "paper"), **request.train
    )
    if request.kind == "resnet" and recipe.objective.startswith("member"):
        recipe = dataclasses.replace(recipe, objective="cross_entropy")
    torch.manual_seed(request.seed)
    model = runs.build_model(
        request.kind,
        code=code,
        num_classes=data.num_classes,
        in_channels=data.in_channels,
        mean=data.mean_image,
        **request.model,
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
        "attack": {"kind": "pgd", **request.attack} if request.attack else None,
    }
    return Plan(spec, recipe, code, model)


def train_run(request: TrainRequest, *, progress: Progress | None = None) -> TrainedRun:
    """Trains as requested and leaves a run folder; a finished run with the same spec is not trained again."""
    device = _device(request.device)
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
        attack=PGD(**request.attack) if request.attack else None,
        seed=request.seed,
        run_dir=folder,
        resume=request.resume,
        compile_parts=request.compile_parts,
        progress=progress,
    )
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


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """What `ecnn evaluate` was asked for; None means: as the model's run has it, or as the attack has it.

    Attributes:
        model: a run folder or the name of a shipped model.
        attacks: names of `ATTACKS`.
        options: of all attacks, by the names of their fields; an attack takes those it has.
        eps: radii; several repeat each attack that has one.
        out: where outcomes are kept, image by image; None keeps nothing.
        save_images: an .npz to write the attacked images to.
    """

    model: str
    attacks: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    eps: tuple[str, ...] = ()
    data: str | None = None
    root: Path = Path("data")
    limit: int | None = None
    seed: int = 0
    batch_size: int | None = None
    out: Path | None = None
    save_images: Path | None = None
    device: str = "auto"
    resume: bool = True


def make_attack(name: str, options: dict[str, Any], *, strict: bool = True) -> Attack:
    """The attack of that name with those options; not strict, options that it does not have are left out."""
    known = _options_of(name)
    kind = ATTACKS[name]
    unknown = sorted(set(options) - known)
    if unknown and strict:
        raise InputError(f"{name} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}.")
    needed = {entry.name for entry in dataclasses.fields(kind) if entry.default is dataclasses.MISSING}
    missing = sorted(needed - set(options))
    if missing:
        raise InputError(f"{name} needs {', '.join(missing)}, which decide its result and have no default.")
    return kind(**{key: value for key, value in options.items() if key in known})


def evaluate_run(request: EvaluateRequest, *, progress: Progress | None = None) -> Evaluation:
    """Attacks a saved model on the test images of its data."""
    device = _device(request.device)
    spec = files.read_toml(runs.run_folder(request.model) / runs.SPEC)
    model = runs.load_model(request.model, device=device)
    data = load_data(request.data or spec["data"]["name"], request.root, val_fraction=0.1)
    _check_shape(spec, data)
    options = {"recorded": device.type == "cuda", "norm": "linf", **request.options}
    if request.eps:
        options["eps"] = request.eps[0]
    unheard = sorted(set(request.options) - set().union(*map(_options_of, request.attacks)))
    if unheard:
        raise InputError(f"none of {', '.join(request.attacks)} has an option {unheard[0]!r}.")
    attacks = {name: make_attack(name, options, strict=False) for name in request.attacks}
    with _folder_for(request) as folder:
        found = evaluate(
            model,
            data.test,
            attacks,
            limit=request.limit,
            seed=request.seed,
            eps=request.eps if len(request.eps) > 1 else None,
            run_dir=folder,
            resume=request.resume,
            save_images=request.save_images is not None,
            progress=progress,
            **({} if request.batch_size is None else {"batch_size": request.batch_size}),
        )
        if request.save_images is not None and folder is not None:
            _write_images(request.save_images, folder, found)
    return found


def _options_of(name: str) -> set[str]:
    if name not in ATTACKS:
        raise InputError(f"no attack is called {name!r}; known: {', '.join(ATTACKS)}.")
    return {entry.name for entry in dataclasses.fields(ATTACKS[name]) if entry.init}


def _check_shape(spec: dict[str, Any], data: Dataset) -> None:
    """Raises InputError unless the model was made for images and classes like these."""
    for key, came in (
        ("num_classes", data.num_classes),
        ("in_channels", data.in_channels),
        ("image_size", list(data.image_size)),
    ):
        if spec["data"][key] != came:
            raise InputError(
                f"the model was trained on {key} = {spec['data'][key]}, and {data.name} has {came}."
            )


@contextmanager
def _folder_for(request: EvaluateRequest) -> Iterator[Path | None]:
    """Where outcomes go: the folder asked for, one for the moment if only images are wanted, or none."""
    if request.save_images is None or request.out is not None:
        yield request.out
        return
    files.check_writable(request.save_images)
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _write_images(path: Path, folder: Path, found: Evaluation) -> None:
    """One array of images per attack, with positions, labels and predictions beside them."""
    arrays = {"index": found.clean.index, "label": found.clean.label}
    for name, outcomes in found.outcomes.items():
        position, images = load_images(folder, name)
        if not np.array_equal(position.numpy(), outcomes.index):
            raise InputError(f"the attacked images of {name!r} in {folder} are not those of its outcomes.")
        arrays[f"{name}.images"] = images.numpy()
        arrays[f"{name}.prediction"] = outcomes.prediction
    files.write_arrays(path, arrays, {"what": "attacked images in [0, 1]"})


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


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"the device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def _code_for(request: TrainRequest, data: Dataset) -> CodeMatrix:
    if request.code is not None:
        return load_code(request.code)
    shipped = [name for name in codebook() if name.startswith(f"{data.num_classes}x") and "-q" not in name]
    if shipped:
        return load_code(shipped[-1])
    length = max(30, 2 * (data.num_classes - 1).bit_length())
    return design_code(data.num_classes, length, objective="distance", steps=2_000_000, seed=request.seed)
