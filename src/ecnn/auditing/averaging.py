"""A random model as a function: the mean of several passes, always of the same ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ecnn.asking import full_precision
from ecnn.attacks.randomness import forked_generators

_MOST_PASSES = 10_007  # streams of two seeds do not meet


class MeanOfPasses(nn.Module):
    """The mean of several passes over a random model, drawn from the same seeds every time: a function again.

    Compared with each other, two single passes differ by what was drawn; two of these means do not. So a check of
    gradients and losses asks what it is meant to ask, and takes no noise for masking.

    Args:
        model: the random model.
        passes: how many.
        seed: of the first.
    """

    def __init__(self, model: nn.Module, passes: int, seed: int) -> None:
        super().__init__()
        self.model, self.passes, self.seed = model, passes, seed

    def forward(self, images: Tensor) -> Tensor:
        total: Any = 0
        for number in range(self.passes):
            with forked_generators(images.device, self.seed * _MOST_PASSES + number):
                total = total + full_precision(self.model(images)) / self.passes
        mean: Tensor = total
        return mean
