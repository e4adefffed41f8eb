"""Directions for `RaySearch`: where it starts, which blocks of pixels it changes, and noise for its probes."""

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

#: How many directions are tried together. It is fixed, so that the batch size changes no result.
_WIDTH = 16
_ROUNDS = 4  # rounds of blocks between two estimates of the border's normal
_NEIGHBOURS, _OTHERS = 4, 8  # neighbours of the image's class, and of other classes, that give directions
LARGE = 1e3  # a direction whose largest entry is this leaves every ball


@dataclass(frozen=True, eq=False, kw_only=True)
class Neighbours:
    """Images with known adversarial moves: a move that breaks one image may break a similar one.

    Attributes:
        images: (neighbour, channel, height, width).
        labels: (neighbour,) their classes.
        moves: (neighbour, channel, height, width) move of each image to a misclassified point; zero if none is known.
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
        """(batch, direction, ...) moves of the nearest broken images of the same class, and moves to other classes.

        The latter lead to the nearest image of each other class, for up to eight classes.

        Args:
            draws: perturb the distances, so that images other than the nearest are chosen too; None takes the nearest.
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
    """The next action of a search.

    Attributes:
        kind: "faces" estimates the border's normal, "blocks" changes blocks of pixels, "tour" ends a tour of blocks.
        number: for "faces", how often it was done before; for "blocks", the number of the first block to change.
        side: side of the blocks, in pixels.
        apart: whether a block covers one channel; otherwise it covers all channels.
        tour: number of the tour, from 0.
    """

    kind: Literal["faces", "blocks", "tour"]
    number: int = 0
    side: int = 1
    apart: bool = False
    tour: int = 0


def tours(shape: torch.Size) -> Iterator[Step]:
    """Yields steps without end: tours of all blocks, from blocks of half the image's side down to single pixels."""
    channels, height, width = layout(shape)
    looks = 0
    for tour in itertools.count():
        rounds = 0
        for side in _sides(max(height, width)):
            across = math.ceil(height / side) * math.ceil(width / side)
            # In colour images single pixels are changed per channel only: changing all channels adds little to it.
            for apart in (False, True) if channels > 1 and side > 1 else (channels > 1,):
                for first in range(0, across * (channels if apart else 1), _WIDTH):
                    if rounds % _ROUNDS == 0:
                        yield Step("faces", looks, tour=tour)
                        looks += 1
                    rounds += 1
                    yield Step("blocks", first, side, apart, tour)
        yield Step("tour", tour=tour)


def layout(shape: torch.Size) -> tuple[int, int, int]:
    """(channels, height, width) of an image of this shape; inputs that are not 3-dimensional count as one row."""
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else (1, 1, shape.numel())


def _sides(longest: int) -> Iterator[int]:
    side = longest
    while side > 1:
        side = math.ceil(side / 2)
        yield side
    if longest <= 1:
        yield 1


def next_blocks(images: Tensor, keys: Tensor, step: Step) -> Tensor:
    """(batch, block, channel, height, width) masks of the next blocks, in a random order for each image."""
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
    """(batch, direction, ...) first directions: brighter, darker, more contrast, less contrast, and noise in blocks."""
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
    """(batch, count, ...) normal noise, constant in blocks: coarse noise gives better estimates with few queries.

    Args:
        number: of the estimate; it selects blocks of 1/8 or 1/16 of the image's side, or single pixels, in turn.
    """
    noise = draws.normal(count, *points.shape[1:], dtype=points.dtype)
    _, height, width = layout(points.shape[1:])
    side = max(1, max(height, width) // (8, 16, max(height, width))[number % 3])
    return noise if side == 1 else _coarse(noise.flatten(0, 1), side).view_as(noise)


def _coarse(noise: Tensor, side: int) -> Tensor:
    """The noise made constant within blocks of this side; unchanged if it is not (batch, channel, height, width)."""
    if side == 1 or noise.ndim != 4:
        return noise
    rows = torch.arange(noise.shape[2], device=noise.device) // side * side
    columns = torch.arange(noise.shape[3], device=noise.device) // side * side
    return noise[:, :, rows][:, :, :, columns]


def stretch(norm: Norm, directions: Tensor) -> Tensor:
    """The directions (batch, n, ...) scaled to leave every ball; in a box their signs, scaled."""
    if NORMS[norm].is_box:
        return directions.sign() * LARGE
    return directions / largest_entry(directions).clamp_min(1e-30) * LARGE


def largest_entry(directions: Tensor) -> Tensor:
    """(batch, n, 1, ...) the largest absolute entry of each direction (batch, n, ...)."""
    sizes = directions.flatten(2).abs().amax(dim=2)
    return sizes.view(*sizes.shape, *[1] * (directions.ndim - 2))


def as_counted(norm: Norm, moves: Tensor, radii: Tensor) -> Tensor:
    """The moves, in a box clipped to the radii (batch,): entries beyond a radius have no further effect there."""
    return NORMS[norm].shorten(moves, radii) if NORMS[norm].is_box else moves


def unit(directions: Tensor) -> Tensor:
    """The directions scaled to length 1 in L2."""
    return NORMS["l2"].steepest(directions)
