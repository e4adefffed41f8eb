"""What tests of baselines share: networks that train in seconds, and what is done to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SMALL: dict[str, Any] = {"depth": 8, "width": 2}
#: Sets of specialists for ten classes.
RING = [[index, (index + 1) % 10, (index + 3) % 10] for index in range(10)]


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def shake(model: nn.Module) -> None:
    """Moves biases and batch norms away from their start, so that leaving one out shows."""
    with torch.no_grad():
        for name, values in model.state_dict().items():
            if name.endswith(("bias", "running_mean")):
                values.uniform_(-0.3, 0.3)
            elif name.endswith("running_var"):
                values.uniform_(0.5, 2.0)
