"""Random shifts and flips of whole batches, on the device where the images are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ecnn.checks import check_array, check_choice, check_count
from ecnn.errors import InputError


@dataclass(frozen=True)
class Augmentation:
    """Shifts each image by random whole numbers of pixels and then, with `flip`, mirrors it with probability 1/2.

    One indexing operation does the whole batch. Shapes do not depend on the random numbers and nothing is read back
    to the host, so a CUDA graph can contain the call.

    Attributes:
        shift: largest shift in pixels, up, down, left and right; 4 with fill="zero" is the usual crop for CIFAR.
        flip: mirror left and right.
        fill: what fills the border: the nearest edge pixel, or zeros.
    """

    shift: int = 0
    flip: bool = False
    fill: Literal["nearest", "zero"] = "nearest"

    def __post_init__(self) -> None:
        check_count("shift", self.shift, least=0)
        if not isinstance(self.flip, bool):
            raise InputError(f"flip must be True or False, not {self.flip!r}.")
        check_choice("fill", self.fill, ("nearest", "zero"))

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The shifted and mirrored images, of the same shape, dtype and memory format.

        Args:
            images: (batch, channel, height, width) of any dtype.
            generator: random generator on the images' device; None for torch's global one.
        """
        check_array("images", images, "batch", "channel", "height", "width")
        if generator is not None and generator.device.type != images.device.type:
            raise InputError(f"the generator is on {generator.device} but the images are on {images.device}.")
        if self.shift == 0 and not self.flip:
            return images
        device = images.device
        batch, channels, height, width = images.shape
        rows = torch.arange(height, device=device).expand(batch, height)
        columns = torch.arange(width, device=device).expand(batch, width)
        moves = torch.randint(-self.shift, self.shift + 1, (2, batch, 1), generator=generator, device=device)
        if self.flip:
            mirrored = torch.randint(2, (batch, 1), generator=generator, device=device) == 1
            columns = torch.where(mirrored, width - 1 - columns, columns)
        rows, columns = rows + moves[0], columns + moves[1]
        moved = images[
            torch.arange(batch, device=device)[:, None, None, None],
            torch.arange(channels, device=device)[:, None, None],
            rows.clamp(0, height - 1)[:, None, :, None],
            columns.clamp(0, width - 1)[:, None, None, :],
        ]
        if self.fill == "zero":
            inside_rows, inside_columns = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
            inside = inside_rows[:, None, :, None] & inside_columns[:, None, None, :]
            moved = moved.masked_fill(~inside, 0)
        if images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous():
            return moved.contiguous(memory_format=torch.channels_last)
        return moved.contiguous()
