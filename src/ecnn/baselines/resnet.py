"""The plain ResNet among the baselines: one network, one score per class."""

from __future__ import annotations

from typing import Any

from torch import nn

from ecnn.backbones import Mean, ResNet
from ecnn.kinds import ModelKind, options_of


def _build(num_classes: int, in_channels: int, mean: Mean | None, **options: Any) -> nn.Module:
    return ResNet(num_classes, in_channels, mean=mean, **options)


KIND = ModelKind(
    name="resnet", build=_build, options=options_of(ResNet), objectives=("cross_entropy", "trades")
)
