"""The accuracy of a model under attackers who know how it hides."""

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
_BESIDE, _NOISE = 5, 0.02  # points tried beside each one, and how far away, as a share of the radius


def informed_accuracy(
    model: nn.Module, images: Tensor, labels: Tensor, eps: float, *, points: Sequence[Tensor] = ()
) -> float:
    """Share of images classified correctly when clean and under attackers who know how the model hides.

    It is an upper bound of the true robust accuracy that does not depend on the audit. The attacks use the model with
    its tricks opened, its members if it has some, and its scores alone. Every point is verified on fresh copies of the
    original model. For a random model the share is a mean over new passes, for each image at the point where earlier
    passes were wrong most often.

    Args:
        points: more points to try, each a tensor of the shape of `images`.
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
    if _asks_alone(model):
        tried += [_beside(part, images, eps, seed) for part in tried for seed in range(_BESIDE)]
    worst = torch.stack([share_right(model, part, labels) for part in tried]).argmin(dim=0)
    chosen = torch.stack(tried)[worst, torch.arange(len(images))]
    return float(share_right(model, chosen, labels).mean())


def share_right(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """(batch,) share of passes in which a fresh copy is right: three passes, or twenty if these differ.

    Images go through one at a time if a part of the model sets `is_asked_alone`, because its answers depend on the
    batch.
    """
    size = 1 if _asks_alone(model) else len(images)
    passes: list[Tensor] = []
    while len(passes) < 3 or (len(passes) < _DRAWS and not all(part.equal(passes[0]) for part in passes)):
        with torch.no_grad():
            fresh = copy.deepcopy(model)
            passes.append(torch.cat([fresh(part) for part in torch.split(images, size)]))
    return torch.stack([predicted_classes(scores) == labels for scores in passes]).double().mean(dim=0)


def _asks_alone(model: nn.Module) -> bool:
    """Whether a part of the model says that images must go through one at a time."""
    return any(getattr(part, "is_asked_alone", False) for part in model.modules())


def _beside(points: Tensor, images: Tensor, eps: float, seed: int) -> Tensor:
    """Random points of the ball very near to the given ones.

    A model whose random numbers follow from the image draws new ones there, and an attacker may take the worst draw.
    """
    noise = torch.rand(points.shape, generator=torch.Generator().manual_seed(seed))
    moved = points + _NOISE * eps * (2 * noise - 1)
    return torch.minimum(torch.maximum(moved, images - eps), images + eps).clamp(0, 1)
