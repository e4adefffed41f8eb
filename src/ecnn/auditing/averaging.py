"""A random model made deterministic: the mean of several passes with fixed seeds."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ecnn.asking import full_precision
from ecnn.attacks.randomness import forked_generators

_MOST_PASSES = 10_007  # up to so many passes, two seeds share no random numbers


class MeanOfPasses(nn.Module):
    """The mean of the scores of several passes of a random model, with the same random numbers in every call.

    Two single passes differ by their random numbers, two of these means do not. So a check that compares gradients
    and losses does not take the noise for gradient masking.

    Args:
        model: the random model.
        passes: how many passes the mean is taken over.
        seed: from which the seeds of the passes follow.
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
