"""The family whose forward pass leaves torch: filters, codecs and nearest neighbours in numpy."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ecnn.auditing.bench.claims import BY_PGD, Subjects
from ecnn.auditing.bench.networks import Remembering, dense, then_remembering, training
from ecnn.auditing.bench.tricks import Trick, with_fields
from ecnn.data import Dataset

OUTSIDE = "code outside torch"
Array = NDArray[np.float32]

SUBJECTS = Subjects()


class InNumpy(Trick):
    """A function of numpy arrays inside a network; when opened it has the gradient of the identity."""

    def change(self, images: Array) -> Array:
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        changed = self.change(images.detach().cpu().numpy().astype(np.float32))
        return self.hide(torch.from_numpy(changed).to(images), images)


@SUBJECTS.false(OUTSIDE, training(epochs=15), BY_PGD, before=dense)
class NumpyMedian(InNumpy):
    """A median filter in numpy stands before the network.

    A pixel becomes the median of itself and its four neighbours.
    """

    def change(self, images: Array) -> Array:
        padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
        cross = [(1, 1), (0, 1), (2, 1), (1, 0), (1, 2)]
        height, width = images.shape[2:]
        parts = [padded[:, :, top : top + height, left : left + width] for top, left in cross]
        return np.median(np.stack(parts), axis=0).astype(np.float32)


@SUBJECTS.false(OUTSIDE, training(epochs=15), BY_PGD, before=dense)
@with_fields
class NumpyCodec(InNumpy):
    """A codec in numpy stands before the network.

    Coefficients of the image's Fourier transform are rounded, so that weak ones vanish.
    """

    quantum: float = 1.0

    def change(self, images: Array) -> Array:
        waves = np.fft.rfft2(images)
        rounded = np.round(waves.real / self.quantum) + 1j * np.round(waves.imag / self.quantum)
        restored = np.fft.irfft2(rounded * self.quantum, s=images.shape[2:])
        return np.clip(restored, 0, 1).astype(np.float32)


class NumpyNeighbours(Remembering, Trick):
    """Votes of the training images with the nearest features, in numpy; when opened all vote, weighted by nearness."""

    known: Tensor

    def __init__(self, data: Dataset, network: nn.Sequential, count: int) -> None:
        super().__init__(data, network, known=64)
        self.count = count

    def layers(self, images: Tensor) -> tuple[Tensor, ...]:
        return (self.network[:-1](images),)

    def forward(self, images: Tensor) -> Tensor:
        (features,) = self.layers(images)
        if self.is_open:
            weights = torch.softmax(-torch.cdist(features, self.known), dim=1)
            return torch.log(weights @ self.answers(images) + 1e-9)
        asked, known = features.detach().cpu().numpy(), self.known.cpu().numpy()
        apart = (known**2).sum(axis=1) - 2 * asked @ known.T
        nearest = np.argpartition(apart, self.count, axis=1)[:, : self.count]
        votes = np.eye(10, dtype=np.float32)[self.labels.cpu().numpy()[nearest]].mean(axis=1)
        return torch.from_numpy(votes).to(images)


@SUBJECTS.false(OUTSIDE, then_remembering(training(epochs=10)), BY_PGD)
def numpy_neighbours(data: Dataset) -> nn.Module:
    """Nearest neighbours of a network's features vote, in numpy: no gradient."""
    return NumpyNeighbours(data, dense(), 7)
