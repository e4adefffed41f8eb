"""ADP (Pang et al. 2019): an ensemble whose members are trained to be wrong in different directions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ecnn.asking import full_precision
from ecnn.backbones import Centre, Mean, ResNet, Trunk, check_images
from ecnn.checks import check_count, check_has, check_number, check_options
from ecnn.kinds import ModelKind, Published, options_of
from ecnn.model import MemberDense
from ecnn.objectives import score_cross_entropy
from ecnn.recipes import Recipe

# Added to the diagonal, so that the logarithm is finite for members that agree exactly; as in the authors' program.
DETERMINANT_FLOOR = 1e-6


class Ensemble(nn.Module):
    """ResNets of equal shape in one module: pixels in [0, 1] to the logarithm of their mean probabilities.

    Scores (batch, class) are log((1/K) sum_k softmax(member k)), so their softmax is the mean of the members'
    probabilities. Members are groups of the same convolutions, not a loop. Three ResNet-20 with batch norm trained by
    `ADPObjective` are ADP_{2,0.5}: 819,198 parameters for 3 channels, 818,334 for one.

    Args:
        num_classes: scores per image.
        in_channels: of the images.
        num_members: how many networks are averaged.
        mean: subtracted from the images, see `Centre`.
        network: depth, width, batch_norm and activation of each member, as in `ResNet`.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        *,
        num_members: int = 3,
        mean: Mean | None = None,
        **network: Any,
    ) -> None:
        super().__init__()
        check_options("an Ensemble", network, options_of(ResNet))
        check_count("num_classes", num_classes, least=2)
        check_count("num_members", num_members)
        self.num_members = num_members
        self.in_channels = in_channels
        self.centre = Centre(mean)
        self.trunk = Trunk(in_channels, groups=num_members, **{"batch_norm": True, **network})
        self.head = MemberDense(num_members, self.trunk.out_channels, num_classes)
        sizes = {"num_classes": num_classes, "in_channels": in_channels, "num_members": num_members}
        self.config: dict[str, Any] = {**sizes, **self.trunk.config}

    def member_scores(self, images: Tensor) -> Tensor:
        """(batch, member, class) logits of each network."""
        check_images(images, self.in_channels)
        maps: Tensor = self.trunk(self.centre(images))
        features = torch.unflatten(maps.mean(dim=(2, 3)), 1, (self.num_members, -1))
        return full_precision(self.head(features))

    def forward(self, images: Tensor) -> Tensor:
        return log_mean_probs(self.member_scores(images))


def log_mean_probs(member_scores: Tensor) -> Tensor:
    """(batch, class) logarithm of the mean of the members' probabilities.

    Args:
        member_scores: (batch, member, class) before the softmax.
    """
    logs = torch.log_softmax(full_precision(member_scores), dim=2)
    return torch.logsumexp(logs, dim=1) - math.log(member_scores.shape[1])


def sum_of_cross_entropies(member_scores: Tensor, labels: Tensor) -> Tensor:
    """(batch,) sum of the members' cross entropies, in nats.

    Args:
        member_scores: (batch, member, class) before the softmax.
        labels: (batch,) true classes.
    """
    members = member_scores.shape[1]
    own_labels = labels[:, None].expand(-1, members).reshape(-1)
    return score_cross_entropy(member_scores.flatten(0, 1), own_labels).view(-1, members).sum(dim=1)


def ensemble_entropy(member_scores: Tensor) -> Tensor:
    """(batch,) entropy of the members' mean probabilities, in nats; 0 to log(class)."""
    logs = log_mean_probs(member_scores)
    return -(logs.exp() * logs).sum(dim=1)


def ensemble_diversity(member_scores: Tensor, labels: Tensor) -> Tensor:
    """How differently the members distribute probability over the wrong classes: Pang et al.'s log(ED).

    The logarithm of the squared volume that is spanned by the members' probabilities of the wrong classes, each scaled
    to length 1. About 0 if they are orthogonal; -26.5 = log(3e-12), the floor, if three members agree.

    Args:
        member_scores: (batch, member, class) before the softmax.
        labels: (batch,) true classes.

    Returns:
        (batch,) log det(Mt Mt^T + 1e-6 I), with Mt (member, class - 1).

    Departs: computed in float64, because in float32 1e-6 is only a few rounding steps of 1; and from the scores of the
        wrong classes alone, which gives the same rows and stays exact if the true class takes all but 1e-30.
    """
    members = member_scores.shape[1]
    true_class = labels[:, None, None].expand(-1, members, 1)
    wrong = torch.softmax(member_scores.double().scatter(2, true_class, -math.inf), dim=2)
    rows = wrong / torch.linalg.vector_norm(wrong, dim=2, keepdim=True)
    floor = DETERMINANT_FLOOR * torch.eye(members, dtype=rows.dtype, device=rows.device)
    return _log_determinant(rows @ rows.transpose(1, 2) + floor).to(full_precision(member_scores).dtype)


@dataclass(frozen=True, kw_only=True)
class ADPObjective:
    """Sum of the members' cross entropies - alpha * entropy of their mean - beta * diversity, averaged over images.

    Attributes:
        alpha: weight of the entropy of the members' mean probabilities, see `ensemble_entropy`.
        beta: weight of the diversity of the members' wrong answers, see `ensemble_diversity`.
    """

    alpha: float = 2.0
    beta: float = 0.5

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha)
        check_number("beta", self.beta)

    def __call__(self, model: Any, images: Tensor, labels: Tensor) -> Tensor:
        check_has("ADP", model, "member_scores")
        member_scores = model.member_scores(images)
        loss = sum_of_cross_entropies(member_scores, labels)
        reward = self.alpha * ensemble_entropy(member_scores) + self.beta * ensemble_diversity(
            member_scores, labels
        )
        return (loss - reward).mean()


def _log_determinant(matrices: Tensor) -> Tensor:
    """(batch,) logarithm of the determinant of positive definite matrices (batch, n, n), by elimination.

    It takes a few small operations per member. torch's factorisations wait for the device, which a CUDA graph forbids.
    """
    logs = []
    for index in range(matrices.shape[1]):
        pivot = matrices[:, index, index]
        logs.append(pivot.log())
        column = matrices[:, :, index]
        matrices = matrices - column[:, :, None] * column[:, None, :] / pivot[:, None, None]
    return torch.stack(logs, dim=1).sum(dim=1)


# ADP's program (Pang et al. 2019) for CIFAR-10: its penalty of 1e-4 times the squared kernels is a decay of 2e-4.
# Departs: the head is decayed too; shifts are whole pixels.
_RECIPE = Recipe(
    epochs=200,
    batch_size=64,
    optimizer="adam",
    lr=1e-3,
    weight_decay=2e-4,
    schedule="steps",
    objective="adp",
    objective_options={"alpha": 2.0, "beta": 0.5},
    shift=3,
    flip=True,
)

KIND = ModelKind(
    name="adp",
    model=Ensemble,
    more_options=options_of(ResNet),
    objectives=("adp", "empir", "cross_entropy", "trades"),
    own_objectives={"adp": ADPObjective},
    own_recipes={
        "adp": _RECIPE,
        # The same for MNIST, whose digits are neither shifted nor mirrored.
        "adp_mnist": replace(_RECIPE, epochs=40, shift=0, flip=False),
    },
    published={"cifar10": Published(recipe="adp"), "mnist": Published(recipe="adp_mnist")},
)
