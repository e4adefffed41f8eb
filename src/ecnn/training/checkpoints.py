"""Checkpoints: one safetensors file with everything that is needed to resume, written atomically."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecnn import files
from ecnn.checks import check_entries
from ecnn.errors import InputError

FORMAT = "ecnn-checkpoint"
VERSION = 1
# Key of the facts that marks weights rounded to float16 to halve the file. Loading makes them float32 again.
STORED_AS = "stored_as"


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as tensors called optimizer.<number of the parameter>.<entry>."""
    state = optimizer.state_dict()["state"]
    named = {
        f"optimizer.{index}.{name}": value if isinstance(value, Tensor) else torch.tensor(value)
        for index, entries in state.items()
        for name, value in entries.items()
        if value is not None
    }
    return copied_to_cpu(named)


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restores the state from `optimizer_tensors`. Learning rates stay the same tensors, which a CUDA graph reads."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".", 2)
            state.setdefault(int(index), {})[name] = value
    rates = [group["lr"] for group in optimizer.param_groups]
    whole = optimizer.state_dict()
    optimizer.load_state_dict({"state": state, "param_groups": whole["param_groups"]})
    for group, lr in zip(optimizer.param_groups, rates, strict=True):  # load_state_dict puts copies there
        group["lr"] = lr
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if value.shape == parameter.shape:  # fused kernels need the parameter's memory format
                entries[name] = torch.empty_like(parameter).copy_(value)


def save_checkpoint(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Writes tensors and JSON facts into one file, all or nothing."""
    files.write_tensors(path, tensors, _header(facts))


def checkpoint_bytes(tensors: dict[str, Tensor], facts: dict[str, Any]) -> bytes:
    """The bytes that `save_checkpoint` writes."""
    return files.tensor_bytes(tensors, _header(facts))


def _header(facts: dict[str, Any]) -> dict[str, str]:
    return {"format": FORMAT, "version": str(VERSION), "facts": json.dumps(facts, allow_nan=False)}


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts that `save_checkpoint` wrote; a truncated or foreign file is an InputError."""
    tensors, header = files.read_tensors(path)
    if header.get("format") != FORMAT or header.get("version") != str(VERSION):
        raise InputError(f"{path} is not a checkpoint of this version of ecnn: move it away to start anew.")
    try:
        facts = json.loads(header["facts"])
        check_entries(f"{path}: its facts", facts, {"best_epoch": int, "best_accuracy": float | None})
    except (KeyError, ValueError, RecursionError) as error:
        raise InputError(f"{path} lacks the facts of its run: move it away to start anew.") from error
    if facts.get(STORED_AS) == "float16":
        tensors = {
            key: value.float() if value.dtype == torch.float16 else value for key, value in tensors.items()
        }
    return tensors, facts


def save_halved(path: Path, source: Path, *, only: Container[str] | None = None) -> None:
    """Writes a copy of a run's weights rounded to float16; tensors other than weights and biases are unchanged.

    Args:
        path: the file to write.
        source: the checkpoint to copy.
        only: names of the weights to round; None for all.
    """
    tensors, facts = load_checkpoint(source)

    def is_rounded(key: str) -> bool:
        is_weight = tensors[key].dtype == torch.float32 and key.endswith((".weight", ".bias"))
        return is_weight and (only is None or key in only)

    halved = {key: value.half() if is_rounded(key) else value for key, value in tensors.items()}
    if not all(bool(value.isfinite().all()) for value in halved.values()):
        raise InputError(f"{source} has weights that float16 cannot hold.")
    save_checkpoint(path, halved, {**facts, STORED_AS: "float16"})


def model_tensors(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """A copy of the model's state on the CPU, which further training does not change; names get the prefix."""
    return copied_to_cpu({prefix + key: value for key, value in model.state_dict().items()})


def copied_to_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies on the CPU, fetched from another device in one transfer per dtype."""
    result = {
        key: value.detach().clone().contiguous()
        for key, value in tensors.items()
        if value.device.type == "cpu"
    }
    for dtype in {value.dtype for key, value in tensors.items() if key not in result}:
        keys = [key for key, value in tensors.items() if key not in result and value.dtype == dtype]
        flat = torch.cat([tensors[key].detach().contiguous().reshape(-1) for key in keys]).cpu()
        for key, part in zip(keys, torch.split(flat, [tensors[key].numel() for key in keys]), strict=True):
            result[key] = part.view(tensors[key].shape).clone()
    return {key: result[key] for key in tensors}


def load_model_tensors(model: nn.Module, tensors: dict[str, Tensor], source: Path, prefix: str = "") -> None:
    """Loads the state from `model_tensors`; a name, shape or type that does not fit the model is an InputError."""
    found = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    expected = model.state_dict()
    for key in sorted({*found, *expected}):
        if key not in found or key not in expected:
            side = "lacks" if key not in found else "has an unknown"
            raise InputError(f"{source} was made for another model: it {side} {key!r}.")
        if found[key].shape != expected[key].shape:
            raise InputError(
                f"{source} was made for another model: {key!r} has shape {tuple(found[key].shape)}, not "
                f"{tuple(expected[key].shape)}."
            )
        if found[key].dtype != expected[key].dtype:
            kinds = " instead of ".join(
                str(one.dtype).removeprefix("torch.") for one in (found[key], expected[key])
            )
            raise InputError(
                f"{source} holds {key!r} as {kinds}: it was converted, and would give other numbers."
            )
    model.load_state_dict(found)
