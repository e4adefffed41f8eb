"""Helpers for batches of images that do not depend on the norm: batch size limits, checks, broadcasting."""

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
    """Limits the number of images per forward pass in this context. The smallest of nested limits counts.

    Args:
        images: the limit, or None for none.
    """
    bounds = [bound for bound in (images, _MOST.get()) if bound is not None]
    token = _MOST.set(min(bounds) if bounds else None)
    try:
        yield
    finally:
        _MOST.reset(token)


def at_once(usual: int) -> int:
    """Batch size for forward passes: `usual`, or the limit set by `at_most` if that is smaller."""
    most = _MOST.get()
    return usual if most is None else min(usual, most)


@contextmanager
def together(values: int) -> Iterator[None]:
    """Lets attacks run several attempts at few images in one batch of at most this many pixel values, in this context.

    A small network takes as long for one image as for dozens. The points found stay the same. The cost may rise: an
    image that one attempt breaks has also spent the passes of the other attempts in its batch.
    """
    token = _TOGETHER.set(values)
    try:
        yield
    finally:
        _TOGETHER.reset(token)


def copies_at_once(images: int, values: int) -> int:
    """How many copies of a batch (images of `values` pixel values each) fit into one pass; 1 outside `together`."""
    most = at_once(_TOGETHER.get() // max(1, values))
    return max(1, most // max(1, images))


def check_pixels(images: Tensor) -> None:
    """Raises InputError unless these are float32 or float64 pixels in [0, 1].

    Their range is not checked while a CUDA graph is recorded, because nothing may wait for the GPU then.
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
    """The values (batch,) reshaped to (batch, 1, ...), so that they broadcast over the pixels of each image."""
    return values.view(-1, *[1] * (images.ndim - 1))


def room_of(points: Tensor, directions: Tensor) -> Tensor:
    """How far each pixel of the points can move within [0, 1]: up where its direction is positive, otherwise down."""
    return torch.where(directions > 0, 1 - points, points)


def add_up(values: Tensor) -> Tensor:
    """(batch, ...) the sum over the second axis, by pairwise halves.

    Its rounding does not depend on the batch size, that of `torch.sum` may.
    """
    while (count := values.shape[1]) > 1:
        half = count // 2
        halves = values[:, :half] + values[:, half : 2 * half]
        values = halves if count % 2 == 0 else torch.cat([halves, values[:, -1:]], dim=1)
    return values.squeeze(1)


def count_features(images: Tensor, fraction: float) -> int:
    """The number of values in this fraction of one image, rounded down; 0.29 of 100 gives 29, not 28 by rounding."""
    return math.floor(fraction * math.prod(images.shape[1:]) + 1e-6)
