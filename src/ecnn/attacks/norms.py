"""The norms: what each means by length, by the ball around an image, and by the steepest way up.

Every attack asks `NORMS[norm]` and decides nothing by the name, so that a new norm is one more class here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ecnn.attacks.draws import Draws
from ecnn.attacks.images import per_image, room_of
from ecnn.checks import check_choice

Norm = Literal["linf", "l2"]
_ROUNDS_BETWEEN_CHECKS = 4  # each check makes a CUDA device wait


class Geometry(ABC):
    """One norm. Its ball of radius eps around an image is always cut to [0, 1].

    Attributes:
        is_box: whether the ball is a box, so that it has corners where every pixel is moved by eps.
    """

    is_box: ClassVar[bool] = False

    @abstractmethod
    def length(self, moves: Tensor) -> Tensor:
        """(batch,) length of each image-shaped row."""

    @abstractmethod
    def dual(self, gradient: Tensor) -> Tensor:
        """(batch,) how fast a loss with this gradient can change per unit of length."""

    @abstractmethod
    def steepest(self, gradient: Tensor) -> Tensor:
        """The move of length 1 that raises the loss fastest; zero where the gradient is."""

    @abstractmethod
    def shorten(self, moves: Tensor, radii: Tensor) -> Tensor:
        """The nearest moves that are no longer than each image's own radius (batch,), which may be infinite."""

    @abstractmethod
    def project(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        """Points of the ball near the given ones, found without waiting for the device."""

    def nearest(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        """The points of the ball nearest to the given ones, in the Euclidean sense."""
        return self.project(points, images, eps)

    @abstractmethod
    def random(self, images: Tensor, eps: float, draws: Draws) -> Tensor:
        """A uniformly drawn point within eps of each image, cut to [0, 1]."""

    @abstractmethod
    def move_to_hyperplane(self, points: Tensor, normals: Tensor, offsets: Tensor) -> Tensor:
        """The shortest moves from the points to the hyperplanes normal . move + offset = 0 that stay in [0, 1].

        Where the box does not reach the hyperplane, the move ends in the corner nearest to it.

        Args:
            points: (batch, n) in [0, 1].
            normals: (batch, n); pixels where it is zero do not move.
            offsets: (batch,).

        Returns:
            (batch, n).
        """

    @abstractmethod
    def rounding(self, pixels: int) -> float:
        """How far beyond eps float32 may take a point of so many pixels."""


class _Linf(Geometry):
    is_box = True

    def length(self, moves: Tensor) -> Tensor:
        return moves.flatten(1).abs().amax(dim=1)

    def dual(self, gradient: Tensor) -> Tensor:
        return gradient.flatten(1).abs().sum(dim=1)

    def steepest(self, gradient: Tensor) -> Tensor:
        return gradient.sign()

    def shorten(self, moves: Tensor, radii: Tensor) -> Tensor:
        bound = per_image(radii, moves)
        return torch.minimum(torch.maximum(moves, -bound), bound)

    def project(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        low, high = (images - eps).clamp_(min=0), (images + eps).clamp_(max=1)
        return torch.minimum(torch.maximum(points, low), high)

    def random(self, images: Tensor, eps: float, draws: Draws) -> Tensor:
        moves = (2 * draws.uniform(*images.shape[1:], dtype=images.dtype) - 1) * eps
        return self.project(images + moves, images, eps)

    def move_to_hyperplane(self, points: Tensor, normals: Tensor, offsets: Tensor) -> Tensor:
        """Of the shortest moves, the one that moves every pixel as far as the longest if it can."""
        directions, weights, room, levels = _scale_hyperplane(points, normals, offsets)
        return _move_at_speeds((weights > 0).double(), directions, weights, room, levels)

    def rounding(self, pixels: int) -> float:
        return 1e-6


class _L2(Geometry):
    def length(self, moves: Tensor) -> Tensor:
        return l2_norm(moves)

    def dual(self, gradient: Tensor) -> Tensor:
        return l2_norm(gradient)

    def steepest(self, gradient: Tensor) -> Tensor:
        # Dividing by the largest entry first keeps the squares of tiny gradients from vanishing.
        scaled = gradient / per_image(gradient.flatten(1).abs().amax(dim=1).clamp_min(1e-38), gradient)
        return scaled / per_image(l2_norm(scaled).clamp_min(1e-12), gradient)

    def shorten(self, moves: Tensor, radii: Tensor | float) -> Tensor:
        scale = (radii / l2_norm(moves).clamp_min(1e-30)).clamp(max=1)
        return moves * per_image(scale, moves)

    def project(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        """Scaled back to the radius and then cut, which leaves some of the radius unused; `nearest` uses all."""
        return (images + self.shorten(points - images, eps)).clamp(0, 1)

    def nearest(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        moves = (points - images).flatten(1)
        room = room_of(images.flatten(1), moves)
        # The nearest point is a scaled move, cut: its squared length is the sum of min(scale^2 move^2, room^2).
        radii = torch.full_like(moves[:, 0], eps, dtype=torch.float64) ** 2
        caps = room.double() ** 2 * (moves != 0)
        scales = solve_capped_sum(moves.double() ** 2, caps, radii).sqrt().clamp(max=1)
        cut = torch.minimum(moves.abs() * scales[:, None].to(moves.dtype), room).copysign(moves)
        return (images + cut.view_as(images)).clamp(0, 1)

    def random(self, images: Tensor, eps: float, draws: Draws) -> Tensor:
        direction = draws.normal(*images.shape[1:], dtype=images.dtype)
        # A uniform point of a ball in n dimensions has a radius distributed as u^(1/n).
        radius = eps * draws.fold(3).uniform(dtype=images.dtype) ** (1 / max(1, images[0].numel()))
        moves = direction * per_image(radius / l2_norm(direction).clamp_min(1e-30), images)
        return self.project(images + moves, images, eps)

    def move_to_hyperplane(self, points: Tensor, normals: Tensor, offsets: Tensor) -> Tensor:
        directions, weights, room, levels = _scale_hyperplane(points, normals, offsets)
        return _move_at_speeds(weights, directions, weights, room, levels)

    def rounding(self, pixels: int) -> float:
        return 1e-6 * (1 + math.sqrt(pixels) / 10)


class _Norms(dict[str, Geometry]):
    """The norms by name; a name that is none of them is refused by an InputError."""

    def __missing__(self, name: str) -> Geometry:
        check_choice("norm", name, self)
        raise AssertionError(name)


NORMS = _Norms(linf=_Linf(), l2=_L2())


def l2_norm(differences: Tensor) -> Tensor:
    """(batch,) Euclidean length of each row, of images or of scores."""
    length: Tensor = torch.linalg.vector_norm(differences.flatten(1), dim=1)
    return length


def solve_capped_sum(rates: Tensor, caps: Tensor, levels: Tensor) -> Tensor:
    """(batch,) the t >= 0 at which the row's sum of min(t * rate, cap) reaches its level; inf where it never does.

    The sum is piecewise linear and concave in t: Newton's method climbs to the solution from below, caps at least one
    more quantity in every round until it is there, and in practice needs about ten.

    Args:
        rates: (batch, n) from 0 up.
        caps: (batch, n) from 0 up; 0 where the rate is.
        levels: (batch,) from 0 up.
    """
    # Sums of thousands of float32 numbers are worth seven digits at best, and t is a ratio of two of them.
    rates, caps, levels = rates.double(), caps.double(), levels.double()
    times = torch.zeros_like(levels)
    while True:
        for _ in range(_ROUNDS_BETWEEN_CHECKS):
            before = times
            free = times[:, None] * rates < caps
            slope, capped = (rates * free).sum(dim=1), (caps * ~free).sum(dim=1)
            reached = torch.where(slope > 0, (levels - capped) / slope.clamp_min(1e-300), torch.inf)
            times = torch.maximum(before, reached)
        if bool((times == before).all()):
            return times


def _scale_hyperplane(
    points: Tensor, normals: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Directions (batch, n) towards the hyperplanes, and in float64 |normal| and room (batch, n) and |offset| (batch,).

    A gradient can be tiny, and its square then vanishes: only ratios matter, so that its largest entry is made 1.
    """
    directions = -normals * offsets.sign()[:, None]
    largest = normals.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(normals.dtype).tiny).double()
    levels = offsets.abs().double() / largest.squeeze(1)
    return directions, normals.abs().double() / largest, room_of(points, directions).double(), levels


def _move_at_speeds(
    speeds: Tensor, directions: Tensor, weights: Tensor, room: Tensor, levels: Tensor
) -> Tensor:
    """(batch, n) moves that set out together at their speeds, stop at their room, and end when they reach the level."""
    times = solve_capped_sum(weights * speeds, weights * room, levels)
    moves = torch.minimum((times[:, None] * speeds).nan_to_num(nan=0.0), room).to(directions.dtype)
    return moves.copysign(directions)
