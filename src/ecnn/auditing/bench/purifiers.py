"""The family that cleans an image in a loop before classifying it."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.auditing.bench.claims import BY_PGD, Subjects
from ecnn.auditing.bench.networks import dense, each, training
from ecnn.auditing.bench.tricks import Trick, with_fields
from ecnn.data import Dataset

PURIFIED = "purification in a loop"


class Projection(Trick):
    """Pulls images towards the span of the training images' principal components, within [0, 1], in a loop."""

    mean: Tensor
    components: Tensor

    def __init__(self, data: Dataset, count: int, rounds: int) -> None:
        super().__init__()
        images = data.train[:][0].flatten(1)
        self.rounds = rounds
        self.register_buffer("mean", images.mean(dim=0))
        _, _, components = torch.linalg.svd(images - images.mean(dim=0), full_matrices=False)
        self.register_buffer("components", components[:count].contiguous())

    def forward(self, images: Tensor) -> Tensor:
        cleaned = images.detach().flatten(1)
        for _ in range(self.rounds):
            near = (cleaned - self.mean) @ self.components.T @ self.components + self.mean
            cleaned = (0.5 * cleaned + 0.5 * F.softshrink(near, 0.02)).clamp(0, 1)
        return self.hide(cleaned.view_as(images), images)


class Purifier(Trick):
    """Cleans an image, then a network classifies it; when opened the cleaning has the gradient of the identity."""

    network: nn.Module

    def clean(self, images: Tensor) -> Tensor:
        """The cleaned images, which the network classifies."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(self.hide(self.clean(images), images))
        return scores


@with_fields
class Descent(Purifier):
    """Cleans by gradient descent on the reconstruction error of an autoencoder, in every forward pass."""

    autoencoder: nn.Module
    network: nn.Module
    steps: int
    rate: float

    def clean(self, images: Tensor) -> Tensor:
        cleaned = images.detach()
        with torch.enable_grad():
            for _ in range(self.steps):
                cleaned = cleaned.detach().requires_grad_(True)
                error = (self.autoencoder(cleaned) - cleaned.flatten(1)).square().sum()
                (gradient,) = torch.autograd.grad(error, cleaned)
                cleaned = (cleaned - self.rate * gradient).clamp(0, 1)
        return cleaned


def autoencoder(width: int) -> nn.Module:
    """Autoencoder of 8x8 images through a layer of `width` units; returns (batch, 64) pixels."""
    layers = (nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, width), nn.Linear(width, 64))
    return nn.Sequential(*layers)


def reconstruction_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Squared error, summed over pixels, of images reconstructed from noisy copies."""
    noisy = images + 0.1 * torch.randn_like(images)
    loss: Tensor = (model(noisy) - images.flatten(1)).square().sum(dim=1).mean()
    return loss


SUBJECTS = Subjects()


@SUBJECTS.false(PURIFIED, training(epochs=15), BY_PGD)
def projected_in_a_loop(data: Dataset) -> nn.Module:
    """Images are pulled onto the principal components of the training images: no gradient."""
    return nn.Sequential(Projection(data, 24, 10), dense())


@SUBJECTS.false(
    PURIFIED,
    each(autoencoder=training(reconstruction_loss, epochs=20, lr=0.01), network=training(epochs=10)),
    BY_PGD,
)
def descends_an_autoencoder() -> nn.Module:
    """Images first descend the error of an autoencoder, by gradients that the model computes itself."""
    return Descent(autoencoder(12), dense(), 8, 0.15)
