"""What attackers leave who know how a model hides."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ecnn.attacks import APGD, PGD, Attack, Square
from ecnn.auditing.bench.tricks import open_tricks
from ecnn.objectives import predicted_classes

_DRAWS = 20


def informed_accuracy(
    model: nn.Module, images: Tensor, labels: Tensor, eps: float, *, points: Sequence[Tensor] = ()
) -> float:
    """Share of images right when clean and under attackers who know how the model hides.

    An upper bound of the true robust accuracy that does not depend on the audit: attacks on the model with its tricks
    opened, on its members where it has some, and on nothing but scores, all verified on fresh copies of the model as
    it is. Of a random model it is the mean over new passes at the point of each image where earlier passes were wrong
    most often.

    Args:
        points: more points to try, each like images.
    """
    opened = open_tricks(model)
    common: dict[str, Any] = {"norm": "linf", "eps": eps}
    climb: dict[str, Any] = {"steps": 40, "step_size": eps / 8, "keep": "last", **common}
    attacks: list[tuple[Attack, nn.Module]] = [
        (PGD(loss="margin", **climb), opened),
        (PGD(loss="cross_entropy", **climb), opened),
        (APGD(steps=50, loss="dlr", targets=9, **common), opened),
        (PGD(loss="margin", steps=60, step_size=eps / 4, restarts=5, **common), opened),
        (PGD(loss="margin", steps=40, step_size=eps / 8, targets=9, **common), opened),
        (PGD(steps=40, step_size=eps / 8, restarts=3, **common), model),
        (Square(queries=1000, **common), model),
    ]
    if hasattr(opened, "member_logits"):
        attacks += [
            (PGD(on="members", targets=targets, steps=40, step_size=eps / 8, **common), opened)
            for targets in (0, 9)
        ]
    tried = [images, *points]
    tried += [attack.run(copy.deepcopy(shown), images, labels).images for attack, shown in attacks]
    worst = torch.stack([share_right(model, part, labels) for part in tried]).argmin(dim=0)
    chosen = torch.stack(tried)[worst, torch.arange(len(images))]
    return float(share_right(model, chosen, labels).mean())


def share_right(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """(batch,) how often a fresh copy is right: in many passes if the first three differ.

    One image at a time where a part of the model says `is_asked_alone`: its batch decides what it answers.
    """
    size = 1 if any(getattr(part, "is_asked_alone", False) for part in model.modules()) else len(images)
    passes: list[Tensor] = []
    while len(passes) < 3 or (len(passes) < _DRAWS and not all(part.equal(passes[0]) for part in passes)):
        with torch.no_grad():
            fresh = copy.deepcopy(model)
            passes.append(torch.cat([fresh(part) for part in torch.split(images, size)]))
    return torch.stack([predicted_classes(scores) == labels for scores in passes]).double().mean(dim=0)
