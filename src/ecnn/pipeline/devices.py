"""Which device a command runs on."""

from __future__ import annotations

import torch

from ecnn.errors import InputError


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"the device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
