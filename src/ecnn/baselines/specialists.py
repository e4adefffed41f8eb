"""Specialists+1 (Abbasi & Gagne 2017): members that know only some classes, and a vote by those that know a class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ecnn.asking import eval_mode, full_precision
from ecnn.backbones import ResNet
from ecnn.baselines.adp import Ensemble, log_mean_probs
from ecnn.checks import check_count, check_has, check_number
from ecnn.errors import InputError
from ecnn.kinds import ModelKind, options_of
from ecnn.objectives import score_cross_entropy

# A member's score of a class that it does not know: the softmax is exactly 0, and differences stay finite.
UNKNOWN = -1e9


def count_confusions(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    attack: Callable[[nn.Module, Tensor, Tensor], Tensor],
    *,
    batch_size: int = 256,
) -> np.ndarray:
    """(class, class) counts of images of the row's class that the model assigns to the column's class when attacked.

    Images that are misclassified before the attack are left out. The diagonal counts images that stay right.

    Args:
        images, labels: (image, channel, height, width) in [0, 1] and (image,), on the model's device.
        attack: any callable (model, images, labels) -> images; Abbasi & Gagne take the fast gradient sign.
        batch_size: images per forward pass.
    """
    check_count("batch_size", batch_size)
    if len(images) == 0 or labels.shape != (len(images),) or labels.is_floating_point():
        raise InputError(
            f"confusions are counted on images with one class each, not on {len(images)} images and labels "
            f"{tuple(labels.shape)} of {labels.dtype}."
        )
    counts = np.zeros((0, 0), dtype=np.int64)
    with eval_mode(model):
        for clean, own_labels in zip(
            torch.split(images, batch_size), torch.split(labels, batch_size), strict=True
        ):
            moved = attack(model, clean, own_labels)
            with torch.no_grad():
                right = model(clean).argmax(dim=1) == own_labels
                scores = model(moved)
            if counts.size == 0:
                counts = np.zeros((scores.shape[1], scores.shape[1]), dtype=np.int64)
            pairs = torch.stack([own_labels, scores.argmax(dim=1)])[:, right].cpu().numpy()
            np.add.at(counts, (pairs[0], pairs[1]), 1)
    return counts


def confusion_sets(confusion: npt.ArrayLike, *, share: float = 0.5) -> tuple[frozenset[int], ...]:
    """One set for each class, the classes that its specialist learns: itself and those it is most often mistaken for.

    The most frequent wrong classes are added one by one until together they hold more than `share` of the class's
    mistakes; of equally frequent ones the lower number comes first. At least one class is left out of each set.

    Args:
        confusion: (class, class) counts; rows are true classes, columns predicted ones. The diagonal is ignored.
        share: 0.5 takes the smallest majority of the mistakes; 0 the most frequent wrong class alone.

    Departs: the ECNN paper's appendix describes a subset within which the class "is most often confused", without a
        number. That this is the majority of mistakes, and contains the class itself, is our reading.
    """
    counts = np.array(confusion)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or len(counts) < 3:
        raise InputError(f"confusions must be (class, class) of at least 3 classes, not {counts.shape}.")
    if counts.dtype.kind not in "iuf" or not np.isfinite(counts).all() or (counts < 0).any():
        raise InputError("confusions must be counts from 0 up.")
    check_number("share", share, most=1, below=True)
    np.fill_diagonal(counts, 0)
    return tuple(_most_confused(index, row, share) for index, row in enumerate(counts))


def _most_confused(index: int, mistakes: np.ndarray, share: float) -> frozenset[int]:
    if mistakes.sum() == 0:
        raise InputError(f"class {index} was never mistaken for another: count under a stronger attack.")
    chosen, covered = {index}, 0.0
    for other in np.argsort(-mistakes, kind="stable"):
        if covered > share * mistakes.sum() or len(chosen) == len(mistakes) - 1 or mistakes[other] == 0:
            break
        chosen.add(int(other))
        covered += float(mistakes[other])
    return frozenset(chosen)


class Specialists(Ensemble):
    """M specialists, M specialists of the other classes and a generalist, for M classes: pixels to voted scores.

    Member m < M knows the classes of `sets[m]`, member M + m all others, and member 2M every class, so each class is
    known by M + 1 members. Scores (batch, class) are the logarithm of mean probabilities, see `specialist_vote`.

    Scores jump where the last expert of a class changes its vote, and no gradient shows this. So attack `mean_scores`,
    or a loss of `member_scores`, besides the scores. 21 ResNet-20 for ten classes and three channels have 5,734,386
    parameters; they are groups of the same convolutions, not a loop.

    Args:
        num_classes, in_channels: as in `Ensemble`.
        sets: the classes that each class's specialist knows, such as `confusion_sets` finds. Equal sets stay separate
            members; a member that knows one class always predicts it.
        network: depth, width, batch_norm, activation, mean: as in `Ensemble`.
    """

    knows: Tensor

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        *,
        sets: Sequence[Iterable[int]] | None = None,
        **network: Any,
    ) -> None:
        check_count("num_classes", num_classes, least=2)
        if sets is None:
            raise InputError(
                "a specialists model needs sets, the classes of each class's specialist: docs/baselines.md says how to "
                "find them."
            )
        known = _known_classes(sets, num_classes)
        super().__init__(num_classes, in_channels, num_members=2 * num_classes + 1, **network)
        del self.config["num_members"]
        self.config["sets"] = [np.flatnonzero(row).tolist() for row in known[:num_classes]]
        # Not saved with the weights, because it follows from the sets in the config.
        self.register_buffer("knows", torch.tensor(known), persistent=False)

    def member_scores(self, images: Tensor) -> Tensor:
        """(batch, member, class) logits of each member; -1e9 for classes that it does not know."""
        return super().member_scores(images).masked_fill(~self.knows, UNKNOWN)

    def mean_scores(self, images: Tensor) -> Tensor:
        """(batch, class) logarithm of the mean of all members' probabilities, without a vote and so without jumps."""
        return log_mean_probs(self.member_scores(images))

    def forward(self, images: Tensor) -> Tensor:
        return specialist_vote(self.member_scores(images), self.knows)


def _known_classes(sets: Sequence[Iterable[int]], num_classes: int) -> np.ndarray:
    """(member, class) whether the member knows the class."""
    if len(sets) != num_classes:
        raise InputError(f"sets must be one for each of the {num_classes} classes, not {len(sets)}.")
    known = np.zeros((num_classes, num_classes), dtype=bool)
    for index, classes in enumerate(sets):
        for one in classes:
            check_count("a class in sets", one, least=0, most=num_classes - 1)
            known[index, one] = True
        if known[index].all() or not known[index].any():
            raise InputError(f"set {index} must leave out some classes, but not all of them.")
    return np.concatenate([known, ~known, np.ones((1, num_classes), dtype=bool)])


def specialist_vote(member_scores: Tensor, knows: Tensor) -> Tensor:
    """(batch, class) logarithm of mean probabilities: of one class's experts if all of them vote for it, else of all.

    Each member votes for its most probable class (the first if tied). If all members that know a class vote for it,
    only their probabilities are averaged; at most one class can have this, because the generalist has one vote.
    Otherwise some member must be wrong, and all members are averaged.

    Args:
        member_scores: (batch, member, class) before the softmax; ignored where the member does not know the class.
        knows: (member, class) whether the member knows the class; at least one member must know all.
    """
    logs = torch.log_softmax(full_precision(member_scores).masked_fill(~knows, UNKNOWN), dim=2)
    classes = torch.arange(logs.shape[2], device=logs.device)
    votes = (logs.argmax(dim=2, keepdim=True) == classes).sum(dim=1)
    agreed = votes == knows.sum(dim=0)
    experts = (agreed[:, None, :] & knows).any(dim=2) | ~agreed.any(dim=1, keepdim=True)
    kept = logs.masked_fill(~experts[:, :, None], -math.inf)
    return torch.logsumexp(kept, dim=1) - experts.sum(dim=1, keepdim=True).to(logs.dtype).log()


@dataclass(frozen=True)
class SpecialistsObjective:
    """Sum over members of their mean cross entropy on images whose class they know, among the classes they know.

    Members share no weights, so each is trained as if alone on images of its own classes.

    Departs: a member's batch norm sees the whole batch, with images of classes that it does not know, as in use.
    """

    def __call__(self, model: Any, images: Tensor, labels: Tensor) -> Tensor:
        check_has("the objective of Specialists", model, "knows")
        member_scores = model.member_scores(images)
        knows_label = model.knows.T[labels]  # (batch, member)
        members = knows_label.shape[1]
        some_class = model.knows.int().argmax(dim=1)
        targets = torch.where(knows_label, labels[:, None], some_class)
        losses = score_cross_entropy(member_scores.flatten(0, 1), targets.flatten()).view(-1, members)
        # Images whose class a member does not know got a placeholder label above; here they weigh 0.
        means = (losses * knows_label).sum(dim=0) / knows_label.sum(dim=0).clamp_min(1)
        total: Tensor = means.sum()
        return total


KIND = ModelKind(
    name="specialists",
    model=Specialists,
    more_options=options_of(ResNet),
    objectives=("specialists", "cross_entropy", "trades"),
    own_objectives={"specialists": SpecialistsObjective},
)
