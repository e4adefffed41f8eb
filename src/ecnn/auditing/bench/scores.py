"""Families whose returned scores are not those that decide: saturated, bent, hard, or another network's."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.auditing.bench.claims import BY_PGD, Subjects
from ecnn.auditing.bench.networks import Committee, convolutional, dense, distilling, each, training
from ecnn.auditing.bench.tricks import Disguised, Removable, Trick, with_fields
from ecnn.objectives import score_cross_entropy

SATURATED, BENT = "saturated scores", "calibrated and clipped scores"
HARD, BESIDE, NUMBERS = "hard answers", "scores beside the decision", "no numbers"

SUBJECTS = Subjects()


@with_fields
class Scaled(Removable):
    """Scores multiplied by a factor; unchanged when opened or in training."""

    factor: float

    def change(self, scores: Tensor) -> Tensor:
        return self.factor * scores


@SUBJECTS.false(SATURATED, training(epochs=15, lr=0.01), BY_PGD)
def scaled_logits() -> nn.Module:
    """Scores times 10,000: the gradient of cross-entropy is exactly zero."""
    return nn.Sequential(convolutional(), Scaled(1e4))


@SUBJECTS.false(SATURATED, training(epochs=15, lr=0.01), BY_PGD)
def tiny_scores() -> nn.Module:
    """Scores times 1e-43: their order stays, their gradients underflow."""
    return nn.Sequential(convolutional(), Scaled(1e-43))


@with_fields
class Probabilities(Removable):
    """The softmax of the scores times `sharpness`, in place of the scores."""

    sharpness: float

    def change(self, scores: Tensor) -> Tensor:
        return torch.softmax(self.sharpness * scores, dim=1)


@SUBJECTS.false(SATURATED, training(epochs=15, lr=0.01), BY_PGD)
def probabilities() -> nn.Module:
    """A second softmax on saturated probabilities has no gradient."""
    return nn.Sequential(convolutional(), Probabilities(200))


@SUBJECTS.false(SATURATED, distilling(100, epochs=15), BY_PGD)
def distilled() -> nn.Module:
    """Defensive distillation at temperature 100: cross-entropy saturates."""
    return dense()


@SUBJECTS.false(BENT, training(epochs=20), BY_PGD, after=dense)
@with_fields
class ClippedMargin(Removable):
    """Scores are cut off at one below the highest: no gradient where the network is sure.

    All scores further below are equal.
    """

    most: float = 1.0

    def change(self, scores: Tensor) -> Tensor:
        return (scores - scores.amax(dim=1, keepdim=True)).clamp(min=-self.most)


@SUBJECTS.false(BENT, training(epochs=15, lr=0.01), BY_PGD, after=convolutional)
@with_fields
class BinnedConfidence(Removable):
    """Confidence calibrated by bins: scores are piecewise constant.

    The top probability becomes the middle of its bin, the others share the rest (Zadrozny & Elkan 2001).
    """

    bins: int = 10

    def change(self, scores: Tensor) -> Tensor:
        top, answers = torch.softmax(scores, dim=1).max(dim=1, keepdim=True)
        calibrated = ((top * self.bins).floor() + 0.5) / self.bins
        rest = (1 - calibrated) / (scores.shape[1] - 1)
        binned = rest.expand_as(scores).scatter(1, answers, calibrated.clamp(min=0.15))
        return torch.log(binned.clamp(min=1e-4))


@SUBJECTS.false(HARD, training(epochs=10), BY_PGD, after=dense)
class OneHotAnswer(Removable):
    """The model gives its answer and no scores.

    One for the answer and zero for all other classes.
    """

    def change(self, scores: Tensor) -> Tensor:
        return F.one_hot(scores.argmax(dim=1), scores.shape[1]).to(scores.dtype)


class HardVotes(Committee, Trick):
    """(batch, class) share of the networks that answer each class."""

    def forward(self, images: Tensor) -> Tensor:
        scores = self.all_scores(images)
        if self.is_open:
            return torch.log_softmax(scores, dim=2).mean(dim=0)
        return F.one_hot(scores.argmax(dim=2), scores.shape[2]).to(scores.dtype).mean(dim=0)


@SUBJECTS.false(HARD, each(**{f"networks.{number}": training(epochs=10) for number in range(5)}), BY_PGD)
def hard_votes() -> nn.Module:
    """Five networks vote, and only votes are counted."""
    return HardVotes(*(dense(width=48) for _ in range(5)))


def rotated_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with each label replaced by the next class, for scores that mislead attacks on the label."""
    return score_cross_entropy(model(images), (labels + 1) % 10).mean()


@with_fields
class Beside(Disguised):
    """`lead` for the answer of one network, plus smooth scores of another, below half of `lead`, that never decide."""

    other: nn.Module
    lead: float

    def show(self, images: Tensor, scores: Tensor) -> Tensor:
        answers = F.one_hot(scores.argmax(dim=1), scores.shape[1]).to(scores.dtype)
        return self.lead * answers + self.lead / 2.1 * torch.tanh(self.other(images) / 8)


@SUBJECTS.false(
    BESIDE, each(network=training(epochs=10), other=training(rotated_loss, epochs=10, lr=0.01)), BY_PGD
)
def answer_over_other_scores() -> nn.Module:
    """Scores are 12 for the answer of one network, plus smooth scores of another that learnt other labels."""
    return Beside(dense(), convolutional(), 12.0)


@SUBJECTS.false(BESIDE, each(network=training(epochs=15, lr=0.01)), BY_PGD)
def answer_over_random_scores() -> nn.Module:
    """Scores are 12 for the answer of a convolutional network, plus smooth scores of an untrained one."""
    return Beside(convolutional(), dense(width=128), 12.0)


@with_fields
class Swapped(Disguised):
    """The scores of another network, its highest one swapped with the score of the first network's answer."""

    other: nn.Module

    def show(self, images: Tensor, scores: Tensor) -> Tensor:
        shown: Tensor = self.other(images)
        answers, top = scores.argmax(dim=1, keepdim=True), shown.argmax(dim=1, keepdim=True)
        return shown.scatter(1, top, shown.gather(1, answers)).scatter(1, answers, shown.gather(1, top))


@SUBJECTS.false(BESIDE, each(network=training(epochs=12), other=training(rotated_loss, epochs=2)), BY_PGD)
def swapped_scores() -> nn.Module:
    """Scores of another, barely trained network, whose highest score is moved to the class of the answer."""
    return Swapped(dense(), dense(width=32))


@SUBJECTS.false(NUMBERS, training(epochs=15, lr=0.01), BY_PGD, after=convolutional)
@with_fields
class InfiniteScores(Removable):
    """Classes outside nine tenths of the probability get minus infinity: losses are zero or NaN.

    The others get their log-probabilities.
    """

    mass: float = 0.9

    def change(self, scores: Tensor) -> Tensor:
        ordered, order = torch.softmax(scores, dim=1).sort(dim=1, descending=True)
        before = ordered.cumsum(dim=1) - ordered
        outside = torch.zeros_like(scores).scatter(1, order, (before > self.mass).to(scores.dtype))
        return torch.log_softmax(scores, dim=1).masked_fill(outside > 0, -math.inf)


@SUBJECTS.false(NUMBERS, training(epochs=10), BY_PGD, before=dense)
class NoSlope(Removable):
    """Gradients of dark pixels are NaN.

    The forward pass changes nothing; the derivative at dark pixels is 0 times infinity.
    """

    def change(self, images: Tensor) -> Tensor:
        bright = (images > 0.6).to(images.dtype)
        return images + 0 * torch.sqrt(bright * (images - 0.6))


@with_fields
class NoAnswer(Disguised):
    """NaN scores for images whose mean exceeds `brightest`, and scores times 1e-43 for the others."""

    brightest: float

    def show(self, images: Tensor, scores: Tensor) -> Tensor:
        spoiled = (images.flatten(1).mean(dim=1) > self.brightest)[:, None]
        return (1e-43 * scores).masked_fill(spoiled, math.nan)


@SUBJECTS.false(NUMBERS, training(epochs=10), BY_PGD)
def no_answer() -> nn.Module:
    """Bright images get NaN scores, the others tiny ones."""
    return NoAnswer(dense(), 0.38)
