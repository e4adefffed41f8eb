"""Families that change the pixels first: levels in place of pixels, and codecs or filters."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.auditing.bench.claims import BY_BIM, BY_PGD, Subjects
from ecnn.auditing.bench.networks import dense, training
from ecnn.auditing.bench.tricks import Trick, with_fields

LEVELS, FILTERS = "levels in place of pixels", "codecs and filters"


@with_fields
class RoundedPixels(Trick):
    """Pixels rounded to equally spaced levels."""

    levels: int

    def forward(self, images: Tensor) -> Tensor:
        steps = self.levels - 1
        return self.hide((images * steps).round() / steps, images)


@with_fields
class Thermometer(Trick):
    """One channel per level: whether the pixel reaches it (Buckman et al. 2018)."""

    levels: int

    def forward(self, images: Tensor) -> Tensor:
        limits = (torch.arange(self.levels) + 0.5).view(-1, 1, 1) / self.levels
        above = images - limits.to(images)
        return self.hide((above > 0).to(images.dtype), torch.sigmoid(4 * self.levels * above))


@with_fields
class OneHotPixels(Trick):
    """One channel per level: whether the pixel is nearest to it."""

    levels: int

    def forward(self, images: Tensor) -> Tensor:
        centres = torch.linspace(0, 1, self.levels).view(-1, 1, 1).to(images)
        nearness = -((self.levels * (images - centres)) ** 2)
        nearest = torch.zeros_like(nearness).scatter(1, nearness.argmax(dim=1, keepdim=True), 1.0)
        return self.hide(nearest, torch.softmax(nearness, dim=1))


class BlockCodec(Trick):
    """Rounds the cosine transform of each 8x8 block, more coarsely at higher frequencies, as JPEG does."""

    transform: Tensor
    quanta: Tensor

    def __init__(self, coarseness: float) -> None:
        super().__init__()
        places = torch.arange(8, dtype=torch.float64)
        waves = torch.cos(math.pi / 8 * (places + 0.5) * places[:, None]) / 2
        waves[0] /= math.sqrt(2)
        self.register_buffer("transform", waves.float(), persistent=False)
        quanta = coarseness * (1 + places[:, None] + places)
        self.register_buffer("quanta", quanta.float(), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        blocks = images.unfold(2, 8, 8).unfold(3, 8, 8)
        coefficients = self.transform @ blocks @ self.transform.T
        rounded = (coefficients / self.quanta).round() * self.quanta
        restored = (self.transform.T @ rounded @ self.transform).clamp(0, 1)
        return self.hide(restored.transpose(3, 4).reshape(images.shape), images)


@with_fields
class MedianFilter(Trick):
    """Each pixel becomes the median of its surroundings, without a gradient; opened it has that of their mean."""

    window: int

    def forward(self, images: Tensor) -> Tensor:
        margin = self.window // 2
        padded = F.pad(images, (margin,) * 4, mode="reflect")
        around = padded.unfold(2, self.window, 1).unfold(3, self.window, 1).flatten(4)
        return self.hide(around.median(dim=4).values, around.mean(dim=4))


@with_fields
class SteepFront(Trick):
    """The mean of four sigmoids of a pixel, so steep that their float32 derivative is zero nearly everywhere."""

    slope: float

    def forward(self, images: Tensor) -> Tensor:
        above = images[..., None] - torch.tensor([0.1, 0.35, 0.6, 0.85]).to(images)
        stairs = torch.sigmoid(self.slope * above).mean(dim=-1)
        return self.hide(stairs, images) if self.is_open else stairs


class LookedUpPixels(Trick):
    """Replaces each pixel by a row of a table that is learnt with the network; the pixel's level is the index."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(levels, width)
        self.levels = levels

    def forward(self, images: Tensor) -> Tensor:
        place = images.clamp(0, 1) * (self.levels - 1)
        nearest: Tensor = self.table(place.round().long())
        if not self.is_open:
            return nearest.flatten(1)
        low = place.detach().floor().clamp(max=self.levels - 2).long()
        share = (place - low)[..., None]  # position between two rows; it carries the gradient of the pixel
        between: Tensor = (1 - share) * self.table(low) + share * self.table(low + 1)
        # The value is the nearest row. The pixel gets the gradient of the interpolation, the rows that of both terms.
        return (nearest + between - between.detach()).flatten(1)


SUBJECTS = Subjects()


@SUBJECTS.false(LEVELS, training(epochs=15), BY_PGD)
def rounded_pixels() -> nn.Module:
    """Pixels rounded to four levels: no gradient."""
    return nn.Sequential(RoundedPixels(4), dense())


@SUBJECTS.false(LEVELS, training(epochs=10), BY_BIM)
def thermometer() -> nn.Module:
    """Thermometer-coded pixels: no gradient."""
    return nn.Sequential(Thermometer(10), dense(640))


@SUBJECTS.false(LEVELS, training(epochs=10), BY_BIM)
def one_hot_pixels() -> nn.Module:
    """One-hot coded pixels: no gradient."""
    return nn.Sequential(OneHotPixels(8), dense(512))


@SUBJECTS.false(LEVELS, training(epochs=15), BY_BIM)
def steep_front() -> nn.Module:
    """Pixels through a sigmoid that is flat nearly everywhere."""
    return nn.Sequential(SteepFront(3000), dense())


@SUBJECTS.false(LEVELS, training(epochs=15), BY_PGD)
def looked_up_pixels() -> nn.Module:
    """Each pixel is an index into a learnt table: no gradient."""
    return nn.Sequential(LookedUpPixels(9, 3), dense(192))


@SUBJECTS.false(FILTERS, training(epochs=15), BY_PGD)
def block_codec() -> nn.Module:
    """Blocks are compressed and restored first: no gradient."""
    return nn.Sequential(BlockCodec(0.15), dense())


@SUBJECTS.false(FILTERS, training(epochs=20), BY_PGD)
def median_filter() -> nn.Module:
    """A median filter without a gradient stands before the network."""
    return nn.Sequential(MedianFilter(3), dense())
