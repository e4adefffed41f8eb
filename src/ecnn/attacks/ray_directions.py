"""Directions that a search by classes tries: first ones, blocks of pixels to change, and noise to probe with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ecnn.attacks.norms import NORMS, Norm
from ecnn.attacks.randomness import Draws
from ecnn.errors import InputError

#: Directions that are tried together, a fixed number, so that the size of a batch changes no result.
_WIDTH = 16
_ROUNDS = 4  # of blocks between two looks at which way the border faces
_NEIGHBOURS, _OTHERS = 4, 8  # neighbours of the class, and of other classes, that give directions
LARGE = 1e3  # a direction times this is longer than any ball


@dataclass(frozen=True, eq=False, kw_only=True)
class Neighbours:
    """Images whose fate is known: what broke them may break an image that is near.

    Attributes:
        images: (neighbour, channel, height, width).
        labels: (neighbour,) their classes.
        moves: (neighbour, channel, height, width) to a misclassified point; zero if none is known.
    """

    images: Tensor
    labels: Tensor
    moves: Tensor

    def __post_init__(self) -> None:
        if self.images.shape != self.moves.shape or len(self.images) != len(self.labels):
            raise InputError(
                f"neighbours need a label and a move for each image, not {len(self.labels)} labels and moves of "
                f"{tuple(self.moves.shape)} for images of {tuple(self.images.shape)}."
            )

    def directions(self, norm: Norm, images: Tensor, labels: Tensor, draws: Draws | None) -> Tensor:
        """(batch, direction, ...): what broke the nearest neighbours of the class, and the way to those of others.

        Args:
            draws: by which others than the nearest are chosen now and then; None takes the nearest.
        """
        known, own = self.images.to(images), self.labels.to(labels.device)
        apart = torch.cdist(images.flatten(1).double(), known.flatten(1).double())
        if draws is not None:
            apart = apart * (1 + draws.uniform(len(own), dtype=apart.dtype))
        is_broken = (self.moves.flatten(1) != 0).any(dim=1).to(labels.device)
        is_other = own != labels[:, None]
        near = torch.where(is_other | ~is_broken, math.inf, apart).argsort(dim=1, stable=True)
        found = [stretch(norm, self.moves.to(images)[near[:, :_NEIGHBOURS]])]
        left = torch.where(is_other, apart, math.inf)
        for _ in range(_OTHERS):  # one of each class
            chosen = left.argmin(dim=1)
            found.append(known[chosen, None] - images[:, None])
            left = left.masked_fill(own == own[chosen, None], math.inf)
        return torch.cat(found, dim=1)


@dataclass(frozen=True)
class Step:
    """What a search does next.

    Attributes:
        kind: look which way the border "faces", change "blocks", or take stock at the end of a "tour".
        number: how often that was done before; of blocks, the first one to change.
        side: of the blocks.
        apart: whether each channel has blocks of its own.
        tour: how many tours went before.
    """

    kind: Literal["faces", "blocks", "tour"]
    number: int = 0
    side: int = 1
    apart: bool = False
    tour: int = 0


def tours(shape: torch.Size) -> Iterator[Step]:
    """Tours of all blocks, from those of half the image to single pixels, without an end."""
    channels, height, width = layout(shape)
    looks = 0
    for tour in itertools.count():
        rounds = 0
        for side in _sides(max(height, width)):
            across = math.ceil(height / side) * math.ceil(width / side)
            # Single pixels of all channels together cost as much as one channel and say little that these do not.
            for apart in (False, True) if channels > 1 and side > 1 else (channels > 1,):
                for first in range(0, across * (channels if apart else 1), _WIDTH):
                    if rounds % _ROUNDS == 0:
                        yield Step("faces", looks, tour=tour)
                        looks += 1
                    rounds += 1
                    yield Step("blocks", first, side, apart, tour)
        yield Step("tour", tour=tour)


def layout(shape: torch.Size) -> tuple[int, int, int]:
    """Channels, height and width; what is no picture is one row of pixels."""
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else (1, 1, shape.numel())


def _sides(longest: int) -> Iterator[int]:
    side = longest
    while side > 1:
        side = math.ceil(side / 2)
        yield side
    if longest <= 1:
        yield 1


def next_blocks(images: Tensor, keys: Tensor, step: Step) -> Tensor:
    """(batch, block, channel, height, width) which pixels belong to each of the next blocks, in an order by chance."""
    shape = images.shape[1:]
    channels, height, width = layout(shape)
    down, across = math.ceil(height / step.side), math.ceil(width / step.side)
    count = down * across * (channels if step.apart else 1)
    stride = next(k for k in itertools.count(max(1, round(0.618 * count))) if math.gcd(k, count) == 1)
    first = Draws(keys).fold(1000 + step.tour).fold(step.side).integers(count, 1)
    places = torch.arange(step.number, min(step.number + _WIDTH, count), device=first.device)
    numbers = (first + places * stride) % count
    channel, rest = numbers // (down * across), numbers % (down * across)
    rows = torch.arange(height, device=first.device) // step.side == (rest // across)[..., None]
    columns = torch.arange(width, device=first.device) // step.side == (rest % across)[..., None]
    inside = rows[:, :, None, :, None] & columns[:, :, None, None, :]
    if step.apart:
        own = torch.arange(channels, device=first.device) == channel[..., None]
        inside = inside & own[..., None, None]
    return inside.expand(-1, -1, channels, -1, -1).reshape(*numbers.shape, *shape)


def first_patterns(norm: Norm, images: Tensor, draws: Draws) -> Tensor:
    """(batch, direction, ...) brighter, darker, more and less contrast, and random signs in blocks of any size."""
    shape = images.shape[1:]
    _, height, width = layout(shape)
    sides = [1, *_sides(max(height, width))][: _WIDTH - 4]
    up, contrast = torch.ones_like(images), images - 0.5
    found = [up, -up, contrast, -contrast]
    found += [_coarse(draws.fold(k).normal(*shape, dtype=images.dtype), side) for k, side in enumerate(sides)]
    if NORMS[norm].is_box:
        found = [direction.sign() for direction in found]
    return stretch(norm, torch.stack(found, dim=1))


def probe_noise(points: Tensor, count: int, draws: Draws, number: int) -> Tensor:
    """(batch, count, ...) normal numbers; of large images in turn smooth ones, which tell more with few questions."""
    noise = draws.normal(count, *points.shape[1:], dtype=points.dtype)
    _, height, width = layout(points.shape[1:])
    side = max(1, max(height, width) // (8, 16, max(height, width))[number % 3])
    return noise if side == 1 else _coarse(noise.flatten(0, 1), side).view_as(noise)


def _coarse(noise: Tensor, side: int) -> Tensor:
    """The noise with the same number in every block of that side."""
    if side == 1 or noise.ndim != 4:
        return noise
    rows = torch.arange(noise.shape[2], device=noise.device) // side * side
    columns = torch.arange(noise.shape[3], device=noise.device) // side * side
    return noise[:, :, rows][:, :, :, columns]


def stretch(norm: Norm, directions: Tensor) -> Tensor:
    """The directions (batch, n, ...), so long that they leave every ball."""
    if NORMS[norm].is_box:
        return directions.sign() * LARGE
    return directions / largest_entry(directions).clamp_min(1e-30) * LARGE


def largest_entry(directions: Tensor) -> Tensor:
    """(batch, n, 1, ...) the largest entry of each direction (batch, n, ...)."""
    sizes = directions.flatten(2).abs().amax(dim=2)
    return sizes.view(*sizes.shape, *[1] * (directions.ndim - 2))


def as_counted(norm: Norm, moves: Tensor, radii: Tensor) -> Tensor:
    """The moves as far as they count at the radii."""
    return NORMS[norm].shorten(moves, radii) if NORMS[norm].is_box else moves


def unit(directions: Tensor) -> Tensor:
    """The directions with length 1 in L2."""
    return NORMS["l2"].steepest(directions)
