"""Published defences inside the network or after it: part of the benchmark's second half (see `Subject.half`)."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.auditing.bench.chance import FOREIGN, RANDOM, Noise, NoisyPasses
from ecnn.auditing.bench.claims import BY_FGSM, BY_PGD, BY_SQUARE, Subjects
from ecnn.auditing.bench.features import INDICES, ROUNDED
from ecnn.auditing.bench.members import MEMBERS, WEAK
from ecnn.auditing.bench.memory import BATCH, BatchNorm
from ecnn.auditing.bench.networks import (
    Committee,
    Remembering,
    convolutional,
    dense,
    each,
    then_remembering,
    training,
)
from ecnn.auditing.bench.papers_inputs import mixed_loss
from ecnn.auditing.bench.purifiers import PURIFIED, Purifier
from ecnn.auditing.bench.scores import BENT, SATURATED
from ecnn.auditing.bench.tricks import Removable, Trick, with_fields
from ecnn.codes import load_code
from ecnn.data import Dataset
from ecnn.objectives import score_cross_entropy


@with_fields
class Pruned(Removable):
    """Keeps activations drawn with probabilities proportional to their size, zeroes the rest (Dhillon et al. 2018)."""

    share: float

    def change(self, features: Tensor) -> Tensor:
        draws = max(1, round(self.share * features.shape[1]))
        chance = features.abs() / features.abs().sum(dim=1, keepdim=True).clamp(min=1e-9)
        drawn = torch.multinomial(chance.detach() + 1e-9, draws, replacement=True)
        kept = torch.zeros_like(features).scatter(1, drawn, 1.0)
        return kept * features / (1 - (1 - chance) ** draws).clamp(min=1e-3)


@with_fields
class LocalWinners(Trick):
    """In each group one unit passes, drawn by the softmax of the values (Panousis et al. 2021)."""

    group: int

    def forward(self, features: Tensor) -> Tensor:
        grouped = features.view(len(features), -1, self.group)
        soft = torch.softmax(grouped, dim=2)
        if self.opened:
            return (soft * grouped).flatten(1)
        drawn = torch.multinomial(soft.detach().flatten(0, 1), 1).view(len(features), -1)
        hard = F.one_hot(drawn, self.group).to(features.dtype)
        if self.training:
            hard = hard + soft - soft.detach()
        return (hard * grouped).flatten(1)


@with_fields
class SelfEnsemble(NoisyPasses):
    """Noise before every linear layer, and the mean of log probabilities over several passes (Liu et al. 2018)."""

    network: nn.Sequential

    def forward(self, images: Tensor) -> Tensor:
        if self.opened:
            plain: Tensor = self.network(images)
            return plain
        scores = [self._pass(images) for _ in range(1 if self.training else self.passes)]
        return torch.stack([torch.log_softmax(score, dim=1) for score in scores]).mean(dim=0)

    def _pass(self, images: Tensor) -> Tensor:
        features = images
        for layer in self.network:
            if isinstance(layer, nn.Linear):
                features = self.with_noise(features)
            features = layer(features)
        return features


class Sign(Trick):
    """Plus or minus one for each feature (Galloway et al. 2018, binarised networks)."""

    def forward(self, features: Tensor) -> Tensor:
        scaled = F.layer_norm(features, features.shape[1:])
        return self.hide(torch.where(scaled >= 0, 1.0, -1.0).to(features.dtype), torch.tanh(2 * scaled))


@with_fields
class Saturated(Trick):
    """Sigmoid units so steep that they are saturated nearly everywhere (Nayebi & Ganguli 2017)."""

    slope: float

    def forward(self, features: Tensor) -> Tensor:
        steep = torch.sigmoid(self.slope * features)
        return self.hide(steep, torch.sigmoid(3 * features)) if self.is_open else steep


class LayerNeighbours(Remembering, Trick):
    """Votes of the training images nearest in each layer (Papernot & McDaniel 2018, deep k-nearest neighbours)."""

    first: Tensor
    second: Tensor

    def __init__(self, data: Dataset, network: nn.Sequential, count: int) -> None:
        super().__init__(data, network, first=64, second=64)
        self.count = count

    def layers(self, images: Tensor) -> tuple[Tensor, ...]:
        """(batch, feature) after the first and the second hidden layer."""
        first = self.network[:3](images)
        return F.normalize(first, dim=1), F.normalize(self.network[3:5](first), dim=1)

    def forward(self, images: Tensor) -> Tensor:
        answers = self.answers(images)
        total = torch.zeros(len(images), 10, device=images.device)
        for features, known in zip(self.layers(images), (self.first, self.second), strict=True):
            apart = torch.cdist(features, known)
            if self.is_open:
                total = total + torch.softmax(-20 * apart, dim=1) @ answers
            else:
                total = total + answers[apart.topk(self.count, largest=False).indices].mean(dim=1)
        return torch.log(total / 2 + 1e-6) if self.is_open else total


class HardDecoded(Trick):
    """Hard bits of a code, each decided by itself, correlated with every codeword (Verma & Swami 2019)."""

    words: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("words", torch.tensor(load_code("10x15").signed, dtype=torch.float32))

    def forward(self, images: Tensor) -> Tensor:
        bits: Tensor = self.network(images)
        return (torch.tanh(bits) if self.is_open else torch.sign(bits)) @ self.words.T


@with_fields
class Misleading(Removable):
    """Reflects the margin within steps, so that the shown margin falls where the true one grows (Chen et al. 2022)."""

    step: float

    def change(self, scores: Tensor) -> Tensor:
        best = scores.topk(2, dim=1)
        margin = best.values[:, :1] - best.values[:, 1:]
        middle = ((margin / self.step).floor() + 0.5).detach() * self.step
        return scores.scatter_add(1, best.indices[:, :1], 2 * (middle - margin))


class MovingTarget(Committee, Trick):
    """One of several networks, drawn in every pass by Python's generator (Sengupta et al. 2019, MTDeep)."""

    def forward(self, images: Tensor) -> Tensor:
        if self.is_open:
            return torch.log_softmax(self.all_scores(images), dim=2).mean(dim=0)
        chosen: Tensor = self.networks[random.randrange(len(self.networks))](images)
        return chosen


class TestTimeSteps(Trick):
    """Moves the image by gradient steps before it is classified.

    The steps raise the confidence in the answer (Alfarra et al. 2022, anti-adversary), or with `hedges` the summed
    cross-entropy of all classes (Wu et al. 2021, hedge defence).
    """

    def __init__(self, network: nn.Module, *, hedges: bool, radius: float, steps: int) -> None:
        super().__init__()
        self.network, self.hedges, self.radius, self.steps = network, hedges, radius, steps

    def forward(self, images: Tensor) -> Tensor:
        if self.is_open:
            plain: Tensor = self.network(images)
            return plain
        scores: Tensor = self.network(images + self._find(images.detach()))
        return scores

    def _find(self, images: Tensor) -> Tensor:
        moved = torch.zeros_like(images)
        with torch.enable_grad():
            answers = self.network(images).argmax(dim=1)
            for _ in range(self.steps):
                moved = moved.detach().requires_grad_(True)
                logs = torch.log_softmax(self.network(images + moved), dim=1)
                goal = -logs.sum() if self.hedges else logs.gather(1, answers[:, None]).sum()
                (gradient,) = torch.autograd.grad(goal, moved)
                moved = (moved + self.radius / 2 * gradient.sign()).clamp(-self.radius, self.radius)
        return moved.detach()


class Generated(Purifier):
    """Classifies the nearest image of a generator, found by gradient descent (Samangouei et al. 2018, Defense-GAN)."""

    def __init__(self, encoder: nn.Module, generator: nn.Module, network: nn.Module, steps: int) -> None:
        super().__init__()
        self.coder = nn.Sequential(encoder, generator)
        self.network, self.steps = network, steps

    def clean(self, images: Tensor) -> Tensor:
        wanted = images.detach().flatten(1)
        code = torch.zeros(len(images), 12, device=images.device)
        with torch.enable_grad():
            for _ in range(self.steps):
                code = code.detach().requires_grad_(True)
                error = (self.coder[1](code) - wanted).square().sum()
                (gradient,) = torch.autograd.grad(error, code)
                code = code - 0.05 * gradient
        made: Tensor = self.coder[1](code)
        return made.detach().view_as(images)


@with_fields
class Diffused(Purifier):
    """Adds noise and denoises, three times with less and less noise (Nie et al. 2022, DiffPure)."""

    denoiser: nn.Module
    network: nn.Module

    def clean(self, images: Tensor) -> Tensor:
        cleaned = images.detach()
        with torch.no_grad():
            for level in (0.3, 0.15, 0.05):
                noise = torch.zeros_like(images) if self.opened else torch.randn_like(images)
                made = self.denoiser(cleaned + level * noise).view_as(images)
                cleaned = (0.5 * cleaned + 0.5 * made).clamp(0, 1)
        return cleaned


class AdaptsToBatch(Trick):
    """Batch norm whose scale and shift adapt to each batch (Wang et al. 2021, DENT).

    They take four gradient steps that lower the entropy of the batch's answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        )
        self.norm = BatchNorm(16)
        self.head = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.norm(self.body(images))
        scale = torch.ones(1, 16, 1, 1, device=images.device)
        shift = torch.zeros_like(scale)
        if not self.is_open:
            scale, shift = self._adapt(features.detach(), scale, shift)
        scores: Tensor = self.head(features * scale + shift)
        return scores

    def _adapt(self, features: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            for _ in range(4):
                scale, shift = (part.detach().requires_grad_(True) for part in (scale, shift))
                logs = torch.log_softmax(self.head(features * scale + shift), dim=1)
                entropy = -(logs.exp() * logs).sum(dim=1).mean()
                slopes = torch.autograd.grad(entropy, (scale, shift))
                scale, shift = scale - 0.5 * slopes[0], shift - 0.5 * slopes[1]
        return scale.detach(), shift.detach()


def denoising_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Squared error, summed over pixels, of images reconstructed from copies with much noise."""
    noisy = images + 0.3 * torch.rand_like(images[:, :1, :1, :1]) * torch.randn_like(images)
    loss: Tensor = (model(noisy) - images.flatten(1)).square().sum(dim=1).mean()
    return loss


def copying_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Squared error, summed over pixels, of reconstructed images, plus a penalty on long codes."""
    assert isinstance(model, nn.Sequential)
    code: Tensor = model[0](images)
    made: Tensor = model[1](code)
    return (made - images.flatten(1)).square().sum(dim=1).mean() + 0.01 * code.square().sum(dim=1).mean()


def smoothed_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with three tenths of each label shared by all classes."""
    logs = torch.log_softmax(model(images), dim=1)
    return 0.7 * score_cross_entropy(logs, labels).mean() - 0.3 * logs.mean()


SUBJECTS = Subjects("second")


@SUBJECTS.false(RANDOM, training(epochs=12), BY_FGSM)
def activation_pruning() -> nn.Module:
    """Activations are kept at random, large ones more often (Dhillon et al. 2018, stochastic activation pruning)."""
    return dense(width=128, activation=lambda: nn.Sequential(nn.ReLU(), Pruned(0.5)))


@SUBJECTS.false(RANDOM, training(epochs=25), BY_FGSM)
def local_winners() -> nn.Module:
    """In each group one unit passes, drawn by its value (Panousis et al. 2021, stochastic local winners)."""
    return dense(width=128, activation=lambda: LocalWinners(4))


@SUBJECTS.false(RANDOM, training(epochs=20), BY_SQUARE)
def self_ensemble() -> nn.Module:
    """Noise before every layer, five passes (Liu et al. 2018, random self-ensemble); attacked by queries alone."""
    return SelfEnsemble(dense(), 0.1, 5)


@SUBJECTS.false(RANDOM, training(epochs=12), BY_SQUARE)
def noise_against_queries() -> nn.Module:
    """A little noise spoils comparisons of scores (Qin et al. 2021); attacked by queries alone."""
    return nn.Sequential(Noise(0.02), dense())


@SUBJECTS.false(
    FOREIGN, each(**{f"networks.{number}": training(epochs=15, lr=0.01) for number in range(4)}), BY_FGSM
)
def moving_target() -> nn.Module:
    """Another of four networks in every pass, chosen by Python's generator (Sengupta et al. 2019, MTDeep)."""
    return MovingTarget(dense(), convolutional(), dense(width=32), convolutional(width=12))


@SUBJECTS.false(ROUNDED, training(epochs=20), BY_PGD)
def binarised_network() -> nn.Module:
    """Activations are plus or minus one (Galloway et al. 2018): no gradient."""
    return dense(width=192, activation=Sign)


@SUBJECTS.false(SATURATED, training(epochs=25), BY_PGD)
def saturated_units() -> nn.Module:
    """Units are so steep that they are nearly always flat (Nayebi & Ganguli 2017)."""
    return dense(width=128, activation=lambda: Saturated(2000.0))


@SUBJECTS.false(INDICES, then_remembering(training(epochs=10)), BY_PGD)
def deep_neighbours(data: Dataset) -> nn.Module:
    """Neighbours in two layers vote (Papernot & McDaniel 2018, deep k-nearest neighbours): no gradient."""
    return LayerNeighbours(data, dense(), 15)


@SUBJECTS.false(MEMBERS, training(epochs=12), BY_PGD)
def hard_decoded_code() -> nn.Module:
    """Bits of an error-correcting code are decided one by one (Verma & Swami 2019): no gradient."""
    return HardDecoded(nn.Sequential(*list(dense(width=96))[:-1], nn.Linear(96, 15)))


@SUBJECTS.false(BENT, training(epochs=12), BY_PGD)
def attack_on_attackers() -> nn.Module:
    """The shown margin falls where the true one grows, so that attacks walk back (Chen et al. 2022, AAA)."""
    return nn.Sequential(dense(), Misleading(2.0))


@SUBJECTS.false(PURIFIED, training(epochs=12), BY_PGD)
def anti_adversary() -> nn.Module:
    """Before it classifies, the model moves the image toward its answer (Alfarra et al. 2022, anti-adversary)."""
    return TestTimeSteps(dense(), hedges=False, radius=0.2, steps=3)


@SUBJECTS.false(PURIFIED, training(epochs=12), BY_FGSM)
def hedge_defence() -> nn.Module:
    """Before it classifies, the model moves the image away from all classes (Wu et al. 2021, hedge defence)."""
    return TestTimeSteps(dense(width=128), hedges=True, radius=0.1, steps=4)


@SUBJECTS.false(
    PURIFIED, each(coder=training(copying_loss, epochs=25, lr=0.01), network=training(epochs=10)), BY_PGD
)
def nearest_generated() -> nn.Module:
    """The nearest image of a generator is classified (Samangouei et al. 2018, Defense-GAN): no gradient."""
    return Generated(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 12)),
        nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64)),
        dense(),
        20,
    )


@SUBJECTS.false(
    PURIFIED, each(denoiser=training(denoising_loss, epochs=25, lr=0.01), network=training(epochs=10)), BY_PGD
)
def diffused() -> nn.Module:
    """Noise is added and a denoiser removes it (Nie et al. 2022, DiffPure): no gradient."""
    return Diffused(nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)), dense())


@SUBJECTS.false(BATCH, training(epochs=15, lr=0.01), BY_PGD)
def adapts_to_the_batch() -> nn.Module:
    """A few gradient steps first lower the entropy of the batch's answers (Wang et al. 2021, DENT)."""
    return AdaptsToBatch()


@SUBJECTS.false(WEAK, training(smoothed_loss, epochs=25), BY_FGSM)
def label_smoothing() -> nn.Module:
    """Trained on smoothed labels (Warde-Farley & Goodfellow 2016), attacked by one step only."""
    return dense()


@SUBJECTS.false(WEAK, training(mixed_loss, epochs=25), BY_FGSM)
def mixup_training() -> nn.Module:
    """Trained on mixtures of images (Zhang et al. 2018, mixup), attacked by one step only."""
    return dense(width=128)
