"""A multi-scale CNN (Sermanet & LeCun 2011, for traffic signs): a substitute model on which to craft transfers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.asking import full_precision
from ecnn.backbones import Centre, Mean, check_images, init_he_normal
from ecnn.checks import check_count
from ecnn.kinds import ModelKind

_GRID = 4


class MultiScaleCNN(nn.Module):
    """A CNN whose classifier reads three stages of convolution and pooling, from fine strokes to whole shapes.

    Each stage is a 5x5 convolution, ReLU and 2x2 max pooling, with twice as many channels as the one before. The
    outputs of all three are pooled to 4x4 and concatenated before one hidden layer.

    Departs: sizes are ours. OptProjTran was crafted on another custom network after Sermanet & LeCun.

    Args:
        num_classes: scores per image.
        in_channels: of the images.
        width: channels of the first stage.
        hidden: units of the hidden layer.
        mean: subtracted from the images, see `Centre`.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        *,
        width: int = 32,
        hidden: int = 256,
        mean: Mean | None = None,
    ) -> None:
        super().__init__()
        sizes = {"in_channels": in_channels, "width": width, "hidden": hidden}
        for name, value in sizes.items():
            check_count(name, value)
        check_count("num_classes", num_classes, least=2)
        self.config: dict[str, Any] = {"num_classes": num_classes, **sizes}
        self.in_channels = in_channels
        self.centre = Centre(mean)
        widths = [in_channels, width, 2 * width, 4 * width]
        self.stages = nn.ModuleList(
            nn.Conv2d(before, after, 5, padding=2) for before, after in itertools.pairwise(widths)
        )
        self.hidden = nn.Linear(7 * width * _GRID**2, hidden)
        self.head = nn.Linear(hidden, num_classes)
        for layer in (*self.stages, self.hidden, self.head):
            assert isinstance(layer, nn.Conv2d | nn.Linear)
            assert layer.bias is not None
            init_he_normal(layer.weight, layer.weight[0].numel())
            nn.init.zeros_(layer.bias)

    def features(self, images: Tensor) -> Tensor:
        """(batch, hidden) features that the head reads."""
        check_images(images, self.in_channels)
        maps, seen = self.centre(images), []
        for stage in self.stages:
            # ceil_mode keeps maps of one pixel, so that small images pass all stages.
            maps = F.max_pool2d(F.relu(stage(maps)), 2, ceil_mode=True)
            seen.append(F.adaptive_max_pool2d(maps, _GRID).flatten(1))
        return F.relu(self.hidden(torch.cat(seen, dim=1)))

    def forward(self, images: Tensor) -> Tensor:
        return full_precision(self.head(self.features(images)))


KIND = ModelKind(name="multiscale", model=MultiScaleCNN, objectives=("cross_entropy", "trades"))
