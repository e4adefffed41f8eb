"""Attacks whose every point has whole grey levels, for models that tell such images from others."""

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
_ROUNDING = 1e-4  # of a level: pixels as float32 holds them


def is_on_bytes(images: Tensor) -> bool:
    """Whether all pixels are whole grey levels, as files hold them."""
    levels = images * _LEVELS
    return bool(((levels - levels.round()).abs() <= _ROUNDING).all())


def whole_levels(eps: float) -> float:
    """The largest radius of whole grey levels that is no larger than eps."""
    return math.floor(eps * _LEVELS + _ROUNDING) / _LEVELS


@dataclass(frozen=True, kw_only=True)
class RoundedScores(ScoreView):
    """The scores of the nearest image of whole grey levels; gradients pass the rounding as if it were none."""

    name: str = "rounded scores"

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        nearest = (images.detach() * _LEVELS).round() / _LEVELS
        scores = full_precision(model(nearest + (images - images.detach())))
        return scores, scores.detach()


@dataclass(frozen=True, kw_only=True)
class OnBytes(BallAttack):
    """Another attack, whose points are rounded to whole grey levels.

    A model may send images of whole levels one way and all others another, perhaps outside of torch: gradients and
    questions elsewhere tell nothing of the way that files go. Let the attack look at `RoundedScores`, within a radius
    of `whole_levels` around images of whole levels.

    Attributes:
        norm, eps: of the ball, the attack's own.
        attack: one with a ball.
    """

    attack: Attack

    def cost(self, num_classes: int) -> Cost:
        return self.attack.cost(num_classes)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        points = self.attack.search(target, images, labels, draws)
        return round_to_bytes(points, images, norm=self.norm, eps=self.radius)
