"""The subject of an audit: model, images, ball and budget, as one object for the suite, the stages and every check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ecnn.attacks.norms import NORMS, Norm
from ecnn.auditing.budgets import Budget
from ecnn.checks import check_choice, parse_eps


@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """A model, the images that it is audited on, and the ball in which it is said to be robust.

    Attributes:
        model: pixels in [0, 1] to scores, in eval mode.
        images: (image, channel, height, width), on the model's device; all that are audited, right or wrong.
        labels: (image,) the true classes.
        norm: a name of `ecnn.attacks.NORMS`.
        eps: radius on the [0, 1] scale.
        budget: how much effort may be spent.
        seed: of all randomness.
        stood: (image,) True for images that no attack of the audit has broken; None before the attacks.
        is_random: whether it is known that two passes differ, perhaps only for points near the images.
    """

    model: nn.Module
    images: Tensor
    labels: Tensor
    norm: Norm
    eps: float
    budget: Budget
    seed: int = 0
    stood: Tensor | None = None
    is_random: bool = False

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, NORMS)
        parse_eps(self.eps, most=NORMS[self.norm].longest)

    def standing_first(self, stood: Tensor) -> Subject:
        """The subject with reordered images: of the first ones, which checks look at, three quarters are unbroken.

        Unbroken images decide the audited accuracy, so that checks should look at them. The others show which attacks
        a weaker evaluation lacks. If there are too few of one sort, more of the other take their places.

        Args:
            stood: (image,) True for images that no attack has broken.
        """
        left, fell = (torch.nonzero(part).squeeze(1) for part in (stood, ~stood))
        most = self.budget.probe_images - min(len(fell), self.budget.probe_images // 4)
        order = torch.cat([left[:most], fell, left[most:]]).to(self.images.device)
        return replace(
            self, images=self.images[order], labels=self.labels[order], stood=stood.to(order.device)[order]
        )


_MADE: WeakKeyDictionary[Subject, dict[str, Any]] = WeakKeyDictionary()


def once(subject: Subject, name: str, make: Callable[[], Any]) -> Any:
    """The result of `make()` for a subject, made once for each name: the suite and the responses to alarms share it."""
    made = _MADE.setdefault(subject, {})
    if name not in made:
        made[name] = make()
    return made[name]
