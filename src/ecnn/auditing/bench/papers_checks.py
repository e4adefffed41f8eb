"""Published detectors that send suspect images to another network: part of the second half (see `Subject.half`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ecnn.attacks.images import per_image
from ecnn.attacks.norms import NORMS, l2_norm
from ecnn.auditing.bench.claims import BY_AN_INFORMED_ATTACK, BY_PGD, Subjects
from ecnn.auditing.bench.networks import dense, each, facing, training
from ecnn.auditing.bench.subject import Train
from ecnn.data import Dataset
from ecnn.objectives import predicted_classes, score_margin

CHECKS = "checked inputs"
SUBJECTS = Subjects("second")


class Checked(nn.Module):
    """Classifies most images with a trusting network, and unusual ones with a robust network.

    An image is unusual if `unusual` exceeds `limit`, the value that 99 of 100 training images do not exceed.
    """

    limit: Tensor

    def __init__(self, trusting: nn.Module, robust: nn.Module) -> None:
        super().__init__()
        self.trusting, self.robust = trusting, robust
        self.register_buffer("limit", torch.tensor(0.0))

    def unusual(self, images: Tensor) -> Tensor:
        """(batch,) how unusual each image is; higher is more unusual."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        is_suspect = self.unusual(images) > self.limit
        return torch.where(is_suspect[:, None], self.robust(images), self.trusting(images))


def settled(trusting: Train | None = None) -> Train:
    """Trains both networks, the trusting one without attacks if `trusting` is None, and then sets the limit."""
    train_both = each(trusting=trusting or training(epochs=15), robust=training(epochs=30, attack=facing()))

    def train(model: nn.Module, data: Dataset) -> None:
        assert isinstance(model, Checked)
        train_both(model, data)
        with torch.no_grad():
            model.limit.copy_(model.eval().unusual(data.train[:][0]).quantile(0.99))

    return train


def slip_by(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Points from an attack on the trusting network that also keeps the image from looking unusual.

    Where it finds no misclassified point, the image itself.
    """
    assert isinstance(model, Checked)
    found, norm = images.clone(), NORMS["linf"]
    for weight in (0.1, 0.3, 1.0, 3.0, 10.0):
        points, pace = images.clone(), torch.zeros_like(images)
        for step in range(120):
            points.requires_grad_(True)
            excess = (model.unusual(points) / model.limit - 0.98).clamp_min(0)
            lead = -score_margin(model.trusting(points), labels).clamp_min(-2)
            (slope,) = torch.autograd.grad((lead - weight * excess).sum(), points)
            pace = 0.75 * pace + slope / per_image(l2_norm(slope).clamp_min(1e-9), slope)
            points = norm.project(points.detach() + eps / 4 * (1 - step / 125) * pace.sign(), images, eps)
            with torch.no_grad():
                wrong = predicted_classes(model(points)) != labels
            found[wrong] = points[wrong]
    return found


class Components(Checked):
    """Unusual images vary much along directions in which training images hardly vary."""

    mean: Tensor
    rest: Tensor

    def __init__(self, data: Dataset, trusting: nn.Module, robust: nn.Module, largest: int = 20) -> None:
        super().__init__(trusting, robust)
        images = data.train[:][0].flatten(1)
        self.register_buffer("mean", images.mean(dim=0))
        _, sizes, directions = torch.linalg.svd(images - images.mean(dim=0))
        spread = (sizes.square() / len(images) + 4e-4).sqrt()
        self.register_buffer("rest", (directions / spread[:, None])[largest:].clone())

    def unusual(self, images: Tensor) -> Tensor:
        return ((images.flatten(1) - self.mean) @ self.rest.T).square().sum(dim=1)


@SUBJECTS.false(CHECKS, settled(), BY_PGD, knows=slip_by)
def low_components(data: Dataset) -> nn.Module:
    """Images that vary along the last principal components go to a robust network (Hendrycks & Gimpel 2017)."""
    return Components(data, dense(width=128), dense(width=128))


@SUBJECTS.false(CHECKS, settled(), BY_PGD, knows=slip_by)
class SqueezedApart(Checked):
    """Images whose probabilities change with fewer bits go to a robust network (Xu et al. 2018, feature squeezing)."""

    def __init__(self) -> None:
        super().__init__(dense(width=128), dense(width=128))

    def unusual(self, images: Tensor) -> Tensor:
        squeezed = images + ((images * 3).round() / 3 - images).detach()
        whole, rough = (torch.softmax(self.trusting(shown), dim=1) for shown in (images, squeezed))
        return (whole - rough).abs().sum(dim=1)


def keep_to_levels(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Points from an attack on the trusting network that only uses grey values of training images.

    Where it finds no misclassified point, the image itself.
    """
    assert isinstance(model, GreyValues)
    found, is_near = images.clone(), (images[..., None] - model.levels).abs() <= eps
    for start in range(4):
        points = images if not start else images + eps * (2 * torch.rand_like(images) - 1)
        for _ in range(60):
            points = points.detach().requires_grad_(True)
            apart = torch.where(is_near, (points[..., None] - model.levels).abs(), torch.inf)
            level = torch.where(is_near.any(dim=-1), model.levels[apart.argmin(dim=-1)], images)
            shown = points + (level - points).detach()
            with torch.no_grad():
                wrong = predicted_classes(model(level)) != labels
            found[wrong] = level[wrong]
            (slope,) = torch.autograd.grad(-score_margin(model.trusting(shown), labels).sum(), points)
            points = NORMS["linf"].project(points.detach() + eps / 8 * slope.sign(), images, eps)
    return found


@SUBJECTS.false(CHECKS, settled(), BY_PGD, knows=keep_to_levels)
class GreyValues(Checked):
    """Images with grey values that no training image has go to a robust network, as by an input check."""

    levels: Tensor

    def __init__(self, data: Dataset) -> None:
        super().__init__(dense(width=128), dense(width=128))
        self.register_buffer("levels", torch.from_numpy(np.unique(data.train[:][0])))

    def unusual(self, images: Tensor) -> Tensor:
        is_known = (images[..., None] - self.levels).abs() < 1e-3
        return (~is_known.any(dim=-1)).flatten(1).sum(dim=1).to(images.dtype)


@SUBJECTS.honest(settled(training(epochs=30, attack=facing())), BY_AN_INFORMED_ATTACK)
def robust_either_way(data: Dataset) -> nn.Module:
    """Images that vary along the last principal components go to another network; both are trained on PGD."""
    return Components(data, dense(width=128), dense(width=64))
