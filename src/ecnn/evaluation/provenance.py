"""Provenance: descriptions of attack, model, images and machine, as plain values that JSON can hold."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import platform
import re
import types
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ecnn
from ecnn.asking import half_precision_of, read_model, undisturbed, without_tf32
from ecnn.attacks.randomness import Draws, forked_generators
from ecnn.comparing import scores_apart
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation.batch import place

_DEPTH = 6
_PROBES, _SHOWN = 8, 8  # images whose scores identify a model, and how many scores of each are recorded
#: How much scores may change on another machine, as a share of the spread of an image's scores.
_SAME, _SAME_IN_HALF = 1e-3, 3e-2


def describe(value: Any, depth: int = _DEPTH) -> Any:
    """A description of the value for JSON, which differs for attacks with different settings.

    Arrays and models are described by hashes. Of objects that are neither plain values nor dataclasses only the public
    attributes that are numbers, strings or None are included.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, PurePath | torch.device | torch.dtype | np.dtype):
        return str(value)
    if isinstance(value, np.ndarray | np.generic | Tensor):
        return _describe_array(value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu"))
    if depth == 0:
        return _name_of(type(value))
    if isinstance(value, Mapping):
        return {str(key): describe(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item, depth - 1) for item in value]
    if isinstance(value, nn.Module):
        return describe_model(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"kind": _name_of(type(value)), **describe(fields, depth)}
    return _describe_callable(value, depth)


def _describe_callable(value: Any, depth: int) -> Any:
    if isinstance(value, type | types.BuiltinFunctionType):
        return _name_of(value)
    if isinstance(value, functools.partial):
        return {
            "function": describe(value.func, depth - 1),
            "arguments": describe(value.args, depth - 1),
            "keywords": describe(value.keywords, depth - 1),
        }
    if isinstance(value, types.MethodType):
        return {"function": value.__func__.__qualname__, "of": describe(value.__self__, depth - 1)}
    if isinstance(value, types.FunctionType):
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        held = {name: _describe_cell(cell, depth - 1) for name, cell in cells.items()}
        kept = describe([*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()], depth - 1)
        extra = {name: part for name, part in (("holds", held), ("defaults", kept)) if part}
        return {"function": _name_of(value), **extra}
    settings = {
        name: describe(setting)
        for name, setting in getattr(value, "__dict__", {}).items()
        if not name.startswith("_") and (setting is None or isinstance(setting, bool | int | float | str))
    }
    return {"kind": _name_of(type(value)), **settings}


def _describe_cell(cell: types.CellType, depth: int) -> Any:
    try:
        return describe(cell.cell_contents, depth)
    except ValueError:  # the cell is still empty: the enclosing function has not bound the name yet
        return None


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _describe_array(tensor: Tensor) -> Any:
    if tensor.ndim == 0:
        return describe(tensor.item())
    return {"shape": list(tensor.shape), "sha256": _hash_tensors({"values": tensor})}


def _hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def describe_model(model: nn.Module) -> dict[str, Any]:
    """What identifies a model: its class, number of parameters, and hashes of its state and of its structure.

    The state alone is not enough: two ECNNs with different codes or decoders can have the same weights. So buffers that
    are not saved, such as the code, count as structure.
    """
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    text = re.sub(r"0x[0-9a-f]+", "", repr(model))
    buffers = {name: value for name, value in model.named_buffers() if name not in state}
    return {
        "kind": _name_of(type(model)),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "sha256": _hash_tensors(state),
        "structure": hashlib.sha256(f"{text}\n{_hash_tensors(buffers)}".encode()).hexdigest(),
    }


def check_is_of(path: Path, described: Mapping[str, Any], model: nn.Module) -> None:
    """Raises InputError if a file's results are of a network with other weights than this model.

    Args:
        path: of the file, for the message.
        described: the network according to the file, see `describe_model`; without "sha256" any weights pass.
        model: the network to compare with.
    """
    mine = describe_model(model)
    if described.get("sha256", mine["sha256"]) != mine["sha256"]:
        raise InputError(
            f"{path} describes another network than the one in this folder: move it away, and run ecnn audit or ecnn "
            "evaluate on this one."
        )


def hash_images(split: Split) -> np.ndarray:
    """(image,) uint64 checksums of each image's pixels and shape, by which outcomes of other images are recognised."""
    images = split.images.cpu().numpy()
    shape = str(images.shape[1:]).encode()
    digests = [hashlib.blake2b(image.tobytes(), digest_size=8, key=shape).digest() for image in images]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def ask_probes(model: nn.Module, split: Split) -> dict[str, Any] | None:
    """The model's scores of a few images of the split, of noisy copies and of noise: a fingerprint of what it computes.

    Weights and structure (`describe_model`) do not show changes in the model's program. A model that raises an error on
    noise is probed with the images alone.

    Returns:
        None if the scores differ from pass to pass although all generators are seeded, or if the model always raises an
        error. Otherwise a dictionary:
        per_image: number of probes per image: 3, or 1 without noise.
        scores: (probe, class) up to eight scores of each probe, to six digits.
        tolerance: how much other machines and batches may change them, as a share of their spread.
        environment: for a random model the environment of the passes, on which its draws depend; None otherwise.
    """
    images = place(model, split[: min(_PROBES, len(split))][0])
    noise = Draws.of(0, torch.arange(len(images), device=images.device)).uniform(*images.shape[1:])
    noise = noise.to(images.dtype)
    noisy = (images + 0.1 * (noise - 0.5)).clamp(0, 1)
    probes = torch.stack([images, noisy, noise], dim=1).flatten(
        0, 1
    )  # by image: a shorter split has the first ones

    def ask(seed: int) -> Tensor | None:
        with undisturbed(model), without_tf32(), forked_generators(images.device, seed):
            for asked in (probes, images):
                try:
                    return read_model(model, asked)
                except Exception:  # noqa: S112 whatever a model throws
                    continue
        return None

    scores, other, again = (ask(seed) for seed in (0, 1, 0))
    if scores is None or other is None or again is None or not len(scores) == len(other) == len(again):
        return None
    if bool((scores_apart(scores, again) > _SAME).any()):
        return None
    is_random = bool((scores_apart(scores, other) > _SAME).any())
    shown = torch.linspace(0, scores.shape[1] - 1, min(_SHOWN, scores.shape[1]), device="cpu").long()
    rows = scores[:, shown.to(scores.device)].tolist()
    return {
        "per_image": len(scores) // len(images),
        "scores": [[describe(float(f"{score:.6g}")) for score in row] for row in rows],
        "tolerance": _SAME if half_precision_of(model) is None else _SAME_IN_HALF,
        "environment": describe_environment(images.device) if is_random else None,
    }


def same_answers(kept: dict[str, Any] | None, now: dict[str, Any] | None) -> bool:
    """Whether two results of `ask_probes` may be of the same model.

    True if nothing was kept to compare with, or if a random model was asked in another environment, where it draws
    other numbers; False if only `now` is None, or if only one of the two is random. One probe, or an eighth of them,
    may differ: in a model that rounds, another order of summation can change much.
    """
    if kept is None or now is None:
        return kept is None
    place, place_now = kept["environment"], now["environment"]
    if place != place_now:
        return place is not None and place_now is not None
    count = min(len(kept["scores"]), len(now["scores"]))
    one, other = (np.array(answers["scores"][:count], dtype=float) for answers in (kept, now))
    if one.shape != other.shape or kept["per_image"] != now["per_image"]:
        return False
    with np.errstate(invalid="ignore"):
        apart = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, np.abs(one - other))
    apart = np.nan_to_num(apart, nan=np.inf).max(axis=1)
    finite = np.where(np.isfinite(one), one, 0.0)
    scale = np.maximum(np.ptp(finite, axis=1), 0.01 * np.abs(finite).max(axis=1))
    differ = apart > max(kept["tolerance"], now["tolerance"]) * scale
    return int(differ.sum()) <= max(1, len(differ) // 8)


class Fingerprint:
    """Identifies the model and the images of an evaluation. Each is described or hashed only once.

    Attributes:
        model: the description by `describe_model`.
        split: the images; they are hashed when their hashes are first needed.
    """

    def __init__(self, model: nn.Module, split: Split) -> None:
        self.model, self.split, self._asked = describe_model(model), split, model
        self._hashes = np.zeros(0, dtype=np.uint64)

    def is_of(self, model: nn.Module, split: Split) -> bool:
        """Whether it was made from these objects; that they have not changed since is not checked."""
        return self._asked is model and self.split is split

    @functools.cached_property
    def answers(self) -> dict[str, Any] | None:
        """The model's scores of fixed probes, see `ask_probes`."""
        return ask_probes(self._asked, self.split)

    def image_hashes(self, count: int) -> np.ndarray:
        """(count,) checksums of the first `count` images of the split."""
        if count > len(self._hashes):
            more = self.split.select(torch.arange(len(self._hashes), count, device="cpu"))
            self._hashes = np.concatenate([self._hashes, hash_images(more)])
        return self._hashes[:count]


def describe_environment(device: torch.device) -> str:
    """Library versions and the device, in one line."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"ecnn {ecnn.__version__}, torch {torch.__version__}, {device.type} ({name})"


def now() -> str:
    """The current time in UTC, in ISO format with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
