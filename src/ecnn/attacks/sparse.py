"""Gradient steps that may change only some of an image's values, each as far as it goes."""

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
    """PGD that changes at most a share of an image's values, anywhere in [0, 1] (PGD0 of Croce & Hein 2019).

    Looks for the worst case within JSMA's budget: JSMA takes no move back, and stops where no feature is salient.
    A feature is one value of the image, so a coloured pixel has three. Each step goes up the gradient with a length in
    L1, then to the nearest point that changes no more features than allowed.

    Attributes:
        max_pixel_fraction: of the features that may differ from the image, rounded down; as in `JSMA`.
        step_size: a step's length in L1 is this times the number of features that may be changed. 10 is usual: short
            steps favour the features that are changed already, and stay with a poor choice of them.
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
    """The points in [0, 1] nearest to the given ones that differ from the images in no more than that share of values.

    A value that is kept ends at its own nearest place in [0, 1]; kept are those that bring the point nearest so.
    """
    kept = count_features(images, fraction)
    wanted = (points - images).flatten(1)
    possible = (points.clamp(0, 1) - images).flatten(1)
    gains = wanted.square() - (wanted - possible).square()
    chosen = gains.topk(kept, dim=1).indices
    moves = torch.zeros_like(possible).scatter(1, chosen, possible.gather(1, chosen))
    return (images + moves.view_as(images)).clamp(0, 1)
