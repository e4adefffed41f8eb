"""Square Attack: random squares, kept if they raise the loss; it reads scores only (Andriushchenko et al. 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ecnn.attacks.attempts import Attempts, Rows, iterate_rows
from ecnn.attacks.base import BallAttack, Cost, Target
from ecnn.attacks.images import per_image
from ecnn.attacks.norms import NORMS, Norm, l2_norm
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import Aim, Loss, View, find_score_view
from ecnn.checks import check_choice, check_counts, check_number
from ecnn.objectives import predicted_classes

# After each of these numbers of queries, of 10,000, the share of pixels in a square is halved.
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
_HALVINGS_BUDGET = 10_000
_DRAWN_AT_ONCE = 50  # steps whose random numbers are drawn in one call: the cost is per call
_FALL, _SPARSE_FALL = 2, 4  # exponents by which a bump decreases from its middle, in L2 and in L1
_TILES = 5  # a side of the first L2 or L1 perturbation has this many squares
_WIDEST_TURN = math.pi / 4  # largest angle of "turns", for a square as large as the image
_STREAM = 13


def square_share(step: int, queries: int, first: float, *, rescale: bool) -> float:
    """The share of pixels that the square of a step covers (the paper's p): `first`, halved up to nine times.

    Args:
        step: number of the step from 0 up; step 0 follows the starting point.
        queries: of the whole search.
        first: the share at the start.
        rescale: stretches the schedule, published for 10,000 queries, to `queries`.
    """
    if rescale:
        step = step * _HALVINGS_BUDGET // queries
    return first * 0.5 ** sum(step > halving for halving in _HALVINGS)


@dataclass(frozen=True, kw_only=True)
class Square(BallAttack):
    """Square Attack (Andriushchenko et al. 2020): a random search without gradients, in Linf, L2 or L1.

    In Linf a square at a random place is moved by eps or -eps, with one random sign per channel. In L2 one square is
    cleared, and another gets its share of the radius as two bumps of opposite sign. L1 (Croce & Hein 2021) is like L2
    with sharper bumps, and the result is projected onto the ball. A change is kept if it raises the loss or if its
    point is misclassified. Masked gradients do not stop this attack: images that it alone breaks are evidence of them.

    The published moves in L2 can only clear a square, and their smallest square is three pixels wide, so even on a
    linear model they end far from the optimum. `l2_moves="turns"`, our own, rotates the whole perturbation towards a
    square of one random colour instead. It comes as near to that optimum as the queries allow, and breaks more images
    (benchmarks/attacks.md).

    Attributes:
        norm: of the ball, a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        queries: forward passes for each start, the starting point included; 5,000 in AutoAttack.
        loss: "margin" (published) or "cross_entropy".
        first_share: share of the pixels that the first squares cover (the paper's p).
        rescale: stretches the halving schedule of that share, made for 10,000 queries, to `queries` as in the paper;
            AutoAttack does not stretch it.
        l2_moves: "bumps" (published) or "turns" (ours, stronger); without effect in other norms.
        restarts: how many starts, each with its own random numbers.
        on: the view that is attacked: "scores", "linear", "tempered" or another `ScoreView`.

    Departs: every image draws its own squares. In AutoAttack's program a batch shares their places, and the last row
        and the last column of the image are never changed.
    """

    queries: int
    loss: Literal["margin", "cross_entropy"] = "margin"
    first_share: float = 0.8
    rescale: bool = True
    l2_moves: Literal["bumps", "turns"] = "bumps"
    restarts: int = 1
    on: str | View = "scores"

    def __post_init__(self) -> None:
        super().__post_init__()
        find_score_view(self.on)
        check_choice("loss", self.loss, ("margin", "cross_entropy"))
        check_choice("l2_moves", self.l2_moves, ("bumps", "turns"))
        check_counts(self, "queries", "restarts")
        check_number("first_share", self.first_share, most=1, above=True)

    def cost(self, num_classes: int) -> Cost:
        return Cost(2 + self.queries * self.restarts, 0)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        if self.radius == 0:
            return images.clone()
        draws = draws.fold(_STREAM)
        attempts = Attempts(target, images, early_exit=self._drops_rows)
        for start, part, rows in attempts.each(range(self.restarts)):
            own_draws = draws.fold(start).take(rows)
            attempts.keep(*self._wander(part, images[rows], labels[rows], own_draws))
        return attempts.points

    def _wander(
        self, target: Target, images: Tensor, labels: Tensor, draws: Draws
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One start: each image's best point, (batch,) whether it is broken, and its loss.

        With early exit the best point is the first broken one, otherwise the broken one of the highest loss; for an
        unbroken image it is the point of the highest loss.
        """
        view, eps = find_score_view(self.on), self.radius
        first, propose = (
            (_first_stripes, _propose_square) if NORMS[self.norm].is_box else (_first_tiles, _propose_bumps)
        )
        if self.norm == "l2" and self.l2_moves == "turns":
            propose = _propose_turn
        whole = _start_walk(images, labels, draws)
        whole.accept(target, view, self.loss, first(self.norm, images, eps, draws.fold(0)))
        for step, part, walk in iterate_rows(target, whole, self.queries - 1, early_exit=self._drops_rows):
            share = square_share(step, self.queries, self.first_share, rescale=self.rescale)
            walk.accept(part, view, self.loss, propose(self.norm, walk, eps, share, walk.next_numbers(step)))
        return whole.points, whole.broken, whole.losses


@dataclass(kw_only=True)
class _Walk(Rows):
    """State of one search from one start.

    Attributes:
        points, losses: the best point of each image so far, and its loss.
        keys: (batch,) keys of the images' random numbers.
        numbers: (batch, step, number) in [0, 1), for the steps up to the next multiple of `_DRAWN_AT_ONCE`.
    """

    results: ClassVar[tuple[str, ...]] = ("broken", "points", "losses")
    images: Tensor
    labels: Tensor
    points: Tensor
    losses: Tensor
    keys: Tensor
    numbers: Tensor

    def accept(self, target: Target, view: View, loss: Loss, proposals: Tensor) -> None:
        """Keeps the proposals that raise the loss or are the first misclassified ones."""
        look = target.look(view, proposals, Aim(self.labels, loss=loss))
        scores = target.scores(proposals) if look.scores is None else look.scores
        losses, broken = look.losses.to(self.losses.dtype), predicted_classes(scores) != self.labels
        # Without early exit only another broken point may replace a broken one.
        better = (broken & ~self.broken) | ((broken == self.broken) & (losses > self.losses))
        self.points = torch.where(per_image(better, proposals), proposals, self.points)
        self.losses = torch.where(better, losses, self.losses)
        self.broken = self.broken | broken

    def next_numbers(self, step: int) -> Tensor:
        """(batch, number) the random numbers of a step: four for places, one for a rotation, one colour per channel."""
        if step % _DRAWN_AT_ONCE == 0:
            draws = Draws(self.keys).fold(1 + step // _DRAWN_AT_ONCE)
            self.numbers = draws.uniform(_DRAWN_AT_ONCE, 5 + self.images.shape[1], dtype=self.images.dtype)
        return self.numbers[:, step % _DRAWN_AT_ONCE]


def _start_walk(images: Tensor, labels: Tensor, draws: Draws) -> _Walk:
    losses = torch.full_like(images.flatten(1)[:, 0], -math.inf)
    return _Walk(
        images=images,
        labels=labels,
        points=images,
        losses=losses,
        keys=draws.keys,
        numbers=losses[:, None, None],
        broken=torch.zeros_like(labels, dtype=torch.bool),
    )


def _signs(numbers: Tensor) -> Tensor:
    return torch.where(numbers < 0.5, -1.0, 1.0).to(numbers.dtype)


def _places(numbers: Tensor, count: int) -> Tensor:
    """(batch,) integers from 0 to count - 1, from numbers in [0, 1)."""
    return (numbers * count).to(torch.int64).clamp(max=count - 1)


def _side(share: float, images: Tensor, least: int = 1) -> int:
    height, width = images.shape[-2:]
    return min(max(round(math.sqrt(share * height * width)), least), height, width)


def _first_stripes(norm: Norm, images: Tensor, eps: float, draws: Draws) -> Tensor:
    """Vertical stripes of one pixel, each plus or minus eps in each channel."""
    signs = _signs(draws.uniform(images.shape[1], 1, images.shape[3], dtype=images.dtype))
    return NORMS[norm].project(images + eps * signs, images, eps)


def _propose_square(norm: Norm, walk: _Walk, eps: float, share: float, numbers: Tensor) -> Tensor:
    images, side = walk.images, _side(share, walk.images)
    height, width = images.shape[-2:]
    top, left = _corner(numbers, side, images)
    down = torch.arange(height, device=images.device) - top[:, None]
    across = torch.arange(width, device=images.device) - left[:, None]
    inside = ((down >= 0) & (down < side))[:, None, :, None] & ((across >= 0) & (across < side))[
        :, None, None
    ]
    moved = NORMS[norm].project(images + eps * _signs(numbers[:, 5:])[:, :, None, None], images, eps)
    return torch.where(inside, moved, walk.points)


def _bump(height: int, width: int, norm: Norm) -> Tensor:
    """(height, width) a sum of rectangles around the middle, the k-th smallest of weight 1 / k^2; of length 1.

    In L1 the weights are 1 / k^4.
    """
    bump = torch.zeros(height, width, dtype=torch.float64, device="cpu")
    fall = _SPARSE_FALL if NORMS[norm].is_sparse else _FALL
    middle, centre = height // 2, width // 2
    for ring in range(max(height, width) // 2 + 1):
        top, left = max(middle - ring, 0), max(centre - ring, 0)
        bump[top : middle + ring + 1, left : centre + ring + 1] += 1 / (ring + 1) ** fall
    unit: Tensor = bump / NORMS[norm].length(bump[None]).clamp_min(1e-30)
    return unit


@lru_cache(maxsize=64)  # a copy to the GPU at every step would stall
def _two_bumps(side: int, norm: Norm, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(side, side) a positive bump above a negative one; of length 1."""
    both = torch.cat([_bump(side // 2, side, norm), -_bump(side - side // 2, side, norm)])
    unit: Tensor = both / NORMS[norm].length(both[None])
    return unit.to(device, dtype)


def _turned_bumps(side: int, norm: Norm, turns: Tensor, images: Tensor) -> Tensor:
    """(batch, 1, side, side) the two bumps, transposed for images whose number in `turns` is 0.5 or more."""
    bumps = _two_bumps(side, norm, images.dtype, images.device)
    return torch.where((turns < 0.5)[:, None, None], bumps, bumps.T)[:, None]


def _tile(images: Tensor, norm: Norm, draws: Draws) -> Tensor:
    """Moves with two bumps of random sign, of length 1, in each tile of a grid and each channel."""
    channels, height, width = images.shape[1:]
    side = max(1, min(height, width) // _TILES)
    down, across = height // side, width // side
    signs = _signs(draws.uniform(channels, down, 1, across, 1, dtype=images.dtype))
    turns = draws.fold(1).uniform(down, across, dtype=images.dtype)
    bumps = _two_bumps(side, norm, images.dtype, images.device)
    tiles = torch.where((turns < 0.5)[..., None, None], bumps, bumps.T)  # (batch, down, across, side, side)
    moves = signs * tiles.permute(0, 1, 3, 2, 4)[:, None]
    moves = moves.reshape(len(images), channels, down * side, across * side)
    top, left = (height - down * side) // 2, (width - across * side) // 2
    whole = torch.zeros_like(images)
    whole[:, :, top : top + down * side, left : left + across * side] = moves
    return whole


def _first_tiles(norm: Norm, images: Tensor, eps: float, draws: Draws) -> Tensor:
    """Points moved by tiles of two bumps, of total length eps; in L1 each tile has length 1 before the projection."""
    moves = _tile(images, norm, draws)
    return NORMS[norm].project(
        images + (moves if NORMS[norm].is_sparse else _of_length(moves, eps)), images, eps
    )


def _corner(numbers: Tensor, side: int, images: Tensor) -> tuple[Tensor, Tensor]:
    """(batch,) top row and left column of a square, from the first two random numbers."""
    height, width = images.shape[-2:]
    return _places(numbers[:, 0], height - side + 1), _places(numbers[:, 1], width - side + 1)


def _window(numbers: Tensor, side: int, images: Tensor) -> Tensor:
    """(batch, channel, side * side) positions in the flattened image of a square, placed by the first two numbers."""
    top, left = _corner(numbers, side, images)
    steps = torch.arange(side, device=images.device)
    rows, columns = top[:, None, None] + steps[:, None], left[:, None, None] + steps
    flat = (rows * images.shape[-1] + columns).flatten(1)
    return flat[:, None].expand(-1, images.shape[1], -1)


def _two_windows(walk: _Walk, share: float, numbers: Tensor) -> tuple[int, Tensor, Tensor]:
    """The side of two squares, odd if the image is large enough, and their positions as from `_window`."""
    images = walk.images
    height, width = images.shape[-2:]
    side = _side(share, images, least=3)
    side = min(side + 1 - side % 2, height, width)
    return side, _window(numbers[:, :2], side, images), _window(numbers[:, 2:4], side, images)


def _propose_bumps(norm: Norm, walk: _Walk, eps: float, share: float, numbers: Tensor) -> Tensor:
    """Clears one square and adds two bumps to another, which gets the cleared one's part of the radius and the unused.

    In L2 each channel gets its own share. In L1 these shares are multiplied by the number of channels, and the
    projection removes the excess.
    """
    images, channels, power = walk.images, walk.images.shape[1], NORMS[norm].power
    due, all_due = (1, channels) if NORMS[norm].is_sparse else (channels, 1)
    side, here, there = _two_windows(walk, share, numbers)
    moves = (walk.points - images).flatten(2)
    sizes = moves.abs() ** power
    unused = (eps**power - sizes.sum(dim=(1, 2))).clamp_min(0)[:, None, None] / due
    cleared = moves.scatter(2, there, 0.0).scatter(2, here, 0.0)
    freed = (sizes - cleared.abs() ** power).sum(dim=2, keepdim=True)
    bumps = _turned_bumps(side, norm, numbers[:, 4], images).flatten(2) * _signs(numbers[:, 5:])[:, :, None]
    mixed = _of_unit_length(norm, bumps + _of_unit_length(norm, moves.gather(2, here)))
    radii = (all_due * freed + unused).clamp_min(0) ** (1 / power)
    return NORMS[norm].project(images + cleared.scatter(2, here, mixed * radii).view_as(images), images, eps)


def _of_unit_length(norm: Norm, moves: Tensor) -> Tensor:
    """The moves (batch, channel, n), each channel scaled to length 1."""
    lengths = NORMS[norm].length(moves.flatten(0, 1)).view(*moves.shape[:2], 1)
    return moves / lengths.clamp_min(1e-12)


def _propose_turn(norm: Norm, walk: _Walk, eps: float, share: float, numbers: Tensor) -> Tensor:
    """The perturbation, of length eps, rotated by a random angle towards a square of one random colour.

    The smaller the square, the smaller the angle: a small square can add little.
    """
    images, side = walk.images, _side(share, walk.images)
    colours = (2 * numbers[:, 5:] - 1)[:, :, None].expand(-1, -1, side * side)
    square = torch.zeros_like(images).flatten(2).scatter(2, _window(numbers, side, images), colours)
    angles = _WIDEST_TURN * math.sqrt(side / max(images.shape[-2:])) * numbers[:, 2].sqrt()
    moves = _of_length(walk.points - images, eps)
    turned = moves + per_image(angles.tan(), images) * _of_length(square.view_as(images), eps)
    return NORMS[norm].project(images + _of_length(turned, eps), images, eps)


def _of_length(moves: Tensor, length: float) -> Tensor:
    """The moves scaled to this L2 length; moves of length 0 stay."""
    return moves * per_image(length / l2_norm(moves).clamp_min(1e-12), moves)
