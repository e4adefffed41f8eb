"""Families that show other scores than those that decide: saturated, bent, hard, or another network's."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.auditing.bench.claims import BY_PGD, false
from ecnn.auditing.bench.networks import always, convolutional, dense, distilled, each, training
from ecnn.auditing.bench.tricks import Trick
from ecnn.objectives import score_cross_entropy

SATURATED, BENT = "saturated scores", "calibrated and clipped scores"
HARD, BESIDE, NUMBERS = "hard answers", "scores beside the decision", "no numbers"


class Scaled(Trick):
    """Scores multiplied by a number; opened or in training as they were."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, scores: Tensor) -> Tensor:
        return scores if self.is_open else self.factor * scores


class Probabilities(Trick):
    """The softmax of sharpened scores in their place."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.sharpness = sharpness

    def forward(self, scores: Tensor) -> Tensor:
        return scores if self.is_open else torch.softmax(self.sharpness * scores, dim=1)


class ClippedMargin(Trick):
    """Scores below the highest one, cut off at a distance: what is further away looks all the same."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.most = most

    def forward(self, scores: Tensor) -> Tensor:
        return scores if self.is_open else (scores - scores.amax(dim=1, keepdim=True)).clamp(min=-self.most)


class BinnedConfidence(Trick):
    """Calibration by bins (Zadrozny & Elkan 2001): the top probability becomes its bin's, the others share the rest."""

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bins = bins

    def forward(self, scores: Tensor) -> Tensor:
        if self.is_open:
            return scores
        top, answers = torch.softmax(scores, dim=1).max(dim=1, keepdim=True)
        calibrated = ((top * self.bins).floor() + 0.5) / self.bins
        rest = (1 - calibrated) / (scores.shape[1] - 1)
        binned = rest.expand_as(scores).scatter(1, answers, calibrated.clamp(min=0.15))
        return torch.log(binned.clamp(min=1e-4))


class OneHotAnswer(Trick):
    """One for the answer and zero for all other classes."""

    def forward(self, scores: Tensor) -> Tensor:
        return scores if self.is_open else F.one_hot(scores.argmax(dim=1), scores.shape[1]).to(scores.dtype)


class HardVotes(Trick):
    """How many of the networks give each answer."""

    def __init__(self, *networks: nn.Module) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, images: Tensor) -> Tensor:
        scores = torch.stack([network(images) for network in self.networks])
        if self.is_open:
            return torch.log_softmax(scores, dim=2).mean(dim=0)
        return F.one_hot(scores.argmax(dim=2), scores.shape[2]).to(scores.dtype).mean(dim=0)


class Beside(Trick):
    """The answer of one network far above smooth scores of another, which say nothing about it."""

    def __init__(self, network: nn.Module, other: nn.Module, lead: float) -> None:
        super().__init__()
        self.network, self.other, self.lead = network, other, lead

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images)
        if self.is_open:
            return scores
        answers = F.one_hot(scores.argmax(dim=1), scores.shape[1]).to(scores.dtype)
        return self.lead * answers + self.lead / 2.1 * torch.tanh(self.other(images) / 8)


class Swapped(Trick):
    """The scores of another network, their highest exchanged with that of the answer: they always look calm."""

    def __init__(self, network: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.network, self.other = network, other

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images)
        if self.is_open:
            return scores
        shown: Tensor = self.other(images)
        answers, top = scores.argmax(dim=1, keepdim=True), shown.argmax(dim=1, keepdim=True)
        return shown.scatter(1, top, shown.gather(1, answers)).scatter(1, answers, shown.gather(1, top))


class Nucleus(Trick):
    """Log-probabilities of the classes that make up most of the mass; minus infinity for all others."""

    def __init__(self, mass: float) -> None:
        super().__init__()
        self.mass = mass

    def forward(self, scores: Tensor) -> Tensor:
        if self.is_open:
            return scores
        ordered, order = torch.softmax(scores, dim=1).sort(dim=1, descending=True)
        before = ordered.cumsum(dim=1) - ordered
        outside = torch.zeros_like(scores).scatter(1, order, (before > self.mass).to(scores.dtype))
        return torch.log_softmax(scores, dim=1).masked_fill(outside > 0, -math.inf)


class NoSlope(Trick):
    """The same pixels; the slope of all that are dark is 0 times infinity."""

    def forward(self, images: Tensor) -> Tensor:
        if self.is_open:
            return images
        bright = (images > 0.6).to(images.dtype)
        return images + 0 * torch.sqrt(bright * (images - 0.6))


class NoAnswer(Trick):
    """No numbers for one image in so many, and nothing but a tiny slope for the rest."""

    def __init__(self, network: nn.Module, brightest: float) -> None:
        super().__init__()
        self.network, self.brightest = network, brightest

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images)
        if self.is_open:
            return scores
        spoiled = (images.flatten(1).mean(dim=1) > self.brightest)[:, None]
        return (1e-43 * scores).masked_fill(spoiled, math.nan)


def rotated_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the next class: who lowers the score of a class raises what speaks for the class before."""
    return score_cross_entropy(model(images), (labels + 1) % 10).mean()


SUBJECTS = [
    false(
        SATURATED,
        "scaled_logits",
        "scores times 10,000: the gradient of cross-entropy is exactly zero",
        always(lambda: nn.Sequential(convolutional(), Scaled(1e4))),
        training(epochs=15, lr=0.01),
        BY_PGD,
    ),
    false(
        SATURATED,
        "tiny_scores",
        "scores times 1e-43: their order stays, their gradients underflow",
        always(lambda: nn.Sequential(convolutional(), Scaled(1e-43))),
        training(epochs=15, lr=0.01),
        BY_PGD,
    ),
    false(
        SATURATED,
        "probabilities",
        "a second softmax on saturated probabilities has no gradient",
        always(lambda: nn.Sequential(convolutional(), Probabilities(200))),
        training(epochs=15, lr=0.01),
        BY_PGD,
    ),
    false(
        SATURATED,
        "distilled",
        "defensive distillation at temperature 100: cross-entropy saturates",
        always(dense),
        distilled(100, epochs=15),
        BY_PGD,
    ),
    false(
        BENT,
        "clipped_margin",
        "scores are cut off at one below the highest: no gradient where the network is sure",
        always(lambda: nn.Sequential(dense(), ClippedMargin(1.0))),
        training(epochs=20),
        BY_PGD,
    ),
    false(
        BENT,
        "binned_confidence",
        "confidence calibrated by bins: scores are constant in pieces",
        always(lambda: nn.Sequential(convolutional(), BinnedConfidence(10))),
        training(epochs=15, lr=0.01),
        BY_PGD,
    ),
    false(
        HARD,
        "one_hot_answer",
        "the model gives its answer and no scores",
        always(lambda: nn.Sequential(dense(), OneHotAnswer())),
        training(epochs=10),
        BY_PGD,
    ),
    false(
        HARD,
        "hard_votes",
        "five networks vote, and only votes are counted",
        always(lambda: HardVotes(*(dense(width=48) for _ in range(5)))),
        each(**{f"networks.{number}": training(epochs=10) for number in range(5)}),
        BY_PGD,
    ),
    false(
        BESIDE,
        "answer_over_other_scores",
        "twelve for the answer of one network, plus smooth scores of another that learnt other labels",
        always(lambda: Beside(dense(), convolutional(), 12.0)),
        each(network=training(epochs=10), other=training(rotated_loss, epochs=10, lr=0.01)),
        BY_PGD,
    ),
    false(
        BESIDE,
        "answer_over_random_scores",
        "twelve for the answer of a convolutional network, plus smooth scores of an untrained one",
        always(lambda: Beside(convolutional(), dense(width=128), 12.0)),
        each(network=training(epochs=15, lr=0.01)),
        BY_PGD,
    ),
    false(
        BESIDE,
        "swapped_scores",
        "the calm scores of another network, put in the order that the answer needs",
        always(lambda: Swapped(dense(), dense(width=32))),
        each(network=training(epochs=12), other=training(rotated_loss, epochs=2)),
        BY_PGD,
    ),
    false(
        NUMBERS,
        "infinite_scores",
        "classes outside nine tenths of the mass get minus infinity: losses are zero or no numbers",
        always(lambda: nn.Sequential(convolutional(), Nucleus(0.9))),
        training(epochs=15, lr=0.01),
        BY_PGD,
    ),
    false(
        NUMBERS,
        "no_slope",
        "gradients of dark pixels are no numbers",
        always(lambda: nn.Sequential(NoSlope(), dense())),
        training(epochs=10),
        BY_PGD,
    ),
    false(
        NUMBERS,
        "no_answer",
        "no numbers for bright images, and tiny scores for the others",
        always(lambda: NoAnswer(dense(), 0.38)),
        training(epochs=10),
        BY_PGD,
    ),
]
