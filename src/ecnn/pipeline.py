"""The only wiring: from a request to a finished run folder."""

from __future__ import annotations

import dataclasses
import os
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ecnn import files, runs
from ecnn.annealing import design_code
from ecnn.attacks import PGD
from ecnn.attacks.ball import parse_eps
from ecnn.codes import CodeMatrix, codebook, load_code
from ecnn.data import Dataset, load_data
from ecnn.errors import InputError
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


def parse_settings(settings: list[str]) -> dict[str, dict[str, Any]]:
    """`["train.lr=0.1", "model.width=8"]` as {"train": {"lr": 0.1}, "model": {"width": 8}}."""
    tables: dict[str, dict[str, Any]] = {"train": {}, "model": {}}
    for setting in settings:
        key, equals, text = setting.partition("=")
        table, dot, name = key.partition(".")
        if not equals or not dot or table not in tables:
            raise InputError(f"--set takes train.NAME=VALUE or model.NAME=VALUE, not {setting!r}.")
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
        files.write_json(
            folder / "eval.json", {"test_accuracy": result.test_accuracy, "images": result.test_images}
        )
        runs.finish_run(folder)
    return result


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
