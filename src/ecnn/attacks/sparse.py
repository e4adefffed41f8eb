"""PGD that may change only a limited number of an image's values, but those without a bound other than [0, 1]."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ecnn.attacks.base import Target
from ecnn.attacks.gradient import PGD
from ecnn.attacks.images import add_up, count_features, per_image
from ecnn.attacks.norms import Norm
from ecnn.attacks.randomness import Draws
from ecnn.checks import check_number

_SMALLEST = 1e-30


@dataclass(frozen=True, kw_only=True)
class SparsePGD(PGD):
    """PGD that changes at most a share of an image's values, each to any value in [0, 1] (PGD0 of Croce & Hein 2019).

    Use it to search JSMA's budget more thoroughly: JSMA never undoes a change and stops when no feature is salient. A
    feature is one value of the image, so a coloured pixel has three. A step goes up the gradient by a given L1 length,
    then to the nearest point that changes no more features than allowed.

    Attributes:
        max_pixel_fraction: largest share of the features that may differ from the image, rounded down to whole
            features; as in `JSMA`.
        step_size: the L1 length of a step, divided by the number of features that may be changed. 10 is usual: with
            short steps the choice of features hardly changes after the first ones, even if it was poor.
    """

    max_pixel_fraction: float
    norm: Norm = field(default="linf", init=False)
    eps: float | str = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("max_pixel_fraction", self.max_pixel_fraction, most=1)

    def _first(self, target: Target, images: Tensor, draws: Draws) -> Tensor:
        return change_few(super()._first(target, images, draws), images, self.max_pixel_fraction)

    def _move(self, points: Tensor, gradient: Tensor, images: Tensor, step: int) -> Tensor:
        length = self.step_length(step) * count_features(images, self.max_pixel_fraction)
        sizes = add_up(gradient.flatten(1).abs()).clamp_min(_SMALLEST)
        moved = points + per_image(length / sizes, images) * gradient
        return change_few(moved, images, self.max_pixel_fraction)


def change_few(points: Tensor, images: Tensor, fraction: float) -> Tensor:
    """The points in [0, 1] nearest to the given ones among those that change at most this share of the image's values.

    Changed values are cut to [0, 1]; all others are the image's. The changed values are those that bring the result
    nearest to the given point.
    """
    kept = count_features(images, fraction)
    wanted = (points - images).flatten(1)
    possible = (points.clamp(0, 1) - images).flatten(1)
    gains = wanted.square() - (wanted - possible).square()
    chosen = gains.topk(kept, dim=1).indices
    moves = torch.zeros_like(possible).scatter(1, chosen, possible.gather(1, chosen))
    return (images + moves.view_as(images)).clamp(0, 1)
