"""The norms: for each the length, the projection onto the ball around an image, and the steepest step.

Attacks use `NORMS[norm]` and make no decision by the norm's name, so that a new norm is one more class here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ecnn.attacks.images import per_image, room_of
from ecnn.attacks.randomness import Draws
from ecnn.checks import check_choice

Norm = Literal["linf", "l2", "l1"]
_STEP_SHARE = 0.01  # share of the pixels that a step in L1 moves
_AT_END = 1e-6  # a pixel this near to 0 or 1 counts as there: image + (1 - image) may miss 1 by rounding
_ROUNDS_BETWEEN_CHECKS = 4  # on CUDA every check makes the CPU wait for the GPU


class Geometry(ABC):
    """One norm and its balls around images, which are always cut to [0, 1].

    A move is the difference between a point and its image.

    Attributes:
        is_box: whether the ball is a box, with corners where every pixel is moved by eps.
        is_sparse: whether the best moves change few pixels, so that attacks make sparse steps.
        power: the p of an Lp norm, whose length is the sum of |move|^p to the power 1/p; unused if the ball is a box.
        dual_norm: name of the dual norm, which measures gradients. A norm whose dual has no name here defines `dual`.
    """

    is_box: ClassVar[bool] = False
    is_sparse: ClassVar[bool] = False
    power: ClassVar[int] = 2
    dual_norm: ClassVar[str]

    @property
    def longest(self) -> float:
        """Upper bound on the length of a move within [0, 1], for any number of pixels: 1 in a box, otherwise inf."""
        return 1.0 if self.is_box else math.inf

    @abstractmethod
    def length(self, moves: Tensor) -> Tensor:
        """(batch,) length of each image's move."""

    def dual(self, gradient: Tensor) -> Tensor:
        """(batch,) dual norm of the gradient: the steepest change of the loss per unit of length."""
        return NORMS[self.dual_norm].length(gradient)

    @abstractmethod
    def steepest(self, gradient: Tensor) -> Tensor:
        """The move of length 1 that raises the loss fastest; zero if the gradient is zero."""

    def step(self, gradient: Tensor, points: Tensor) -> Tensor:
        """The move of length 1 for one attack step: the steepest, or in L1 one that moves more pixels."""
        return self.steepest(gradient)

    @abstractmethod
    def shorten(self, moves: Tensor, radii: Tensor) -> Tensor:
        """The nearest moves that are no longer than the radii: (batch,) one per image, which may be infinite."""

    @abstractmethod
    def project(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        """Points of the ball near the given ones: the fast projection for each step. `nearest` is exact."""

    def nearest(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        """The points of the ball nearest to the given ones in Euclidean distance."""
        return self.project(points, images, eps)

    def nearest_within(self, points: Tensor, images: Tensor, radii: Tensor) -> Tensor:
        """Points near the given ones, within [0, 1] and within the radii: (batch,) one per image."""
        return (images + self.shorten(points - images, radii)).clamp(0, 1)

    @abstractmethod
    def random(self, images: Tensor, eps: float, draws: Draws) -> Tensor:
        """A random point for each image: uniform in the ball of radius eps, then cut to [0, 1]."""

    @abstractmethod
    def move_to_hyperplane(self, points: Tensor, normals: Tensor, offsets: Tensor) -> Tensor:
        """The shortest moves from the points onto the hyperplanes normal . move + offset = 0, within [0, 1].

        If no point of [0, 1] lies on the hyperplane, the move ends in the corner nearest to it.

        Args:
            points: (batch, n) in [0, 1].
            normals: (batch, n); pixels where it is zero do not move.
            offsets: (batch,).

        Returns:
            (batch, n) moves.
        """

    @abstractmethod
    def rounding(self, pixels: int) -> float:
        """Tolerance for the length of a move of this many pixel values: rounding in float32 may exceed eps by it."""


class _Linf(Geometry):
    is_box = True
    dual_norm = "l1"

    def length(self, moves: Tensor) -> Tensor:
        return moves.flatten(1).abs().amax(dim=1)

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
        """Of the shortest moves the one in which every pixel moves the same distance, unless [0, 1] ends before."""
        directions, weights, room, levels = _scale_hyperplane(points, normals, offsets)
        return _move_at_speeds((weights > 0).double(), directions, weights, room, levels)

    def rounding(self, pixels: int) -> float:
        return 1e-6


class _L2(Geometry):
    dual_norm = "l2"

    def length(self, moves: Tensor) -> Tensor:
        return l2_norm(moves)

    def steepest(self, gradient: Tensor) -> Tensor:
        # Dividing by the largest entry first keeps the squares of tiny gradients from vanishing.
        scaled = gradient / per_image(gradient.flatten(1).abs().amax(dim=1).clamp_min(1e-38), gradient)
        return scaled / per_image(l2_norm(scaled).clamp_min(1e-12), gradient)

    def shorten(self, moves: Tensor, radii: Tensor | float) -> Tensor:
        scale = (radii / l2_norm(moves).clamp_min(1e-30)).clamp(max=1)
        return moves * per_image(scale, moves)

    def project(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        """Moves scaled to the radius, then cut to [0, 1]. The cut wastes part of the radius; `nearest` uses all."""
        return (images + self.shorten(points - images, eps)).clamp(0, 1)

    def nearest(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        radii = torch.full((len(images),), eps, dtype=torch.float64, device=images.device)
        return self.nearest_within(points, images, radii)

    def nearest_within(self, points: Tensor, images: Tensor, radii: Tensor) -> Tensor:
        moves = (points - images).flatten(1)
        room = room_of(images.flatten(1), moves)
        # The nearest point is the scaled move, cut: its squared length is the sum of min(scale^2 move^2, room^2).
        caps = room.double() ** 2 * (moves != 0)
        scales = solve_capped_sum(moves.double() ** 2, caps, radii.double() ** 2).sqrt().clamp(max=1)
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


class _L1(Geometry):
    """L1. The steepest move changes one pixel, so `step` moves 1 % of the pixels by equal amounts instead."""

    is_sparse = True
    power = 1
    dual_norm = "linf"

    def length(self, moves: Tensor) -> Tensor:
        return moves.flatten(1).abs().sum(dim=1)

    def steepest(self, gradient: Tensor) -> Tensor:
        flat = gradient.flatten(1)
        largest = flat.abs().argmax(dim=1, keepdim=True)
        return torch.zeros_like(flat).scatter(1, largest, flat.gather(1, largest).sign()).view_as(gradient)

    def step(self, gradient: Tensor, points: Tensor) -> Tensor:
        """The move of length 1 shared equally by the 1 % of pixels with the largest gradients (Tramer & Boneh 2019)."""
        count = math.ceil(gradient.shape[1:].numel() * _STEP_SHARE)
        return share_step(gradient, points, torch.full(gradient.shape[:1], count, device=gradient.device))

    def shorten(self, moves: Tensor, radii: Tensor) -> Tensor:
        sizes = moves.flatten(1).abs().double()
        kept = (sizes - _solve_threshold(sizes, sizes, radii.double())).clamp_min(0)
        return kept.to(moves.dtype).view_as(moves).copysign(moves)

    def project(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        """The nearest points: every move is shortened by the same amount, then cut to [0, 1] (Croce & Hein 2021)."""
        if eps == 0:
            return images.clone()
        radii = torch.full((len(images),), eps, dtype=torch.float64, device=images.device)
        return self.nearest_within(points, images, radii)

    def nearest_within(self, points: Tensor, images: Tensor, radii: Tensor) -> Tensor:
        moves = (points - images).flatten(1)
        sizes, room = moves.abs().double(), room_of(images.flatten(1), moves).double()
        kept = torch.minimum((sizes - _solve_threshold(sizes, room, radii.double())).clamp_min(0), room)
        return (images + kept.to(moves.dtype).copysign(moves).view_as(images)).clamp(0, 1)

    def random(self, images: Tensor, eps: float, draws: Draws) -> Tensor:
        shape = images.shape[1:]
        # Shares of a sum of n + 1 exponential variables, with random signs, are uniform in the ball.
        sizes = -(1 - draws.uniform(*shape, dtype=images.dtype)).log()
        rest = -(1 - draws.fold(3).uniform(dtype=images.dtype)).log()
        signs = 2 * draws.fold(4).integers(2, *shape).to(images.dtype) - 1
        scale = eps / (self.length(sizes) + rest).clamp_min(1e-30)
        return (images + signs * sizes * per_image(scale, images)).clamp(0, 1)

    def move_to_hyperplane(self, points: Tensor, normals: Tensor, offsets: Tensor) -> Tensor:
        """Pixels move one after the other, the largest entries of the normal first, each as far as it can."""
        directions, weights, room, levels = _scale_hyperplane(points, normals, offsets)
        weights, order = weights.sort(dim=1, descending=True)
        room = room.gather(1, order)
        gains = weights * room
        missing = (levels[:, None] - (gains.cumsum(dim=1) - gains)).clamp_min(0)
        moves = torch.where(weights > 0, torch.minimum(missing / weights.clamp_min(1e-300), room), 0.0)
        return torch.zeros_like(moves).scatter(1, order, moves).to(directions.dtype).copysign(directions)

    def rounding(self, pixels: int) -> float:
        return 1e-6 * (1 + pixels / 10)


class _Norms(dict[str, Geometry]):
    """The norms by name; any other name raises InputError."""

    def __missing__(self, name: str) -> Geometry:
        check_choice("norm", name, self)
        raise AssertionError(name)


NORMS = _Norms(linf=_Linf(), l2=_L2(), l1=_L1())


def l2_norm(differences: Tensor) -> Tensor:
    """(batch,) Euclidean length of each row, for tensors of any shape (batch, ...)."""
    length: Tensor = torch.linalg.vector_norm(differences.flatten(1), dim=1)
    return length


def share_step(gradient: Tensor, points: Tensor, counts: Tensor) -> Tensor:
    """The move of length 1 in L1 shared equally by the `counts` pixels (batch,) with the largest gradients.

    Pixels that would leave [0, 1] take no part. At least one pixel moves, and more than `counts` if gradients tie; none
    moves where the gradient is zero.
    """
    gradient = gradient * (room_of(points, gradient) > _AT_END)
    sizes = gradient.flatten(1).abs()
    last = counts.clamp(1, sizes.shape[1])[:, None] - 1
    least = sizes.sort(dim=1, descending=True).values.gather(1, last)
    signs = gradient.flatten(1).sign() * (sizes >= least)
    return (signs / signs.abs().sum(dim=1, keepdim=True).clamp_min(1)).view_as(gradient)


def _solve_threshold(sizes: Tensor, room: Tensor, levels: Tensor) -> Tensor:
    """(batch, 1) the least t >= 0 at which the row's sum of min(max(size - t, 0), room) is at most its level.

    The sum is piecewise linear in t. Each pixel gives two knots: where its term begins to shrink (size - room, or 0)
    and where it is zero (size). Over the sorted knots the values of the sum are a running sum.

    Args:
        sizes, room: (batch, n) at least 0, in float64.
        levels: (batch,) above 0, or inf.
    """
    kept = torch.minimum(sizes, room)
    knots, order = torch.cat([sizes - kept, sizes], dim=1).sort(dim=1)
    slopes = torch.where(order < sizes.shape[1], -1.0, 1.0).to(sizes.dtype).cumsum(dim=1)
    falls = (slopes[:, :-1] * knots.diff(dim=1)).cumsum(dim=1)
    values = kept.sum(dim=1, keepdim=True) + torch.nn.functional.pad(falls, (1, 0))
    levels = levels[:, None]
    last = ((values > levels).sum(dim=1, keepdim=True) - 1).clamp_min(0)
    over, slope = (values.gather(1, last) - levels).clamp_min(0), -slopes.gather(1, last)
    return torch.where(over > 0, knots.gather(1, last) + over / slope.clamp_min(1), 0.0)


def solve_capped_sum(rates: Tensor, caps: Tensor, levels: Tensor) -> Tensor:
    """(batch,) the t >= 0 at which the row's sum of min(t * rate, cap) reaches its level; inf if it never does.

    The sum is piecewise linear and concave in t. Newton's method rises to the solution from below: every round caps at
    least one more term until it arrives. About ten rounds are usual.

    Args:
        rates: (batch, n) at least 0.
        caps: (batch, n) at least 0, and 0 wherever the rate is 0.
        levels: (batch,) at least 0.
    """
    # A sum of thousands of float32 numbers has seven digits at best, and t is a ratio of two such sums.
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
    """Directions (batch, n) towards the hyperplanes; |normal| and room (batch, n) and |offset| (batch,) in float64.

    |normal| and |offset| are divided by the normal's largest entry: only their ratio matters, and squares of tiny
    gradients would vanish.
    """
    directions = -normals * offsets.sign()[:, None]
    largest = normals.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(normals.dtype).tiny).double()
    levels = offsets.abs().double() / largest.squeeze(1)
    return directions, normals.abs().double() / largest, room_of(points, directions).double(), levels


def _move_at_speeds(
    speeds: Tensor, directions: Tensor, weights: Tensor, room: Tensor, levels: Tensor
) -> Tensor:
    """(batch, n) moves in proportion to speeds, each at most its room, whose weighted sum reaches the level."""
    times = solve_capped_sum(weights * speeds, weights * room, levels)
    moves = torch.minimum((times[:, None] * speeds).nan_to_num(nan=0.0), room).to(directions.dtype)
    return moves.copysign(directions)


def round_to_bytes(points: Tensor, images: Tensor, *, norm: Norm, eps: float) -> Tensor:
    """The points rounded to multiples of 1/255. Where the nearest one leaves the ball, towards the image instead."""
    geometry = NORMS[norm]
    levels, origin = points * 255, images * 255
    nearest = levels.round()
    inward = torch.where(levels > origin, levels.floor(), levels.ceil())
    limit = eps + geometry.rounding(images[0].numel())
    if geometry.is_box:
        leaves = (nearest / 255 - images).abs() > limit
    else:
        leaves = per_image(geometry.length((nearest / 255 - images).flatten(1)) > limit, images)
    return torch.where(leaves, inward, nearest).clamp(0, 255) / 255
