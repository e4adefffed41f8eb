"""Checks whether attacks met the model as it is deployed: a fresh copy, asked about one image at a time.

`confirm` asks such copies about points that broke images, `compare_ends` attacks them on images that nothing broke, and
`compare_means` compares a random model in batches and alone before it is attacked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 as all of torch's users call it
from torch import Tensor, nn

from ecnn.asking import read_model, undisturbed, without_tf32
from ecnn.attacks.base import Attacked
from ecnn.attacks.gradient import PGD
from ecnn.attacks.images import at_once
from ecnn.attacks.norms import NORMS, round_to_bytes
from ecnn.attacks.randomness import forked_generators
from ecnn.attacks.ray_directions import Neighbours
from ecnn.attacks.rays import RaySearch
from ecnn.auditing.deployment import Deployment
from ecnn.auditing.diagnostics.statistics import TOLERANCE, exceeds
from ecnn.auditing.examination import (
    LITTLE,
    PROBED,
    Late,
    find_different,
    is_random_at,
    noisy_points,
    what_decides,
)
from ecnn.auditing.subject import Subject, once
from ecnn.comparing import spread_of, typical_lead
from ecnn.objectives import predicted_classes, score_margin

#: A margin below this share of the spread of the scores counts as a tie: the order of summation decides its sign.
_TIE = 1e-5
#: Steps of the walk whose last points are compared, and their lengths together in radii.
_STEPS, _REACH = 20, 2.5
#: Images of each kind that are compared alone, images that are attacked alone, and passes of a random model over them.
_COMPARED, _LONELY, _PASSES = 8, 48, 16
#: An image that was right in half of the passes, and now in fewer than these, was broken.
_SELDOM = 0.25
#: Standard errors that are no chance: of t with some 30 degrees of freedom one in 200,000 is beyond 5.5.
_SIGNIFICANT = 5.5
#: Queries of the search for an image whose point does not hold alone, if the batch sways the model's scores.
_SEARCHED = 1000
#: Factors by which a move is lengthened, in turn, until its point is misclassified.
_REACHES = (1.0, 1.05, 1.2, 1.5, 2.0, 4.0)
_FULL = 256  # images in a full batch


@dataclass(frozen=True, eq=False, kw_only=True)
class Confirmation:
    """Whether points that broke images are also misclassified by fresh copies of the deployed model.

    Attributes:
        holds: (point,) whether it, or a point found in its place, is misclassified alone.
        full: (point,) whether this point is misclassified in full, shuffled batches.
        rounded: (point,) whether it, or one farther in its direction, is misclassified after rounding to 8 bits; None
            if the images do not have 8 bits.
        late: how the model must be asked otherwise, as only the attacks revealed; None if as before.
    """

    holds: np.ndarray
    full: np.ndarray
    rounded: np.ndarray | None
    late: Late | None


def confirm(
    deployment: Deployment, subject: Subject, points: Tensor, rows: Tensor, *, are_bytes: bool
) -> Confirmation:
    """Classifies points that broke images again, by copies that no attack has asked: each alone, and in batches.

    A point holds if it is misclassified alone, or if its margin is a tie. If the batch sways the model's scores,
    another point of the ball, mostly farther in the same direction, may hold in its place.

    Args:
        deployment: how the model is asked.
        subject: what is audited; its model is the object that the attacks asked.
        points: (point, channel, height, width), on the CPU.
        rows: (point,) positions of their images in the subject.
        are_bytes: whether the images have 8 bits, so that points are also rounded to 8 bits and checked.
    """
    labels = subject.labels[rows.to(subject.labels.device)]
    points = points.to(subject.images)
    with without_tf32():
        lead = _typical_lead(deployment, subject)
        holds = _is_broken(_alone_scores(deployment, subject, points), labels, lead)
        if deployment.is_swayed:
            points, holds = _taken_farther(deployment, subject, points, rows, labels, holds)
        order = torch.randperm(
            len(points), generator=torch.Generator().manual_seed(subject.seed), device="cpu"
        )
        full = np.zeros(len(points), dtype=bool)
        scores = _scores(deployment, subject, points[order])
        full[order.numpy()] = _is_broken(scores, labels[order], lead)
        rounded = _broken_when_rounded(deployment, subject, points, rows, labels) if are_bytes else None
        late = _what_came_late(deployment, subject, points[order], holds, full)
    return Confirmation(holds=holds, full=full, rounded=rounded, late=late)


def _taken_farther(
    deployment: Deployment, subject: Subject, points: Tensor, rows: Tensor, labels: Tensor, holds: np.ndarray
) -> tuple[Tensor, np.ndarray]:
    """The points, each that does not hold replaced by another if possible, and (point,) which of them now hold.

    The other point lies farther in the same direction, or is found by a short search. If neither holds, the point stays
    as it is.
    """
    images = subject.images[rows.to(subject.images.device)]
    points, holds = points.clone(), holds.copy()
    for reach in _REACHES[1:]:
        left = torch.from_numpy(np.flatnonzero(~holds)).to(points.device)
        if not len(left):
            break
        farther = _farther(subject, points[left], images[left], reach)
        lead = _typical_lead(deployment, subject)
        broken = _is_broken(_alone_scores(deployment, subject, farther), labels[left], lead)
        found = left[torch.from_numpy(broken).to(left.device)]
        points[found] = farther[torch.from_numpy(broken).to(left.device)]
        holds[found.cpu().numpy()] = True
    left = torch.from_numpy(np.flatnonzero(~holds)).to(points.device)
    if len(left):
        with suppress(Exception):  # a model may raise anything: then nothing is found
            made = _searched_alone(deployment, subject, points[left], images[left], labels[left])
            found = left[made.success]
            points[found] = made.images[made.success]
            holds[found.cpu().numpy()] = True
    return points, holds


def _searched_alone(
    deployment: Deployment, subject: Subject, points: Tensor, images: Tensor, labels: Tensor
) -> Attacked:
    """The result of a search by answers alone, one image per batch, that starts in the directions of these points."""
    known = Neighbours(images=images, labels=labels, moves=points - images)
    attack = RaySearch(norm=subject.norm, eps=subject.eps, queries=_SEARCHED, neighbours=known)
    single = deployment.alone().sped_up(images, subject.seed).fresh()
    return attack.run(single, images, labels, seed=subject.seed)


def _farther(subject: Subject, points: Tensor, images: Tensor, reach: float) -> Tensor:
    """The points with moves lengthened by the factor `reach`, projected into the ball."""
    return NORMS[subject.norm].project(images + reach * (points - images), images, subject.eps)


def _broken_when_rounded(
    deployment: Deployment, subject: Subject, points: Tensor, rows: Tensor, labels: Tensor
) -> np.ndarray:
    """(point,) whether it, or one farther in the same direction, is misclassified after rounding to 8 bits.

    Attacks stop as soon as an image is misclassified, so near to the decision boundary that rounding alone can make
    most points right again.
    """
    images = subject.images[rows.to(subject.images.device)]
    broken = np.zeros(len(points), dtype=bool)
    for reach in _REACHES:
        left = torch.from_numpy(np.flatnonzero(~broken)).to(points.device)
        if not len(left):
            break
        here = images[left]
        farther = _farther(subject, points[left], here, reach)
        scores = _scores(
            deployment, subject, round_to_bytes(farther, here, norm=subject.norm, eps=subject.eps)
        )
        broken[left.cpu().numpy()] = _is_broken(scores, labels[left], _typical_lead(deployment, subject))
    return broken


def compare_ends(deployment: Deployment, subject: Subject, rows: Tensor) -> Late | None:
    """How the model must be asked otherwise, by short attacks on images that no attack has broken; None if as before.

    A model that remembers queries may give the right class where an attack ends and nowhere else, and so may one whose
    batch decides. No point breaks an image then, and none comes to `confirm`. So the classes where an attack ends are
    compared with those of a fresh copy. Then some images are attacked as they are judged, each alone and by queries to
    fresh copies: what breaks only so was hidden by memory or by the batch.

    Args:
        deployment, subject: as in `confirm`.
        rows: (image,) positions of the images that no attack has broken; the first are used.
    """
    if not len(rows):
        return None
    here = rows[:_LONELY].to(subject.images.device)
    images, labels = subject.images[here], subject.labels[here]
    with without_tf32():
        late = None
        if not deployment.trouble and not subject.is_random:
            late = _hidden_at_ends(deployment, subject, images[:PROBED], labels[:PROBED])
        return late or _attack_as_judged(deployment, subject, images, labels)


def _hidden_at_ends(deployment: Deployment, subject: Subject, images: Tensor, labels: Tensor) -> Late | None:
    """Whether a fresh copy is random, or wrong, at points where the attacked object is right."""
    made = _walk(subject, "last").run(subject.model, images, labels, seed=subject.seed)
    if is_random_at(deployment, made.images, subject.seed):
        return "random"
    if deployment.forgets and not deployment.in_buffers:
        return None
    hidden = ~made.success & (score_margin(_scores(deployment, subject, made.images).double(), labels) < 0)
    return "stateful" if exceeds(int(hidden.sum()), len(hidden), TOLERANCE) else None


def _attack_as_judged(
    deployment: Deployment, subject: Subject, images: Tensor, labels: Tensor
) -> Late | None:
    """What hid breakable images from the attacks, if a short attack on single images and fresh copies breaks them.

    The same attack as all others, in a full batch and on the object that they used, must break few of them: otherwise
    these were only too short.
    """
    alone = dataclasses.replace(deployment.alone(), is_vectorised=False)
    judged = alone if alone.trouble else dataclasses.replace(alone, forgets=True, in_buffers=False)
    may_depend = deployment.company is None
    may_remember = not deployment.trouble and not (deployment.forgets and not deployment.in_buffers)
    if not (may_depend or may_remember) or not _breaks(judged.fresh(), subject, images, labels):
        return None
    most = at_once(_FULL)
    many, theirs = (torch.cat(parts)[:most] for parts in ((images, subject.images), (labels, subject.labels)))
    if _breaks(subject.model, subject, many, theirs, count=len(images)):
        return None
    forgetting = dataclasses.replace(deployment, forgets=True, in_buffers=False, is_vectorised=False)
    if may_remember and _breaks(forgetting.fresh(), subject, many, theirs, count=len(images)):
        return "stateful"
    return "batch_dependent" if may_depend else None


def _breaks(
    model: nn.Module, subject: Subject, images: Tensor, labels: Tensor, *, count: int | None = None
) -> bool:
    """Whether a short attack breaks significantly many of the first `count` images; None counts all."""
    n, seed = len(images) if count is None else min(count, len(images)), subject.seed
    made = _walk(subject, "best").run(model, images, labels, seed=seed)
    if not subject.is_random:
        return exceeds(int(made.success[:n].sum()), n, TOLERANCE)
    passes = [_scores_of(model, subject, made.images, seed=seed + number) for number in range(_PASSES)]
    right = torch.stack([predicted_classes(scores) == labels for scores in passes]).double().mean(dim=0)
    return exceeds(int((right[:n] < _SELDOM).sum()), n, TOLERANCE)


def _walk(subject: Subject, keep: Literal["best", "last"]) -> PGD:
    step = _REACH * subject.eps / _STEPS
    return PGD(norm=subject.norm, eps=subject.eps, steps=_STEPS, step_size=step, keep=keep)


def compare_means(deployment: Deployment, subject: Subject) -> Late | None:
    """How a random model must be asked otherwise, by its mean scores of clean images and random points near them."""
    if deployment.trouble or deployment.company is not None:
        return None
    images = subject.images[:PROBED]
    noisy = noisy_points(subject, images, 5)
    few = torch.cat([images[:_COMPARED], noisy[:_COMPARED]])
    many = torch.cat([few, images[_COMPARED:], noisy[_COMPARED:]])

    def passes(ask: Callable[[int], Tensor], first: int) -> Tensor:
        return torch.stack([ask(subject.seed + first + number) for number in range(_PASSES)])

    with without_tf32():
        together = passes(lambda seed: _scores(deployment, subject, many, seed)[: len(few)], 0)
        alone = passes(lambda seed: _alone_scores(deployment, subject, few, seed), _PASSES)
    differ = means_differ(together, alone)
    return "batch_dependent" if exceeds(int(differ.sum()), len(differ), TOLERANCE) else None


def means_differ(one: Tensor, other: Tensor) -> Tensor:
    """(image,) whether the means over passes of two sets of scores differ significantly, and by more than a little.

    Where scores are not finite, the predicted classes take their place.

    Args:
        one, other: (pass, image, class).
    """
    if not (one.isfinite().all() and other.isfinite().all()):
        one, other = (
            F.one_hot(predicted_classes(part.flatten(0, 1)) + 1, part.shape[2] + 1).reshape(
                *part.shape[:2], -1
            )
            for part in (one, other)
        )
    one, other = one.double(), other.double()
    apart = (one.mean(dim=0) - other.mean(dim=0)).abs()
    error = (one.var(dim=0) / len(one) + other.var(dim=0) / len(other)).sqrt()
    is_much = apart > LITTLE * spread_of(one.mean(dim=0))[:, None]
    return (is_much & (apart > _SIGNIFICANT * error)).any(dim=1).cpu()


def _what_came_late(
    deployment: Deployment,
    subject: Subject,
    points: Tensor,
    holds: np.ndarray,
    full: np.ndarray,
) -> Late | None:
    """How the model must be asked otherwise, by `points` that attacks found; None if as before."""
    images = subject.images[:PROBED]
    asked = images, noisy_points(subject, images, 3)
    if what_decides(deployment, asked, subject.seed) is not None:
        return "outside"
    if deployment.trouble:
        return None
    if is_random_at(deployment, points, subject.seed):
        return "random"
    if not deployment.forgets or deployment.in_buffers:
        for some in asked:
            used, fresh = (_scores_of(model, subject, some) for model in (subject.model, deployment.fresh()))
            if exceeds(int(find_different(used, fresh).sum()), len(some), TOLERANCE):
                return "stateful"
        if exceeds(int((~holds & ~full).sum()), len(holds), TOLERANCE):
            return "stateful"
    if deployment.company is None and exceeds(int((holds != full).sum()), len(holds), TOLERANCE):
        return "batch_dependent"
    return None


def _typical_lead(deployment: Deployment, subject: Subject) -> float:
    """`typical_lead` of clean images, by which margins of points at the border are measured."""

    def ask() -> float:
        return typical_lead(_scores(deployment, subject, subject.images[:PROBED]))

    return float(once(subject, "typical lead", ask))


def _is_broken(scores: Tensor, labels: Tensor, lead: float) -> np.ndarray:
    """(image,) whether it is misclassified, or its margin is a tie."""
    margins = score_margin(scores.double(), labels.to(scores.device))
    tie = margins <= _TIE * spread_of(scores.double(), lead)
    return ((predicted_classes(scores) != labels.to(scores.device)) | tie).cpu().numpy()


def _scores_of(model: nn.Module, subject: Subject, points: Tensor, seed: int | None = None) -> Tensor:
    with undisturbed(model), forked_generators(points.device, subject.seed if seed is None else seed):
        return torch.cat([read_model(model, part) for part in torch.split(points, at_once(_FULL))])


def _scores(deployment: Deployment, subject: Subject, points: Tensor, seed: int | None = None) -> Tensor:
    return _scores_of(deployment.fresh(), subject, points, seed)


def _alone_scores(
    deployment: Deployment, subject: Subject, points: Tensor, seed: int | None = None
) -> Tensor:
    """(point, class) scores, each point in a batch of its own, beside the deployment's clean images if it has any."""
    try:
        lonely = dataclasses.replace(deployment.alone(), is_vectorised=False)
        return _scores(lonely, subject, points, seed)
    except Exception:  # a batch of one of these points may fail: ask in full batches
        return _scores(deployment, subject, points, seed)
