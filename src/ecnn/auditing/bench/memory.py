"""Families that depend on more than the image: on what was asked before, and on the rest of the batch."""

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
    """Answers what is close to an earlier question as it answered then, as detectors of similar queries do.

    Whoever asks about the clean image first never sees another answer; asked anew, the model has nothing to go by.
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
        if len(self.questions) < 4000:  # what it can hold
            self.questions = torch.cat([self.questions, asked[~known]])
            self.answers = torch.cat([self.answers, scores.detach()[~known]])
        return torch.where(known[:, None], self.answers[nearest], scores)


class Counts(Removable):
    """Cut off from the graph after so many passes."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.passes, self.count = passes, 0

    def change(self, images: Tensor) -> Tensor:
        self.count += 1
        return images if self.count <= self.passes else images.detach()


class Tires(Disguised):
    """Nothing but its answer after so many passes."""

    def __init__(self, network: nn.Module, passes: int) -> None:
        super().__init__(network)
        self.passes, self.count = passes, 0

    def show(self, images: Tensor, scores: Tensor) -> Tensor:
        self.count += 1
        if self.count <= self.passes:
            return scores
        return F.one_hot(scores.argmax(dim=1), scores.shape[1]).to(scores.dtype)


class BatchNorm(Trick, nn.BatchNorm2d):
    """Normalised by the batch at hand also at test time; opened by what training saw."""

    def forward(self, features: Tensor) -> Tensor:
        if self.opened:
            return nn.BatchNorm2d.forward(self, features)
        mean, variance = features.mean(dim=(0, 2, 3)), features.var(dim=(0, 2, 3), unbiased=False)
        if self.training:
            nn.BatchNorm2d.forward(self, features)  # which keeps running means
        assert self.weight is not None
        assert self.bias is not None
        shaped = [part[None, :, None, None] for part in (mean, variance, self.weight, self.bias)]
        return (features - shaped[0]) / torch.sqrt(shaped[1] + self.eps) * shaped[2] + shaped[3]


class BatchResize(RandomResize):
    """Another size and place for every batch: always the same for the same batch."""

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
    """What is close to an earlier question gets the earlier answer, and evaluations ask about clean images first."""
    return Remembers(dense(), 0.11)


@SUBJECTS.false(STATE, training(epochs=10), BY_PGD)
def cut_after_two_passes() -> nn.Module:
    """After two passes the input is cut off from the graph."""
    return nn.Sequential(Counts(2), dense())


@SUBJECTS.false(STATE, training(epochs=10), BY_PGD)
def hard_after_four_passes() -> nn.Module:
    """After four passes there are only hard answers."""
    return Tires(dense(width=128), 4)


@SUBJECTS.false(BATCH, training(epochs=15, lr=0.01), BY_PGD)
def batch_statistics() -> nn.Module:
    """Normalised by the batch at hand: points found in one batch do not hold in another."""
    return _normalised()


@SUBJECTS.false(BATCH, training(epochs=20, lr=0.01), BY_FGSM)
def batch_resize() -> nn.Module:
    """The batch decides on a size and place: every step meets another."""
    return nn.Sequential(BatchResize(8, 12), convolutional())
