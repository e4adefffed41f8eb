"""Published defences that change the image first: part of the benchmark's second half (see `Subject.half`)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.auditing.bench.chance import RANDOM
from ecnn.auditing.bench.claims import BY_FGSM, BY_PGD, Subjects, by_transfer
from ecnn.auditing.bench.inputs import FILTERS
from ecnn.auditing.bench.members import WEAK
from ecnn.auditing.bench.networks import convolutional, dense, each, training
from ecnn.auditing.bench.outside import OUTSIDE, Array, InNumpy
from ecnn.auditing.bench.purifiers import PURIFIED, autoencoder, reconstruction_loss
from ecnn.auditing.bench.tricks import Disguised, Piece, RandomChange, Trick, with_fields
from ecnn.data import Dataset
from ecnn.objectives import score_cross_entropy

SUBJECTS = Subjects("second")


@SUBJECTS.false(FILTERS, training(epochs=15), BY_PGD, before=dense)
class FeatureSqueezing(Trick):
    """Fewer bits and a median filter (Xu et al. 2018, feature squeezing): no gradient.

    The median is that of each 2x2 window.
    """

    def forward(self, images: Tensor) -> Tensor:
        coarse = (images * 7).round() / 7
        padded = F.pad(coarse, (0, 1, 0, 1), mode="replicate")
        around = padded.unfold(2, 2, 1).unfold(3, 2, 1).flatten(4)
        return self.hide(around.sort(dim=4).values[..., 1:3].mean(dim=4), images)


@SUBJECTS.false(FILTERS, training(epochs=15), BY_PGD, before=dense)
class Quilting(Trick):
    """Patches of training images replace the image's own (Guo et al. 2018, image quilting): no gradient.

    They are averaged where they overlap.
    """

    patches: Tensor

    def __init__(self, data: Dataset, count: int = 600) -> None:
        super().__init__()
        patches = F.unfold(data.train[:][0], 4, stride=2).transpose(1, 2).flatten(0, 1)
        self.register_buffer("patches", patches[torch.randperm(len(patches))[:count]].clone())

    def forward(self, images: Tensor) -> Tensor:
        own = F.unfold(images, 4, stride=2).transpose(1, 2)
        nearest = self.patches[torch.cdist(own, self.patches).argmin(dim=2)].transpose(1, 2)
        size = images.shape[2:]
        overlaps = F.fold(torch.ones_like(nearest), size, 4, stride=2)
        return self.hide(F.fold(nearest, size, 4, stride=2) / overlaps, images)


@SUBJECTS.false(FILTERS, training(epochs=20), BY_PGD, before=dense)
class PixelDeflection(Trick):
    """Pixels take values of neighbours, small wavelet details are dropped (Prakash et al. 2018, pixel deflection)."""

    def forward(self, images: Tensor) -> Tensor:
        moved = images.detach()
        if not self.opened:
            shifts = torch.randint(-1, 2, (2,)).tolist()
            moved = torch.where(torch.rand_like(images) < 0.2, moved.roll(shifts, dims=(2, 3)), moved)
        low = F.avg_pool2d(moved, 2).repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
        return self.hide(low + F.softshrink(moved - low, 0.08), images)


@SUBJECTS.false(OUTSIDE, training(epochs=15), BY_PGD, before=dense)
@with_fields
class Halftoning(InNumpy):
    """Error diffusion to three levels, in numpy (Lo & Patel 2021).

    The rounding error of each pixel is added to pixels after it.
    """

    levels: int = 3

    def change(self, images: Array) -> Array:
        carried, steps = images.copy(), self.levels - 1
        height, width = images.shape[2:]
        for row in range(height):
            for column in range(width):
                value = carried[:, :, row, column].copy()
                carried[:, :, row, column] = np.round(value * steps).clip(0, steps) / steps
                error = value - carried[:, :, row, column]
                for down, right, share in ((0, 1, 7), (1, -1, 3), (1, 0, 5), (1, 1, 1)):
                    if row + down < height and 0 <= column + right < width:
                        carried[:, :, row + down, column + right] += error * share / 16
        return carried


@SUBJECTS.false(PURIFIED, training(epochs=20), BY_PGD, before=dense)
class TotalVariation(Trick):
    """Some pixels are dropped, the rest smoothed in a loop (Guo et al. 2018, total variation minimisation)."""

    def forward(self, images: Tensor) -> Tensor:
        kept = torch.ones_like(images) if self.opened else (torch.rand_like(images) < 0.8).to(images.dtype)
        smooth = (images * kept).detach()
        for _ in range(12):
            padded = F.pad(smooth, (1, 1, 1, 1), mode="replicate")
            around = (
                padded[:, :, 2:, 1:-1]
                + padded[:, :, :-2, 1:-1]
                + padded[:, :, 1:-1, 2:]
                + padded[:, :, 1:-1, :-2]
            )
            smooth = smooth + 0.2 * (kept * (images.detach() - smooth) + 0.15 * (around - 4 * smooth))
        return self.hide(smooth, images)


@SUBJECTS.false(PURIFIED, training(epochs=25), BY_PGD, before=dense)
@with_fields
class MatrixCompletion(Trick):
    """Pixels are dropped, the image is restored as a matrix of low rank (Yang et al. 2019, ME-Net)."""

    share: float = 0.85
    rank: int = 4

    def forward(self, images: Tensor) -> Tensor:
        kept = images.detach()
        if not self.opened:
            kept = kept * (torch.rand_like(images) < self.share) / self.share
        left, values, right = torch.linalg.svd(kept)
        values = values * (torch.arange(values.shape[-1], device=images.device) < self.rank)
        return self.hide((left @ torch.diag_embed(values) @ right).clamp(0, 1), images)


@SUBJECTS.false(PURIFIED, training(epochs=10), BY_PGD, before=dense)
class PixelDefend(Trick):
    """Each pixel becomes the likeliest value near its own (Song et al. 2018, PixelDefend).

    The likeliest value is predicted linearly from the pixels before it.
    """

    weights: Tensor
    bias: Tensor

    def __init__(self, data: Dataset, radius: float = 0.1) -> None:
        super().__init__()
        self.radius = radius
        images = data.train[:][0].flatten(1)
        known = torch.cat([images, torch.ones(len(images), 1)], dim=1).double()
        weights = torch.zeros(64, 65, dtype=torch.float64)
        for pixel in range(64):  # predicted from those before it, by ridge regression
            before = torch.cat([known[:, :pixel], known[:, -1:]], dim=1)
            ridge = before.T @ before + 0.1 * torch.eye(pixel + 1, dtype=torch.float64)
            solved = torch.linalg.solve(ridge, before.T @ known[:, pixel])
            weights[pixel, :pixel], weights[pixel, -1] = solved[:-1], solved[-1]
        self.register_buffer("weights", weights[:, :-1].float())
        self.register_buffer("bias", weights[:, -1].float())

    def forward(self, images: Tensor) -> Tensor:
        own = images.detach().flatten(1)
        cleaned = own.clone()
        for pixel in range(64):
            likely = cleaned[:, :pixel] @ self.weights[pixel, :pixel] + self.bias[pixel]
            cleaned[:, pixel] = torch.minimum(
                torch.maximum(likely, own[:, pixel] - self.radius), own[:, pixel] + self.radius
            ).clamp(0, 1)
        return self.hide(cleaned.view_as(images), images)


@SUBJECTS.false(RANDOM, training(epochs=25, lr=0.01), BY_FGSM, before=convolutional)
class Barrage(RandomChange):
    """Three of seven random changes in random order (Raff et al. 2019, barrage of random transforms)."""

    def change(self, images: Tensor) -> Tensor:
        for number in torch.randperm(7)[:3].tolist():
            images = self._change(number, images)
        return images

    def _change(self, number: int, images: Tensor) -> Tensor:
        if number == 0:
            return images + 0.08 * torch.randn_like(images)
        if number == 1:
            return (
                F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1) * 0.4 + 0.6 * images
            )
        if number == 2:
            return images * (0.7 + 0.6 * torch.rand(len(images), 1, 1, 1, device=images.device))
        if number == 3:
            return images.roll(torch.randint(-1, 2, (2,)).tolist(), dims=(2, 3))
        if number == 4:
            return self.hide((images * 6).round() / 6, images)
        if number == 5:
            return images * (torch.rand_like(images) > 0.1)
        return images.clamp(min=1e-3) ** (0.7 + 0.6 * torch.rand(()).item())


def mixed_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of mixtures with the next image of the batch (Zhang et al. 2018, mixup)."""
    share = torch.rand(len(images), device=images.device)
    mixed: Tensor = model(
        share.view(-1, 1, 1, 1) * images + (1 - share).view(-1, 1, 1, 1) * images.roll(1, 0)
    )
    own, other = score_cross_entropy(mixed, labels), score_cross_entropy(mixed, labels.roll(1))
    return (share * own + (1 - share) * other).mean()


class MixedIn(Disguised):
    """Log of the mean probabilities over mixtures with training images, drawn in every pass (Pang et al. 2020)."""

    pool: Tensor

    def __init__(self, data: Dataset, network: nn.Module, count: int) -> None:
        super().__init__(network)
        self.count = count
        self.register_buffer("pool", data.train[:200][0].clone())

    def show(self, images: Tensor, scores: Tensor) -> Tensor:
        total = torch.zeros_like(scores)
        for chosen in torch.randint(len(self.pool), (self.count,)).tolist():
            total = total + torch.softmax(self.network(0.6 * images + 0.4 * self.pool[chosen]), dim=1)
        return torch.log(total / self.count + 1e-9)


@SUBJECTS.false(RANDOM, training(mixed_loss, epochs=20), by_transfer("network"))
def mixup_inference(data: Dataset) -> nn.Module:
    """The mean over mixtures with other images, new ones in every pass (Pang et al. 2020, mixup inference)."""
    return MixedIn(data, dense(), 10)


class Keyed(nn.Module):
    """Moves and inverts pixels by a key, then classifies (AprilPyone & Kiya 2021).

    `other` is a network without the key, which plays no part in the answer: the authors attack it.
    """

    places: Tensor
    inverted: Tensor

    def __init__(self, network: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.network, self.other = network, other
        self.register_buffer("places", torch.randperm(64))
        self.register_buffer("inverted", torch.rand(64) < 0.5)

    def forward(self, images: Tensor) -> Tensor:
        moved = images.flatten(1)[:, self.places]
        scores: Tensor = self.network(torch.where(self.inverted, 1 - moved, moved))
        return scores


@SUBJECTS.false(WEAK, each(**{"": training(epochs=12), "other": training(epochs=10)}), by_transfer("other"))
def keyed_blocks() -> nn.Module:
    """Pixels are moved and inverted by a key (AprilPyone & Kiya 2021); the attack sees a network without it."""
    return Keyed(dense(), dense())


@with_fields
class Reformed(Piece):
    """An autoencoder moves the image towards training images before it is classified (Meng & Chen 2017, MagNet)."""

    reformer: nn.Module
    network: nn.Module

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(self.reformer(images).view_as(images))
        return scores


@SUBJECTS.false(
    WEAK,
    each(reformer=training(reconstruction_loss, epochs=20, lr=0.01), network=training(epochs=10)),
    by_transfer("network"),
)
def magnet() -> nn.Module:
    """An autoencoder stands before the network (Meng & Chen 2017, MagNet); the attack sees the network alone."""
    return Reformed(autoencoder(10), dense())
