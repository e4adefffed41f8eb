"""Published defences with honest claims: part of the benchmark's second half (see `Subject.half`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.attacks import FGSM
from ecnn.auditing.bench.claims import BY_AN_INFORMED_ATTACK, Subjects
from ecnn.auditing.bench.features import WinnersTakeAll
from ecnn.auditing.bench.inputs import BlockCodec, Thermometer
from ecnn.auditing.bench.networks import (
    Committee,
    convolutional,
    dense,
    facing,
    seen_through,
    training,
)
from ecnn.auditing.bench.subject import EPS
from ecnn.auditing.bench.tricks import Trick
from ecnn.data import Dataset
from ecnn.objectives import score_cross_entropy


class ClassSpaces(nn.Module):
    """Minus the squared distance of an image from the principal subspace of each class, around the class mean.

    This is its log-likelihood under a simple generator of the class, up to scale.
    """

    means: Tensor
    components: Tensor

    def __init__(self, data: Dataset, count: int) -> None:
        super().__init__()
        images, labels = data.train[:]
        means, components = [], []
        for number in range(10):
            own = images[labels == number].flatten(1)
            means.append(own.mean(dim=0))
            components.append(torch.linalg.svd(own - means[-1], full_matrices=False)[2][:count])
        self.register_buffer("means", torch.stack(means))
        self.register_buffer("components", torch.stack(components))

    def forward(self, images: Tensor) -> Tensor:
        apart = images.flatten(1)[:, None] - self.means
        explained = torch.einsum("bcp,ckp->bck", apart, self.components)
        return explained.square().sum(dim=2) - apart.square().sum(dim=2)


class OneOf(Committee, Trick):
    """One of several networks, drawn per image and pass (Pinot et al. 2020); when opened log of mean probabilities."""

    def forward(self, images: Tensor) -> Tensor:
        scores = self.all_scores(images)
        if self.is_open:
            return torch.log(torch.softmax(scores, dim=2).mean(dim=0) + 1e-9)
        return scores[torch.randint(len(scores), (len(images),)), torch.arange(len(images))]


class Halves(Trick):
    """Turns each pixel black or white."""

    def forward(self, images: Tensor) -> Tensor:
        return self.hide((images > 0.5).to(images.dtype), torch.sigmoid(10 * (images - 0.5)))


class Angles(nn.Module):
    """Scores that are scaled cosines between the features and each class's weights (Pang et al. 2020)."""

    def __init__(self, inputs: int, scale: float) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(10, inputs)), scale

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * F.normalize(features, dim=1) @ F.normalize(self.weight, dim=1).T


def flat_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy plus EPS times the L1 norm of its gradient in the pixels (after Ross & Doshi-Velez 2018)."""
    with torch.enable_grad():
        points = images.detach().requires_grad_(True)
        losses = score_cross_entropy(model(points), labels)
        (slopes,) = torch.autograd.grad(losses.sum(), points, create_graph=True)
        return losses.mean() + EPS * slopes.abs().flatten(1).sum(dim=1).mean()


def pairing_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy after one FGSM step, plus half the squared distance of the scores from the clean image's.

    After Kannan et al. (2018). The step starts at a random point of the ball.
    """
    with torch.enable_grad():
        start = images.detach() + EPS * (2 * torch.rand_like(images) - 1)
        start = start.clamp(0, 1).requires_grad_(True)
        (slope,) = torch.autograd.grad(score_cross_entropy(model(start), labels).sum(), start)
    step = start.detach() + EPS * slope.sign()
    attacked = torch.minimum(torch.maximum(step, images - EPS), images + EPS).clamp(0, 1)
    shown: Tensor = model(attacked)
    apart: Tensor = (shown - model(images)).square().sum(dim=1)
    return score_cross_entropy(shown, labels).mean() + 0.5 * apart.mean()


_ON_PGD = training(epochs=30, attack=facing())

SUBJECTS = Subjects("second")


@SUBJECTS.honest(training(flat_loss, epochs=25))
def gradient_regularised() -> nn.Module:
    """Trained to have small gradients (Ross & Doshi-Velez 2018)."""
    return dense(width=128, activation=nn.Softplus)


@SUBJECTS.honest(training(epochs=30, attack=FGSM(norm="linf", eps=EPS, keep="last")))
def fast_adversarial() -> nn.Module:
    """Trained on one step from a random point (Wong et al. 2020)."""
    return dense(width=128)


@SUBJECTS.honest(training(pairing_loss, epochs=30))
def logit_pairing() -> nn.Module:
    """Trained to give an image and a one-step attack on it similar scores (after Kannan et al. 2018)."""
    return dense(width=128)


@SUBJECTS.honest(lambda model, data: None)
def class_generators(data: Dataset) -> nn.Module:
    """The class whose simple generator explains the image best (after Schott et al. 2019)."""
    return ClassSpaces(data, 8)


@SUBJECTS.honest(_ON_PGD, BY_AN_INFORMED_ATTACK)
def adversarial_winners_take_all() -> nn.Module:
    """Only the largest third of the activations pass (Xiao et al. 2020), trained on PGD."""
    return dense(width=128, activation=lambda: nn.Sequential(WinnersTakeAll(0.33), nn.ReLU()))


@SUBJECTS.honest(seen_through(_ON_PGD), BY_AN_INFORMED_ATTACK)
def adversarial_thermometer() -> nn.Module:
    """Thermometer-coded pixels (Buckman et al. 2018), trained on PGD through the code."""
    return nn.Sequential(Thermometer(8), dense(512, width=128))


@SUBJECTS.honest(seen_through(_ON_PGD), BY_AN_INFORMED_ATTACK)
def adversarial_codec() -> nn.Module:
    """Trained on PGD through a codec (after Das et al. 2018)."""
    return nn.Sequential(BlockCodec(0.05), dense(width=128))


@SUBJECTS.honest(seen_through(_ON_PGD), BY_AN_INFORMED_ATTACK)
def black_and_white() -> nn.Module:
    """Pixels are black or white (the remark of Schott et al. 2019), trained on PGD through it."""
    return nn.Sequential(Halves(), dense(width=128))


@SUBJECTS.honest(seen_through(_ON_PGD), BY_AN_INFORMED_ATTACK)
def one_of_three() -> nn.Module:
    """One of three networks trained on PGD, drawn for every image (Pinot et al. 2020)."""
    return OneOf(dense(), dense(), dense(width=96))


@SUBJECTS.honest(training(epochs=25, attack=facing(), lr=0.01))
def angles() -> nn.Module:
    """Scores from angles alone (Pang et al. 2020), trained on PGD."""
    return nn.Sequential(*list(convolutional())[:-1], Angles(32, 15.0))


@SUBJECTS.honest(_ON_PGD)
def smooth_activations() -> nn.Module:
    """Smooth activations (Xie et al. 2020), trained on PGD."""
    return dense(width=128, activation=nn.SiLU)
