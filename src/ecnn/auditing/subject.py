"""What is audited: one object that `audit` makes and the suite, the stages and every check take."""

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
    """A model, the images it is asked about, and the ball it is said to be robust in.

    Attributes:
        model: pixels in [0, 1] to scores, in eval mode.
        images: (image, channel, height, width), on the model's device; all that are audited, right or wrong.
        labels: (image,) the true classes.
        norm: a name of `ecnn.attacks.NORMS`.
        eps: radius on the [0, 1] scale.
        budget: how much may be asked.
        seed: of all randomness.
        stood: (image,) whether the attacks of the audit have left it; None before they were made.
    """

    model: nn.Module
    images: Tensor
    labels: Tensor
    norm: Norm
    eps: float
    budget: Budget
    seed: int = 0
    stood: Tensor | None = None

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, NORMS)
        parse_eps(self.eps, most=NORMS[self.norm].longest)

    def standing_first(self, stood: Tensor) -> Subject:
        """The same with the images that stood in front, but for a quarter of those that checks look at.

        What stands decides the audited accuracy, so that checks should look there. The rest explains what a claim that
        was measured otherwise owes to which attack.
        """
        left, fell = (torch.nonzero(part).squeeze(1) for part in (stood, ~stood))
        most = self.budget.probe_images - min(len(fell), self.budget.probe_images // 4)
        order = torch.cat([left[:most], fell, left[most:]]).to(self.images.device)
        return replace(
            self, images=self.images[order], labels=self.labels[order], stood=stood.to(order.device)[order]
        )


_MADE: WeakKeyDictionary[Subject, dict[str, Any]] = WeakKeyDictionary()


def once(subject: Subject, name: str, make: Callable[[], Any]) -> Any:
    """What is made of a subject, made when it is first asked for: the suite and answers to doubts share it."""
    made = _MADE.setdefault(subject, {})
    if name not in made:
        made[name] = make()
    return made[name]
