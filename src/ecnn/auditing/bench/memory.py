"""Families whose answers depend on more than the image: on earlier queries, or on the rest of the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.auditing.bench.chance import RandomResize
from ecnn.auditing.bench.claims import BY_FGSM, BY_PGD, Subjects
from ecnn.auditing.bench.networks import convolutional, dense, training
from ecnn.auditing.bench.tricks import Disguised, Removable, Trick

STATE, BATCH = "state", "the rest of the batch"


class Remembers(Disguised):
    """Gives an image close to an earlier query the answer of that query, as detectors of similar queries do.

    Once the clean image was queried, all points near it get its answer. A fresh copy of the model has no memory and
    classifies each point by itself.
    """

    def __init__(self, network: nn.Module, radius: float) -> None:
        super().__init__(network)
        self.radius = radius
        self.questions: Tensor | None = None
        self.answers: Tensor | None = None

    def show(self, images: Tensor, scores: Tensor) -> Tensor:
        asked = images.detach().flatten(1)
        if self.questions is None or self.answers is None:
            self.questions, self.answers = asked.clone(), scores.detach().clone()
            return scores
        apart = torch.cdist(asked, self.questions, p=float("inf"))
        distance, nearest = apart.min(dim=1)
        known = distance <= self.radius
        if len(self.questions) < 4000:  # capacity of the memory
            self.questions = torch.cat([self.questions, asked[~known]])
            self.answers = torch.cat([self.answers, scores.detach()[~known]])
        return torch.where(known[:, None], self.answers[nearest], scores)


class Counts(Removable):
    """Cuts images off from the graph after the first `passes` passes."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.passes, self.count = passes, 0

    def change(self, images: Tensor) -> Tensor:
        self.count += 1
        return images if self.count <= self.passes else images.detach()


class Tires(Disguised):
    """One-hot answers in place of scores after the first `passes` passes."""

    def __init__(self, network: nn.Module, passes: int) -> None:
        super().__init__(network)
        self.passes, self.count = passes, 0

    def show(self, images: Tensor, scores: Tensor) -> Tensor:
        self.count += 1
        if self.count <= self.passes:
            return scores
        return F.one_hot(scores.argmax(dim=1), scores.shape[1]).to(scores.dtype)


class BatchNorm(Trick, nn.BatchNorm2d):
    """Batch norm by the statistics of the current batch, also at test time; when opened by the running statistics."""

    def forward(self, features: Tensor) -> Tensor:
        if self.opened:
            return nn.BatchNorm2d.forward(self, features)
        mean, variance = features.mean(dim=(0, 2, 3)), features.var(dim=(0, 2, 3), unbiased=False)
        if self.training:
            nn.BatchNorm2d.forward(self, features)  # updates the running statistics
        assert self.weight is not None
        assert self.bias is not None
        shaped = [part[None, :, None, None] for part in (mean, variance, self.weight, self.bias)]
        return (features - shaped[0]) / torch.sqrt(shaped[1] + self.eps) * shaped[2] + shaped[3]


class BatchResize(RandomResize):
    """`RandomResize` with a seed computed from the batch: equal batches get the same size and place."""

    is_asked_alone = True

    def generator(self, images: Tensor) -> torch.Generator:
        seed = int(images.detach().double().sum().mul(1e6).round()) % 2**31
        return torch.Generator().manual_seed(seed)


def _normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        BatchNorm(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        BatchNorm(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


SUBJECTS = Subjects()


@SUBJECTS.false(STATE, training(epochs=10), BY_PGD)
def remembers_questions() -> nn.Module:
    """An image close to an earlier query gets the earlier answer, and evaluations query clean images first."""
    return Remembers(dense(), 0.11)


@SUBJECTS.false(STATE, training(epochs=10), BY_PGD)
def cut_after_two_passes() -> nn.Module:
    """After two passes the input is cut off from the graph."""
    return nn.Sequential(Counts(2), dense())


@SUBJECTS.false(STATE, training(epochs=10), BY_PGD)
def hard_after_four_passes() -> nn.Module:
    """After four passes the model returns only one-hot answers."""
    return Tires(dense(width=128), 4)


@SUBJECTS.false(BATCH, training(epochs=15, lr=0.01), BY_PGD)
def batch_statistics() -> nn.Module:
    """Features are normalised by the batch at hand: points found in one batch fail in another."""
    return _normalised()


@SUBJECTS.false(BATCH, training(epochs=20, lr=0.01), BY_FGSM)
def batch_resize() -> nn.Module:
    """Size and place of the image depend on the batch, so they differ at every step of an attack."""
    return nn.Sequential(BatchResize(8, 12), convolutional())
