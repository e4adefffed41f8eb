"""A run directory: what was asked for, the code, the weights, the log; and the models that come with the package."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ecnn
from ecnn import files
from ecnn.backbones import ResNet
from ecnn.baselines import BASELINES
from ecnn.codes import CodeMatrix, load_code
from ecnn.errors import InputError
from ecnn.model import ECNN
from ecnn.training.checkpoints import load_checkpoint, load_model_tensors
from ecnn.training.loop import BEST

SPEC, CODE, ENVIRONMENT, RESULTS, DONE = "spec.toml", "code.json", "env.json", "eval.json", "DONE"


def build_model(
    kind: str,
    *,
    code: CodeMatrix | None,
    num_classes: int,
    in_channels: int,
    mean: Tensor | None,
    **options: Any,
) -> nn.Module:
    """A model by name: "ecnn" (needs a code), "resnet" or a baseline; options are its keyword arguments."""
    check_kind(kind)
    try:
        return MODELS[kind](code, num_classes, in_channels, mean, options)
    except TypeError as error:
        raise InputError(f"the model {kind!r} cannot be built so: {error}.") from error


def check_kind(kind: str) -> None:
    """Raises InputError unless a model of that name can be built."""
    if kind not in MODELS:
        raise InputError(f"a model is one of {', '.join(MODELS)}, not {kind!r}.")


def _build_ecnn(
    code: CodeMatrix | None, num_classes: int, in_channels: int, mean: Tensor | None, options: dict[str, Any]
) -> nn.Module:
    if code is None:
        raise InputError('an "ecnn" model needs a code.')
    if code.num_classes != num_classes:
        raise InputError(
            f"the code has {code.num_classes} classes, but the data has {num_classes}: use a code for {num_classes}."
        )
    return ECNN(code, in_channels, mean=mean, **options)


def _build_resnet(
    code: CodeMatrix | None, num_classes: int, in_channels: int, mean: Tensor | None, options: dict[str, Any]
) -> nn.Module:
    return ResNet(num_classes, in_channels, mean=mean, **options)


def _baseline_builder(kind: str) -> Callable[..., nn.Module]:
    def build(
        code: CodeMatrix | None,
        num_classes: int,
        in_channels: int,
        mean: Tensor | None,
        options: dict[str, Any],
    ) -> nn.Module:
        coded = {} if code is None else {"code": code}
        return BASELINES[kind](num_classes, in_channels, mean, **coded, **options)

    return build


MODELS: dict[str, Callable[..., nn.Module]] = {
    "ecnn": _build_ecnn,
    "resnet": _build_resnet,
    **{kind: _baseline_builder(kind) for kind in BASELINES},
}


def describe_model(kind: str, model: nn.Module) -> dict[str, Any]:
    """The [model] table of a spec: every option spelled out, so that later defaults cannot change an old run."""
    config: dict[str, Any] = getattr(model, "config", {})
    return {
        "kind": kind,
        **{key: value for key, value in config.items() if key not in ("in_channels", "num_classes")},
    }


def start_run(folder: Path, spec: dict[str, Any], code: CodeMatrix | None) -> None:
    """Writes what is known before training: the resolved spec, the code, the environment; takes DONE away.

    A folder that holds another run is refused.
    """
    if (folder / SPEC).exists() and files.read_toml(folder / SPEC) != _as_read(spec):
        raise InputError(f"{folder} holds a run with another spec.toml: choose another folder.")
    (folder / DONE).unlink(missing_ok=True)
    files.write_toml(folder / SPEC, spec)
    if code is not None:
        code.save(folder / CODE)
    files.write_json(folder / ENVIRONMENT, environment())


def finish_run(folder: Path) -> None:
    """Marks the run as complete."""
    files.write_text(folder / DONE, "")


def environment() -> dict[str, Any]:
    """Versions and hardware, for whoever wants to know where a number comes from."""
    has_cuda = torch.cuda.is_available()
    return {
        "ecnn": ecnn.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if has_cuda else platform.processor() or platform.machine(),
        "platform": sys.platform,
    }


def load_model(source: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> nn.Module:
    """The best weights of a run directory or of a shipped model (see `models`), in eval mode."""
    folder = run_folder(source)
    spec = files.read_toml(folder / SPEC)
    missing = [key for key in ("model", "data") if key not in spec]
    if missing:
        raise InputError(f"{folder / SPEC} lacks the table [{missing[0]}].")
    code = load_code(folder / CODE) if (folder / CODE).exists() else None
    options = dict(spec["model"])
    height, width = spec["data"]["image_size"]
    channels = spec["data"]["in_channels"]
    model = build_model(
        options.pop("kind"),
        code=code,
        num_classes=spec["data"]["num_classes"],
        in_channels=channels,
        mean=torch.zeros(channels, height, width),  # the true one is among the weights
        **options,
    )
    tensors, _ = load_checkpoint(folder / BEST)
    load_model_tensors(model, tensors, folder / BEST)
    return model.to(device).eval()


def run_folder(source: str | os.PathLike[str]) -> Path:
    """The folder of a run, given as such or by the name of a shipped model."""
    if Path(source).is_dir():
        return Path(source)
    if str(source) in models():
        return zoo_folder(str(source))
    known = f"; shipped models: {', '.join(models())}" if models() else ""
    raise InputError(f"no run folder and no model is called {str(source)!r}{known}.")


def zoo_folder(name: str) -> Path:
    """Where a shipped model lies."""
    return Path(str(resources.files("ecnn") / "zoo" / name))


def describe_run(folder: Path) -> dict[str, Any]:
    """What a list of runs shows."""
    spec = files.read_toml(folder / SPEC)
    result = files.read_json(folder / RESULTS) if (folder / RESULTS).exists() else {}
    _, facts = load_checkpoint(folder / BEST)
    return {
        "kind": spec["model"]["kind"],
        "data": spec["data"]["name"],
        "adversarial": spec.get("attack", spec.get("val_attack", {})).get("eps"),
        "best_epoch": facts.get("best_epoch"),
        "test_accuracy": result.get("test_accuracy"),
    }


def models() -> tuple[str, ...]:
    """Names of the shipped models."""
    zoo = resources.files("ecnn") / "zoo"
    if not zoo.is_dir():
        return ()
    return tuple(sorted(entry.name for entry in zoo.iterdir() if (entry / SPEC).is_file()))


def _as_read(value: Any) -> Any:
    """A value as it comes back from TOML: without None, and with lists for tuples."""
    if isinstance(value, dict):
        return {key: _as_read(item) for key, item in value.items() if item is not None}
    return [_as_read(item) for item in value] if isinstance(value, list | tuple) else value
