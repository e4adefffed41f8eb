"""The norms: what each means by length, by the ball around an image, and by the steepest way up.

Every attack asks `NORMS[norm]` and decides nothing by the name, so that a new norm is one more class here.
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
_STEP_SHARE = 0.01  # of the pixels, what a step in L1 moves
_AT_END = 1e-6  # a pixel as near to 0 or 1 is there: image + (1 - image) may be 1 but for rounding
_ROUNDS_BETWEEN_CHECKS = 4  # each check makes a CUDA device wait


class Geometry(ABC):
    """One norm. Its ball of radius eps around an image is always cut to [0, 1].

    Attributes:
        is_box: whether the ball is a box, so that it has corners where every pixel is moved by eps.
        is_sparse: whether the best moves are those of few pixels, so that attacks make such.
        power: to which the sizes of the moves of single pixels are added up; for a ball that is no box.
        dual_norm: name of the norm by which gradients are measured; a norm without such a name defines `dual`.
    """

    is_box: ClassVar[bool] = False
    is_sparse: ClassVar[bool] = False
    power: ClassVar[int] = 2
    dual_norm: ClassVar[str]

    @property
    def longest(self) -> float:
        """No move within [0, 1] is longer, however many pixels there are."""
        return 1.0 if self.is_box else math.inf

    @abstractmethod
    def length(self, moves: Tensor) -> Tensor:
        """(batch,) length of each image-shaped row."""

    def dual(self, gradient: Tensor) -> Tensor:
        """(batch,) how fast a loss with this gradient can change per unit of length."""
        return NORMS[self.dual_norm].length(gradient)

    @abstractmethod
    def steepest(self, gradient: Tensor) -> Tensor:
        """The move of length 1 that raises the loss fastest; zero where the gradient is."""

    def step(self, gradient: Tensor, points: Tensor) -> Tensor:
        """The move of length 1 that a gradient attack makes: the steepest, or one nearly so that moves more pixels."""
        return self.steepest(gradient)

    @abstractmethod
    def shorten(self, moves: Tensor, radii: Tensor) -> Tensor:
        """The nearest moves that are no longer than each image's own radius (batch,), which may be infinite."""

    @abstractmethod
    def project(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        """Points of the ball near the given ones, found without waiting for the device."""

    def nearest(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        """The points of the ball nearest to the given ones, in the Euclidean sense."""
        return self.project(points, images, eps)

    def nearest_within(self, points: Tensor, images: Tensor, radii: Tensor) -> Tensor:
        """Points near the given ones that lie within each image's own radius (batch,), cut to [0, 1]."""
        return (images + self.shorten(points - images, radii)).clamp(0, 1)

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
        """Of the shortest moves, the one that moves every pixel as far as the longest if it can."""
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
        """Scaled back to the radius and then cut, which leaves some of the radius unused; `nearest` uses all."""
        return (images + self.shorten(points - images, eps)).clamp(0, 1)

    def nearest(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        radii = torch.full((len(images),), eps, dtype=torch.float64, device=images.device)
        return self.nearest_within(points, images, radii)

    def nearest_within(self, points: Tensor, images: Tensor, radii: Tensor) -> Tensor:
        moves = (points - images).flatten(1)
        room = room_of(images.flatten(1), moves)
        # The nearest point is a scaled move, cut: its squared length is the sum of min(scale^2 move^2, room^2).
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
    """Long moves of few pixels: the steepest is one pixel, so that steps move a share of them by equal parts."""

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
        """Shared by the 1 % of the pixels with the largest gradients (Tramer & Boneh 2019)."""
        count = math.ceil(gradient.shape[1:].numel() * _STEP_SHARE)
        return share_step(gradient, points, torch.full(gradient.shape[:1], count, device=gradient.device))

    def shorten(self, moves: Tensor, radii: Tensor) -> Tensor:
        sizes = moves.flatten(1).abs().double()
        kept = (sizes - _solve_threshold(sizes, sizes, radii.double())).clamp_min(0)
        return kept.to(moves.dtype).view_as(moves).copysign(moves)

    def project(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        """The nearest points: every pixel's move is cut by one amount, then to its room (Croce & Hein 2021)."""
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
        """Pixels move one after the other, those of the largest weight first, each as far as it can."""
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
    """The norms by name; a name that is none of them is refused by an InputError."""

    def __missing__(self, name: str) -> Geometry:
        check_choice("norm", name, self)
        raise AssertionError(name)


NORMS = _Norms(linf=_Linf(), l2=_L2(), l1=_L1())


def l2_norm(differences: Tensor) -> Tensor:
    """(batch,) Euclidean length of each row, of images or of scores."""
    length: Tensor = torch.linalg.vector_norm(differences.flatten(1), dim=1)
    return length


def share_step(gradient: Tensor, points: Tensor, counts: Tensor) -> Tensor:
    """The move of length 1 in L1 that so many pixels (batch,), those of the largest gradients, make in equal parts.

    Pixels at an end of [0, 1] that would leave it take no part. At least one pixel moves; of equally large ones all do,
    and none where the gradient is zero.
    """
    gradient = gradient * (room_of(points, gradient) > _AT_END)
    sizes = gradient.flatten(1).abs()
    last = counts.clamp(1, sizes.shape[1])[:, None] - 1
    least = sizes.sort(dim=1, descending=True).values.gather(1, last)
    signs = gradient.flatten(1).sign() * (sizes >= least)
    return (signs / signs.abs().sum(dim=1, keepdim=True).clamp_min(1)).view_as(gradient)


def _solve_threshold(sizes: Tensor, room: Tensor, levels: Tensor) -> Tensor:
    """(batch, 1) the least t >= 0 at which the row's sum of min(max(size - t, 0), room) is no more than its level.

    The sum falls in straight pieces between the t at which a pixel begins to shrink (size - room, or 0) and those at
    which it is gone (size): in the order of these knots its value at each of them is a running sum.

    Args:
        sizes, room: (batch, n) from 0 up, in float64.
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


def round_to_bytes(points: Tensor, images: Tensor, *, norm: Norm, eps: float) -> Tensor:
    """The points as 8-bit images would hold them, still in the ball: what rounding takes out of it is cut off."""
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
