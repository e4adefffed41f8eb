"""Families that draw random numbers, from torch's generator or from others."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.auditing.bench.claims import BY_FGSM, BY_PGD, Subjects
from ecnn.auditing.bench.networks import convolutional, dense, training
from ecnn.auditing.bench.tricks import RandomChange, Trick, with_fields

RANDOM, FOREIGN = "randomness", "randomness that is not torch's"


@with_fields
class Noise(RandomChange):
    """Adds Gaussian noise in every pass, drawn from torch's generator; no noise when opened."""

    deviation: float

    def change(self, images: Tensor) -> Tensor:
        return images + self.deviation * torch.randn_like(images)


@with_fields
class NoisyPasses(Trick):
    """Base of models that answer by the mean of several passes of a network, each with its own noise."""

    network: nn.Module
    deviation: float
    passes: int

    def with_noise(self, values: Tensor) -> Tensor:
        return values + self.deviation * torch.randn_like(values)


@with_fields
class RandomResize(Trick):
    """Random size and place in a frame of zeros, drawn once per pass (Xie et al. 2018); fixed when opened."""

    smallest: int
    frame: int

    def generator(self, images: Tensor) -> torch.Generator | None:
        """The generator to draw from; None is torch's global one."""
        return None

    def forward(self, images: Tensor) -> Tensor:
        if self.opened:
            size, left, top = (self.smallest + self.frame) // 2, 1, 1
        else:
            generator = self.generator(images)
            size = int(torch.randint(self.smallest, self.frame + 1, (), generator=generator))
            left, top = torch.randint(self.frame - size + 1, (2,), generator=generator).tolist()
        resized = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
        return F.pad(resized, (left, self.frame - size - left, top, self.frame - size - top))


@with_fields
class TestTimeDropout(RandomChange):
    """Dropout that eval mode does not switch off; the identity, its mean, when opened."""

    share: float

    def change(self, features: Tensor) -> Tensor:
        return F.dropout(features, self.share, training=True)


@with_fields
class NumpyNoise(RandomChange):
    """Adds Gaussian noise in every pass, drawn from numpy's generator; no noise when opened."""

    deviation: float

    def change(self, images: Tensor) -> Tensor:
        noise = np.random.normal(0.0, self.deviation, size=tuple(images.shape))
        return images + torch.from_numpy(noise).to(images)


class PythonShift(RandomChange):
    """Shifts images by up to a pixel each way and dims them, by Python's generator; the identity when opened."""

    def change(self, images: Tensor) -> Tensor:
        moves = (random.randint(-1, 1), random.randint(-1, 1))
        return random.uniform(0.7, 1.0) * images.roll(moves, dims=(2, 3))


SUBJECTS = Subjects()


@SUBJECTS.false(RANDOM, training(epochs=20), BY_PGD)
def noisy_input() -> nn.Module:
    """Fresh noise in every pass spoils a single gradient, and the best iterate was only lucky."""
    return nn.Sequential(Noise(0.1), dense())


@SUBJECTS.false(RANDOM, training(epochs=20, lr=0.01), BY_FGSM)
def random_resize() -> nn.Module:
    """The image gets a random size and place in every pass."""
    return nn.Sequential(RandomResize(8, 12), convolutional())


@SUBJECTS.false(RANDOM, training(epochs=20), BY_FGSM)
def random_dropout() -> nn.Module:
    """Dropout stays on at test time."""
    return dense(activation=lambda: nn.Sequential(nn.ReLU(), TestTimeDropout(0.5)))


@SUBJECTS.false(FOREIGN, training(epochs=20), BY_PGD)
def numpy_noise() -> nn.Module:
    """Fresh noise in every pass, from numpy's generator, which seeding torch does not fix."""
    return nn.Sequential(NumpyNoise(0.1), dense(width=128))


@SUBJECTS.false(FOREIGN, training(epochs=25, lr=0.01), BY_FGSM)
def python_shift() -> nn.Module:
    """The image is shifted and dimmed at random in every pass, by Python's generator."""
    return nn.Sequential(PythonShift(), convolutional())
