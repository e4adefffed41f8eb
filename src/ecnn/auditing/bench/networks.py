"""The small networks of the benchmark and their training, which takes seconds and is the same every time."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.attacks import PGD, Attack
from ecnn.auditing.bench.subject import EPS, Train
from ecnn.auditing.bench.tricks import Trick
from ecnn.backbones import ResNet
from ecnn.baselines import EMPIR, Ensemble
from ecnn.codes import load_code
from ecnn.data import Dataset
from ecnn.model import ECNN
from ecnn.objectives import score_cross_entropy
from ecnn.training import RECIPES, fit

CERTIFIED_EPS = 0.03
PLAIN = dataclasses.replace(RECIPES["small"], shift=0, diversity_weight=0.0)


def dense(inputs: int = 64, width: int = 64, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, width),
        activation(),
        nn.Linear(width, width),
        activation(),
        nn.Linear(width, 10),
    )


def convolutional(in_channels: int = 1, width: int = 8) -> nn.Sequential:
    """Two convolutions, the second strided, an average over the image, and two dense layers."""
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(18 * width, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def resnet(data: Dataset) -> nn.Module:
    return ResNet(10, 1, depth=8, width=6, mean=data.mean_image)


def coded(data: Dataset, *, code: str = "10x15", **options: Any) -> nn.Module:
    return ECNN(load_code(code), 1, depth=8, width=6, feature_dim=16, mean=data.mean_image, **options)


def two_symbols(data: Dataset) -> nn.Module:
    """An ECNN with two outputs per member, whose common level is initialised 20 times larger than usual.

    A margin loss depends only on the difference of the two outputs, so training does not change their common level.
    """
    model: Any = coded(data, member_output="symbols")
    with torch.no_grad():
        model.head.weight += 19 * model.head.weight.mean(dim=0, keepdim=True)
    return model  # type: ignore[no-any-return]


def voting(data: Dataset) -> nn.Module:
    return Ensemble(10, 1, num_members=3, depth=8, width=4, mean=data.mean_image)


def low_precision(data: Dataset) -> nn.Module:
    return EMPIR(10, 1, depth=8, width=4, mean=data.mean_image)


class Committee(nn.Module):
    """Several networks for the same classes."""

    def __init__(self, *networks: nn.Module) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def all_scores(self, images: Tensor) -> Tensor:
        """(network, batch, class) scores of each network."""
        return torch.stack([network(images) for network in self.networks])


class Remembering(nn.Module):
    """Base of classifiers in which training images vote: a trained network, and its features of the training images.

    Args:
        data: the dataset whose training images vote.
        kept: for each buffer, by its name, how many features of a training image it stores.
    """

    labels: Tensor

    def __init__(self, data: Dataset, network: nn.Sequential, **kept: int) -> None:
        super().__init__()
        self.network, self.kept = network, kept
        for name, width in kept.items():
            self.register_buffer(name, torch.randn(len(data.train), width))
        self.register_buffer("labels", data.train[:][1])

    def layers(self, images: Tensor) -> tuple[Tensor, ...]:
        """(batch, feature) tensors, one per buffer. Not named `features`, because an audit would read that method."""
        raise NotImplementedError

    def remember(self, images: Tensor) -> None:
        """Stores the features of these training images in the buffers."""
        for name, features in zip(self.kept, self.layers(images), strict=True):
            self.get_buffer(name).copy_(features)

    def answers(self, images: Tensor) -> Tensor:
        """(training image, class) one-hot votes, in the dtype of the images."""
        return F.one_hot(self.labels, 10).to(images.dtype)


def then_remembering(train: Train) -> Train:
    """Trains the network of a `Remembering`, then stores its features of the training images."""

    def train_and_remember(model: nn.Module, data: Dataset) -> None:
        assert isinstance(model, Remembering)
        train(model.network, data)
        with torch.no_grad():
            model.eval().remember(data.train[:][0])

    return train_and_remember


def training(
    objective: Any = "cross_entropy", *, epochs: int, attack: Attack | None = None, lr: float | None = None
) -> Train:
    def train(model: nn.Module, data: Dataset) -> None:
        fit(
            model,
            data.train,
            val=None,
            recipe=PLAIN,
            objective=objective,
            epochs=epochs,
            lr=lr,
            attack=attack,
            seed=0,
        )

    return train


def first(train: Train) -> Train:
    """Trains the first part of a stack alone, so that adversarial training attacks scores that nothing has changed."""

    def train_first(model: Any, data: Dataset) -> None:
        train(model[0], data)

    return train_first


def facing(eps: float = EPS, steps: int = 5, **options: Any) -> PGD:
    """PGD for adversarial training: cross-entropy, last iterate, steps that add up to 2.5 eps."""
    settings: dict[str, Any] = {"loss": "cross_entropy", "keep": "last", **options}
    return PGD(norm="linf", eps=eps, steps=steps, step_size=2.5 * eps / steps, **settings)


def distilling(temperature: float, epochs: int) -> Train:
    """Defensive distillation (Papernot et al. 2016): a pupil learns a teacher's probabilities at this temperature."""

    def warm_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return score_cross_entropy(model(images) / temperature, labels).mean()

    def train(model: nn.Module, data: Dataset) -> None:
        teacher = copy.deepcopy(model)
        training(warm_loss, epochs=epochs, lr=0.02)(teacher, data)

        def pupil_loss(pupil: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = torch.softmax(teacher(images) / temperature, dim=1)
            logs = torch.log_softmax(pupil(images) / temperature, dim=1)
            return -(wanted * logs).sum(dim=1).mean()

        training(pupil_loss, epochs=epochs, lr=0.02)(model, data)

    return train


def interval_margins(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> Tensor:
    """(batch, class) proven lower bounds of the label's score minus each score, by intervals (Gowal et al. 2018).

    Holds for linear layers with a ReLU between each two, and for the Linf ball of radius eps cut to [0, 1].
    """
    low, high = (images - eps).clamp(min=0).flatten(1), (images + eps).clamp(max=1).flatten(1)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    for layer in layers[:-1]:
        low, high = (F.relu(bound) for bound in _through(layer.weight, layer.bias, low, high))
    last = layers[-1]
    apart = last.weight[labels][:, None] - last.weight  # (batch, class, feature)
    shift = last.bias[labels][:, None] - last.bias
    middle, radius = (low + high) / 2, (high - low) / 2
    return (apart * middle[:, None]).sum(2) + shift - (apart.abs() * radius[:, None]).sum(2)


def _through(weight: Tensor, bias: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    middle, radius = F.linear((low + high) / 2, weight, bias), F.linear((high - low) / 2, weight.abs())
    return middle - radius, middle + radius


def interval_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the worst scores that interval bounds at CERTIFIED_EPS allow, plus the usual cross-entropy."""
    proven = score_cross_entropy(-interval_margins(model, images, labels, CERTIFIED_EPS), labels).mean()
    return proven + score_cross_entropy(model(images), labels).mean()


def each(**trains: Train) -> Train:
    """Trains the named parts of a model one by one."""

    def train(model: nn.Module, data: Dataset) -> None:
        for name, train_part in trains.items():
            train_part(model.get_submodule(name), data)

    return train


def seen_through(train: Train) -> Train:
    """Trains a model with its tricks opened, so that the attack in its training gets useful gradients."""

    def train_opened(model: nn.Module, data: Dataset) -> None:
        tricks = [module for module in model.modules() if isinstance(module, Trick)]
        for trick in tricks:
            trick.opened = True
        train(model, data)
        for trick in tricks:
            trick.opened = False

    return train_opened
