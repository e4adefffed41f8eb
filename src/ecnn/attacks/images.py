"""What attacks ask of a batch of images, whatever the norm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from ecnn.checks import kind_of
from ecnn.errors import InputError

_MOST: ContextVar[int | None] = ContextVar("most_images_at_once", default=None)
_TOGETHER: ContextVar[int] = ContextVar("values_of_attempts_together", default=0)


@contextmanager
def at_most(images: int | None) -> Iterator[None]:
    """Inside, whoever asks a model about many images asks about no more than so many at once; None bounds nothing."""
    bounds = [bound for bound in (images, _MOST.get()) if bound is not None]
    token = _MOST.set(min(bounds) if bounds else None)
    try:
        yield
    finally:
        _MOST.reset(token)


def at_once(usual: int) -> int:
    """How many images to ask a model about at once, where nothing but the memory speaks against `usual`."""
    most = _MOST.get()
    return usual if most is None else min(usual, most)


@contextmanager
def together(values: int) -> Iterator[None]:
    """Inside, several attempts at few images are made at once, while they have no more pixel values than so many.

    A small network takes as long for one image as for dozens. No attempt finds anything else; an image that one of them
    breaks has been asked about by the others too.
    """
    token = _TOGETHER.set(values)
    try:
        yield
    finally:
        _TOGETHER.reset(token)


def copies_at_once(images: int, values: int) -> int:
    """How many copies of so many images of so many pixel values may be asked about at once; 1 outside of `together`."""
    most = at_once(_TOGETHER.get() // max(1, values))
    return max(1, most // max(1, images))


def check_pixels(images: Tensor) -> None:
    """Raises InputError unless these are float32 or float64 pixels in [0, 1].

    The values are not looked at while a CUDA graph is recorded, which must not wait.
    """
    is_tensor = isinstance(images, Tensor)
    if not is_tensor or images.ndim < 2 or images.dtype not in (torch.float32, torch.float64):
        came = f"{images.dtype} of {tuple(images.shape)}" if is_tensor else kind_of(images)
        raise InputError(
            f"images must be a float32 or float64 tensor (batch, channel, height, width), not {came}: convert them, "
            "and divide bytes by 255."
        )
    if images.numel() == 0 or (images.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    low, high = (float(bound) for bound in images.aminmax())
    if not (low >= 0 and high <= 1):  # also catches nan
        raise InputError(
            f"images must have pixels in [0, 1], but these reach from {low:.4g} to {high:.4g}: put the normalisation "
            "into the model (ecnn.Normalized) and divide bytes by 255."
        )


def per_image(values: Tensor, images: Tensor) -> Tensor:
    """(batch,) values shaped to be broadcast over the pixels of each image."""
    return values.view(-1, *[1] * (images.ndim - 1))


def room_of(points: Tensor, directions: Tensor) -> Tensor:
    """How far each pixel can go from the points before it leaves [0, 1], in the direction of its sign."""
    return torch.where(directions > 0, 1 - points, points)


def add_up(values: Tensor) -> Tensor:
    """The sum over the second axis, by halves: how `sum` rounds may depend on the size of the batch, this does not."""
    while (count := values.shape[1]) > 1:
        half = count // 2
        halves = values[:, :half] + values[:, half : 2 * half]
        values = halves if count % 2 == 0 else torch.cat([halves, values[:, -1:]], dim=1)
    return values.squeeze(1)


def count_features(images: Tensor, fraction: float) -> int:
    """How many values of an image are that share of them, rounded down; 0.29 of 100 are 29, not 28.999..."""
    return math.floor(fraction * math.prod(images.shape[1:]) + 1e-6)
