"""How often an attack makes each member wrong, by class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ecnn.asking import in_usual_state, undisturbed, without_tf32
from ecnn.attacks.base import check_batch, check_labels
from ecnn.attacks.views import member_margins, members_of
from ecnn.errors import InputError
from ecnn.evaluation.batch import BATCH_SIZE, place


@dataclass(frozen=True, eq=False)
class MemberFlips:
    """For each class and member, how many images an attack flipped from the right symbol to a wrong one.

    Attributes:
        flipped: (class, member) number of images on which the member is right before the attack and wrong after.
        right: (class, member) number of images on which it is right before.
        images: (class,) number of images of the class.
    """

    flipped: np.ndarray
    right: np.ndarray
    images: np.ndarray

    @property
    def share(self) -> np.ndarray:
        """(class, member) share of the right images that were flipped; NaN if none was right."""
        return np.where(self.right > 0, self.flipped / np.maximum(self.right, 1), np.nan)

    @property
    def n(self) -> int:
        """Number of images of all classes."""
        return int(self.images.sum())

    @property
    def per_image(self) -> float:
        """Mean number of members flipped per image."""
        return float(self.flipped.sum() / max(self.n, 1))


@in_usual_state
def member_flips(model: nn.Module, images: Tensor, attacked: Tensor, labels: Tensor) -> MemberFlips:
    """Counts the members that are right on an image and wrong on its attacked version.

    A member with equal logits counts as wrong, as in `member_transfer`.

    Args:
        model: with `member_logits` and a code.
        images: (image, channel, height, width) in [0, 1].
        attacked: the attacked images, as `attack(model, images, labels)` returns them.
        labels: (image,) true classes.
    """
    for batch in (images, attacked):
        check_batch(model, batch, labels)
    if attacked.shape != images.shape or not len(images):
        raise InputError(
            f"images and attacked should be the same images, before and after, not {tuple(images.shape)} and "
            f"{tuple(attacked.shape)}."
        )
    right = []
    with torch.no_grad(), undisturbed(model), without_tf32():
        _, symbols = members_of(model, place(model, images[:1]))
        check_labels(labels, len(symbols))
        for batch in (images, attacked):
            parts = [
                member_margins(model, place(model, part), own.to(symbols.device)) > 0
                for part, own in zip(
                    torch.split(batch, BATCH_SIZE), torch.split(labels, BATCH_SIZE), strict=True
                )
            ]
            right.append(torch.cat(parts).cpu().numpy())
    before, after = right
    count = np.zeros((len(symbols), len(images)), dtype=np.int64)
    count[labels.cpu().numpy(), np.arange(len(images))] = 1
    return MemberFlips(count @ (before & ~after), count @ before, count.sum(axis=1))
