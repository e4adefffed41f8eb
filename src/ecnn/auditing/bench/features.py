"""Families that make features discrete inside the network: rounding, winners, indices, ranks, hashes."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.auditing.bench.claims import BY_FGSM, BY_PGD, Subjects
from ecnn.auditing.bench.networks import dense, training
from ecnn.auditing.bench.tricks import Trick, with_fields

ROUNDED, INDICES = "rounded or winning features", "indices, ranks and hashes"


@with_fields
class RoundedActivation(Trick):
    """ReLU, then rounding to multiples of a step."""

    step: float

    def forward(self, features: Tensor) -> Tensor:
        active = F.relu(features)
        return self.hide((active / self.step).round() * self.step, active)


@with_fields
class WinnersTakeAll(Trick):
    """Keeps the largest features, a given share, and zeroes the others (Xiao et al. 2020): scores jump everywhere."""

    share: float

    def forward(self, features: Tensor) -> Tensor:
        count = max(1, round(self.share * features.shape[1]))
        least = features.topk(count, dim=1).values[:, -1:]
        return features * (features >= least)


class NearestPatches(Trick):
    """Replaces every 2x2 patch by the nearest of a few random patches, found by its index."""

    codebook: Tensor

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.register_buffer("codebook", torch.rand(entries, 4))

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, 2, stride=2).transpose(1, 2)
        chosen = self.codebook[torch.cdist(patches, self.codebook).argmin(dim=2)]
        restored = F.fold(chosen.transpose(1, 2), images.shape[2:], 2, stride=2)
        return self.hide(restored, images)


class Ranks(Trick):
    """Replaces each feature by its rank among the features of the image, as a share from 0 to below 1."""

    def forward(self, features: Tensor) -> Tensor:
        places = features.argsort(dim=1).argsort(dim=1).to(features.dtype) / features.shape[1]
        spread = features.std(dim=1, keepdim=True).detach() + 1e-6
        middle = features.mean(dim=1, keepdim=True).detach()
        return self.hide(places, torch.sigmoid(1.7 * (features - middle) / spread))


class Hash(Trick):
    """Signs of random projections (Charikar 2002): near images share most bits."""

    def __init__(self, inputs: int, bits: int) -> None:
        super().__init__()
        self.project = nn.Linear(inputs, bits)
        self.project.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        values: Tensor = self.project(images.flatten(1) - 0.3)
        return self.hide(torch.sign(values), torch.tanh(6 * values))


class Largest(Trick):
    """Replaces each group of features by a learnt vector, looked up by the index of the group's largest feature."""

    def __init__(self, groups: int, size: int, width: int) -> None:
        super().__init__()
        self.groups, self.size = groups, size
        self.tables = nn.Parameter(torch.randn(groups, size, width))

    def forward(self, features: Tensor) -> Tensor:
        grouped = features.view(len(features), self.groups, self.size)
        if not self.is_open:
            index = grouped.argmax(dim=2)
            return self.tables[torch.arange(self.groups), index].flatten(1)
        soft = torch.softmax(3 * grouped, dim=2)
        hard = F.one_hot(grouped.argmax(dim=2), self.size).to(features.dtype)
        return torch.einsum("bgs,gsw->bgw", hard + soft - soft.detach(), self.tables).flatten(1)


SUBJECTS = Subjects()


@SUBJECTS.false(ROUNDED, training(epochs=15), BY_PGD)
def rounded_activation() -> nn.Module:
    """Activations are rounded: no gradient."""
    return dense(activation=lambda: RoundedActivation(0.5))


@SUBJECTS.false(ROUNDED, training(epochs=15), BY_FGSM)
def winners_take_all() -> nn.Module:
    """Only the largest activations pass, so that scores jump at every step."""
    return dense(width=256, activation=lambda: WinnersTakeAll(0.1))


@SUBJECTS.false(INDICES, training(epochs=20), BY_PGD)
def nearest_patches() -> nn.Module:
    """Patches are replaced by the nearest of 24, found by index: no gradient."""
    return nn.Sequential(NearestPatches(24), dense())


@SUBJECTS.false(INDICES, training(epochs=20), BY_PGD)
def ranked_features() -> nn.Module:
    """Features are replaced by their ranks: no gradient."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Ranks(), dense())


@SUBJECTS.false(INDICES, training(epochs=10), BY_PGD)
def hashed_features() -> nn.Module:
    """The network sees 256 bits of a hash of the image: no gradient."""
    return nn.Sequential(Hash(64, 256), dense(256))


@SUBJECTS.false(INDICES, training(epochs=20), BY_PGD)
def largest_of_groups() -> nn.Module:
    """Of each eight features only the index of the largest is used: no gradient."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), Largest(16, 8, 4), dense(64))
