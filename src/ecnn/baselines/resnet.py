"""The plain ResNet among the baselines: one network, one score per class."""

from __future__ import annotations

from ecnn.backbones import ResNet
from ecnn.kinds import ModelKind, options_of

KIND = ModelKind(
    name="resnet", build=ResNet, options=options_of(ResNet), objectives=("cross_entropy", "trades")
)
