"""The plain ResNet among the baselines: one network, one score per class."""

from __future__ import annotations

from ecnn.backbones import ResNet
from ecnn.kinds import ModelKind

KIND = ModelKind(name="resnet", model=ResNet, objectives=("cross_entropy", "trades"))
