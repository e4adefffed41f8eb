"""What all requests share: settings as text, devices, and whether a model fits its data."""

from __future__ import annotations

import tomllib
from typing import Any

import torch

from ecnn.data import Dataset
from ecnn.errors import InputError


def parse_settings(
    settings: list[str], names: tuple[str, ...] = ("train", "objective", "model")
) -> dict[str, dict[str, Any]]:
    """`["train.lr=0.1", "model.width=8"]` as {"train": {"lr": 0.1}, "objective": {}, "model": {"width": 8}}."""
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


def check_shape(spec: dict[str, Any], data: Dataset) -> None:
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


def find_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"the device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
