"""Models whose claims may be believed: usual ones, and unusual ones that an audit could wrongly flag."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.auditing.bench.chance import NoisyPasses, TestTimeDropout
from ecnn.auditing.bench.claims import (
    BY_AN_INFORMED_ATTACK,
    Subjects,
    known_exactly,
    proven_by_intervals,
)
from ecnn.auditing.bench.inputs import RoundedPixels
from ecnn.auditing.bench.networks import (
    CERTIFIED_EPS,
    Committee,
    Remembering,
    coded,
    convolutional,
    dense,
    facing,
    first,
    interval_loss,
    resnet,
    seen_through,
    then_remembering,
    training,
    voting,
)
from ecnn.auditing.bench.scores import Probabilities, Scaled
from ecnn.auditing.bench.subject import EPS, Train
from ecnn.auditing.bench.tricks import Trick, with_fields
from ecnn.baselines import ADPObjective, TRADESObjective
from ecnn.data import Dataset
from ecnn.objectives import MemberObjective


class Threshold(Trick):
    """Whether a feature is above zero."""

    def forward(self, features: Tensor) -> Tensor:
        return self.hide((features > 0).to(features.dtype), torch.sigmoid(30 * features))


@with_fields
class Smoothed(NoisyPasses):
    """Log of the mean probabilities over noisy copies (Cohen et al. 2019); when opened the noise is always the same."""

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            noisy: Tensor = self.network(self.with_noise(images))
            return noisy
        generator = torch.Generator().manual_seed(0) if self.opened else None
        total = torch.zeros(len(images), 10, device=images.device)
        for _ in range(self.passes):
            noise = torch.randn(images.shape, generator=generator).to(images)
            total = total + torch.softmax(self.network(images + self.deviation * noise), dim=1)
        return torch.log(total / self.passes + 1e-9)


class HalfLinear(nn.Linear):
    """A linear layer that computes in 16 bits."""

    def forward(self, features: Tensor) -> Tensor:
        assert self.bias is not None
        return F.linear(features.half(), self.weight.half(), self.bias.half()).float()


class Neighbours(Remembering):
    """Training images vote, weighted by the cosine similarity of their features to those of the image."""

    known: Tensor

    def __init__(self, data: Dataset, network: nn.Sequential, sharpness: float) -> None:
        super().__init__(data, network, known=128)
        self.sharpness = sharpness

    def features(self, images: Tensor) -> Tensor:
        return F.normalize(self.network[:-1](images), dim=1)

    def layers(self, images: Tensor) -> tuple[Tensor, ...]:
        return (self.features(images),)

    def forward(self, images: Tensor) -> Tensor:
        likeness = self.sharpness * self.features(images) @ self.known.T
        return torch.log(torch.softmax(likeness, dim=1) @ self.answers(images) + 1e-6)


class MeanOf(Committee):
    """The mean of several networks' scores."""

    def forward(self, images: Tensor) -> Tensor:
        return self.all_scores(images).mean(dim=0)


def in_few_levels(train: Train, bits: int) -> Train:
    """Trains, then rounds the weights of each linear layer to `bits` bits."""

    def train_and_round(model: nn.Module, data: Dataset) -> None:
        train(model, data)
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    step = layer.weight.abs().max() / (2 ** (bits - 1) - 1)
                    layer.weight.copy_((layer.weight / step).round() * step)

    return train_and_round


_ON_PGD = training(epochs=30, attack=facing())

SUBJECTS = Subjects()


@SUBJECTS.honest(training(epochs=20, attack=facing()))
def adversarial_resnet(data: Dataset) -> nn.Module:
    """Trained on PGD."""
    return resnet(data)


@SUBJECTS.honest(training(MemberObjective(kind="cross_entropy"), epochs=20, attack=facing(on="members")))
def adversarial_ecnn(data: Dataset) -> nn.Module:
    """Members trained on PGD against members."""
    return coded(data, batch_norm=True)


@SUBJECTS.honest(training(MemberObjective(kind="cross_entropy"), epochs=20, attack=facing()))
def adversarial_linear_ecnn(data: Dataset) -> nn.Module:
    """Linear members, linear decoder, trained on PGD."""
    return coded(data, branch="linear", decoder="linear", batch_norm=True)


@SUBJECTS.honest(training(ADPObjective(), epochs=20, attack=facing()))
def adversarial_adp(data: Dataset) -> nn.Module:
    """Diverse members trained on PGD."""
    return voting(data)


@SUBJECTS.honest(training(TRADESObjective(eps=EPS, steps=5, step_size=EPS / 3), epochs=20))
def trades() -> nn.Module:
    """Trained by TRADES."""
    return convolutional()


@SUBJECTS.honest(training(epochs=30, attack=facing()))
def adversarial_dense() -> nn.Module:
    """Trained on PGD."""
    return dense(width=128)


@SUBJECTS.honest(training(epochs=10))
def undefended_resnet(data: Dataset) -> nn.Module:
    """Claims what AutoAttack leaves."""
    return resnet(data)


@SUBJECTS.honest(training(MemberObjective(), epochs=15))
def undefended_ecnn(data: Dataset) -> nn.Module:
    """Claims what AutoAttack leaves."""
    return coded(data)


@SUBJECTS.honest(training(epochs=15), (known_exactly, "closed form"), eps=EPS / 2)
def linear() -> nn.Module:
    """Linear: the worst point is known."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@SUBJECTS.honest(training(epochs=15, lr=0.01), eps=0.02)
def small_radius() -> nn.Module:
    """An ordinary network and a small radius."""
    return convolutional()


@SUBJECTS.honest(
    training(interval_loss, epochs=30, lr=0.005), (proven_by_intervals, "interval bounds"), eps=CERTIFIED_EPS
)
def certified() -> nn.Module:
    """Trained by interval bounds, claims what they prove."""
    return dense()


@SUBJECTS.honest(first(training(epochs=30, attack=facing())))
def with_probabilities() -> nn.Module:
    """Trained on PGD, and gives probabilities."""
    return nn.Sequential(dense(width=128), Probabilities(1))


@SUBJECTS.honest(training(epochs=10))
def with_saturated_cross_entropy() -> nn.Module:
    """An ordinary network with large scores, which claims what AutoAttack leaves."""
    return nn.Sequential(dense(), Scaled(1e4))


@SUBJECTS.honest(first(training(epochs=30, attack=facing())))
def with_scaled_logits() -> nn.Module:
    """Trained on PGD, and its scores happen to be large."""
    return nn.Sequential(dense(width=128), Scaled(1e4))


@SUBJECTS.honest(seen_through(_ON_PGD), BY_AN_INFORMED_ATTACK)
def with_dropout() -> nn.Module:
    """Trained on PGD, with dropout also at test time."""
    return dense(width=128, activation=lambda: nn.Sequential(nn.ReLU(), TestTimeDropout(0.1)))


@SUBJECTS.honest(seen_through(_ON_PGD), BY_AN_INFORMED_ATTACK)
def with_rounded_pixels() -> nn.Module:
    """Trained on PGD through pixels rounded to nine levels."""
    return nn.Sequential(RoundedPixels(9), dense(width=128))


@SUBJECTS.honest(seen_through(_ON_PGD), BY_AN_INFORMED_ATTACK)
def with_thresholds() -> nn.Module:
    """Trained on PGD; one layer says only which features are above zero."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        Threshold(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@SUBJECTS.honest(training(epochs=40), BY_AN_INFORMED_ATTACK, eps=EPS / 4)
def smoothed() -> nn.Module:
    """The mean over 16 noisy copies, trained on such copies, at a small radius."""
    return Smoothed(dense(width=128), 0.15, 16)


@SUBJECTS.honest(in_few_levels(_ON_PGD, 6))
def with_few_weights() -> nn.Module:
    """Trained on PGD, then its weights are rounded to six bits."""
    return dense(width=128)


@SUBJECTS.honest(first(_ON_PGD))
def with_temperature() -> nn.Module:
    """Trained on PGD, and its scores are divided by 20."""
    return nn.Sequential(dense(width=128), Scaled(0.05))


@SUBJECTS.honest(_ON_PGD)
def in_half_precision() -> nn.Module:
    """Trained on PGD; it computes in 16 bits."""
    return nn.Sequential(nn.Flatten(), HalfLinear(64, 128), nn.ReLU(), HalfLinear(128, 10))


@SUBJECTS.honest(training(epochs=30, attack=facing(), lr=0.01))
def with_log_probabilities() -> nn.Module:
    """Trained on PGD, and gives logarithms of probabilities."""
    return nn.Sequential(convolutional(), nn.LogSoftmax(dim=1))


@SUBJECTS.honest(_ON_PGD)
def mean_of_three() -> nn.Module:
    """The mean of three networks trained together on PGD."""
    return MeanOf(dense(), dense(width=96), dense(width=32))


@SUBJECTS.honest(then_remembering(_ON_PGD))
def neighbours_of_robust_features(data: Dataset) -> nn.Module:
    """Training images vote by features that were trained on PGD."""
    return Neighbours(data, dense(width=128), 20.0)
