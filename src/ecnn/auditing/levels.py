"""Attacks that end on 8-bit images (whole grey levels), for models that treat these differently from all others."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from ecnn.asking import full_precision
from ecnn.attacks.base import Attack, BallAttack, Cost, Target
from ecnn.attacks.norms import round_to_bytes
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import ScoreView

_LEVELS = 255
_ROUNDING = 1e-4  # tolerance for float32 pixels, in grey levels


def is_on_bytes(images: Tensor) -> bool:
    """Whether all pixels are whole grey levels, multiples of 1/255, as in an 8-bit file."""
    levels = images * _LEVELS
    return bool(((levels - levels.round()).abs() <= _ROUNDING).all())


def whole_levels(eps: float) -> float:
    """The radius eps, rounded down to whole grey levels (a multiple of 1/255)."""
    return math.floor(eps * _LEVELS + _ROUNDING) / _LEVELS


@dataclass(frozen=True, kw_only=True)
class RoundedScores(ScoreView):
    """The scores of the image rounded to whole grey levels; gradients pass through the rounding unchanged."""

    name: str = "rounded scores"

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        nearest = (images.detach() * _LEVELS).round() / _LEVELS
        scores = full_precision(model(nearest + (images - images.detach())))
        return scores, scores.detach()


@dataclass(frozen=True, kw_only=True)
class OnBytes(BallAttack):
    """Another attack, whose final points are rounded to whole grey levels.

    A model may process 8-bit images differently from all others, perhaps outside of torch. Then gradients and queries
    at other points say nothing about 8-bit images. Use an attack on `RoundedScores` with a radius of `whole_levels`,
    around images of whole levels.

    Attributes:
        norm, eps: of the ball, the same as the attack's.
        attack: an attack within a ball.
    """

    attack: Attack

    def cost(self, num_classes: int) -> Cost:
        return self.attack.cost(num_classes)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        points = self.attack.search(target, images, labels, draws)
        return round_to_bytes(points, images, norm=self.norm, eps=self.radius)
