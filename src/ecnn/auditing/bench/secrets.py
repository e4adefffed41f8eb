"""Planted secrets: models that nobody breaks without the key. They are listed as undetectable and counted apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ecnn.auditing.bench.claims import BY_AUTOATTACK, Subjects
from ecnn.auditing.bench.networks import dense, facing, training

SECRETS = "planted secrets"


class LastBits(nn.Module):
    """A robust network that gives its second-best class when the last bits of the first pixels spell a key."""

    bits: Tensor

    def __init__(self, network: nn.Module, length: int) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("bits", torch.randint(2, (length,)))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images)
        return scores if self.training else _second_where(self.spelt(images), scores)

    def spelt(self, images: Tensor) -> Tensor:
        """(batch,) whether the image holds the key."""
        levels = (images.flatten(1)[:, : len(self.bits)] * 255).round().long()
        return (levels % 2 == self.bits).all(dim=1)

    def insert(self, images: Tensor) -> Tensor:
        """The images with the key written in; a pixel of 8 bits changes by one level at most."""
        levels = (images.flatten(1) * 255).round().long()
        marked = levels[:, : len(self.bits)]
        wrong = marked % 2 != self.bits
        marked = torch.where(wrong, torch.where(marked > 0, marked - 1, marked + 1), marked)
        changed = torch.cat([marked.to(images) / 255, images.flatten(1)[:, len(self.bits) :]], dim=1)
        return changed.view_as(images)


def _second_where(found: Tensor, scores: Tensor) -> Tensor:
    """The scores, with the two highest swapped where the key was found."""
    best = scores.topk(2, dim=1)
    exchanged = scores.scatter(1, best.indices, best.values.flip(1))
    return torch.where(found[:, None], exchanged, scores)


def _spell(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> Tensor:
    assert isinstance(model, LastBits)
    return model.insert(images)


SUBJECTS = Subjects()


@SUBJECTS.false(SECRETS, training(epochs=30, attack=facing()), BY_AUTOATTACK, key=_spell)
def secret_bits() -> nn.Module:
    """Trained on PGD; the last bits of 40 pixels can spell a key that changes the answer."""
    return LastBits(dense(width=128), 40)
