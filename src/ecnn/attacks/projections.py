"""Exact projections onto what a box leaves of a ball or of a hyperplane.

All three are one problem: quantities that grow in proportion to t until each meets its own cap, and the t at which
their sum reaches a level. The sum is piecewise linear and concave in t: Newton's method climbs to the solution from
below, caps at least one more quantity in every round until it is there, and in practice needs about ten.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ecnn.attacks.ball import Norm, project

_ROUNDS_BETWEEN_CHECKS = 4  # each check makes a CUDA device wait


def solve_capped_sum(rates: Tensor, caps: Tensor, levels: Tensor) -> Tensor:
    """(batch,) the t >= 0 at which the row's sum of min(t * rate, cap) reaches its level; inf where it never does.

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


def project_to_ball(points: Tensor, images: Tensor, norm: Norm, eps: float) -> Tensor:
    """The nearest points within eps of the images and within [0, 1], in the Euclidean sense and in either norm.

    `ball.project` scales in L2 and then cuts, which leaves part of the radius unused wherever a pixel is cut.
    """
    if norm == "linf":
        return project(points, images, norm, eps)
    moves = (points - images).flatten(1)
    room = room_of(images.flatten(1), moves)
    # The nearest point is a scaled move, cut: its squared length is the sum of min(scale^2 move^2, room^2).
    radii = torch.full_like(moves[:, 0], eps, dtype=torch.float64) ** 2
    scales = (
        solve_capped_sum(moves.double() ** 2, room.double() ** 2 * (moves != 0), radii).sqrt().clamp(max=1)
    )
    cut = torch.minimum(moves.abs() * scales[:, None].to(moves.dtype), room).copysign(moves)
    return (images + cut.view_as(images)).clamp(0, 1)


def room_of(points: Tensor, directions: Tensor) -> Tensor:
    """How far each pixel can go from the points before it leaves [0, 1], in the direction of its sign."""
    return torch.where(directions > 0, 1 - points, points)


def move_to_hyperplane(points: Tensor, normals: Tensor, offsets: Tensor, norm: Norm) -> Tensor:
    """The shortest moves from the points to the hyperplanes normal . move + offset = 0 that stay in [0, 1].

    Where the box does not reach the hyperplane, the move ends in the corner nearest to it.

    Args:
        points: (batch, n) in [0, 1].
        normals: (batch, n); pixels where it is zero do not move.
        offsets: (batch,).

    Returns:
        (batch, n); of the shortest moves in Linf, the one that moves every pixel as far as the longest if it can.
    """
    directions = -normals * offsets.sign()[:, None]
    weights, room = normals.abs(), room_of(points, directions)
    speeds = (weights > 0).to(weights.dtype) if norm == "linf" else weights
    # A gradient can be tiny, and its square then vanishes: only ratios matter, so that the largest is made 1.
    largest = weights.amax(dim=1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny).double()
    scaled, speeds = weights.double() / largest, speeds.double() / (largest if norm == "l2" else 1)
    levels = offsets.abs().double() / largest.squeeze(1)
    times = solve_capped_sum(scaled * speeds, scaled * room.double(), levels)
    moves = torch.minimum((times[:, None] * speeds).nan_to_num(nan=0.0), room.double()).to(points.dtype)
    return moves.copysign(directions)
