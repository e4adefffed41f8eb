"""TRADES (Zhang et al. 2019): training for right answers on clean images and the same answers near them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ecnn.asking import eval_mode, full_precision
from ecnn.checks import check_count, check_number, parse_eps
from ecnn.objectives import score_cross_entropy

# Deviation of the noise from which the inner search starts: at the image itself the gradient is zero.
START_DEVIATION = 1e-3


def kl_divergence(scores: Tensor, other_scores: Tensor) -> Tensor:
    """(batch,) KL(softmax(scores) || softmax(other_scores)) in nats.

    Args:
        scores, other_scores: (batch, class).
    """
    logs = torch.log_softmax(full_precision(scores), dim=1)
    other_logs = torch.log_softmax(full_precision(other_scores), dim=1)
    return (logs.exp() * (logs - other_logs)).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class TRADESObjective:
    """Cross entropy on the images + beta * KL divergence between the answers for them and for the worst points nearby.

    Works for any model that gives scores, whose softmax it takes; an ECNN is trained through its decoder. Points are
    crafted in eval mode, as in the authors' program; the two passes of the loss run in the model's own mode. The
    gradient flows through both sides of the divergence. Nothing waits for the device, so a CUDA graph can record it.

    Attributes:
        eps: Linf radius on the [0, 1] scale; 0.031 in the authors' program for CIFAR-10.
        steps: of the inner search; 10 in the authors' program.
        step_size: of the inner search, on the [0, 1] scale; 0.007 in the authors' program.
        beta: weight of the divergence; the authors' 1/lambda.

    Departs: the noisy start too is clamped to the ball and to [0, 1], and the clean pass is not run a second time.
    """

    eps: float | str
    steps: int
    step_size: float | str
    beta: float = 6.0

    def __post_init__(self) -> None:
        check_count("steps", self.steps, least=0)
        for name in ("eps", "step_size"):
            parse_eps(getattr(self, name), name)
        check_number("beta", self.beta)

    def __call__(
        self, model: Any, images: Tensor, labels: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """The scalar loss; noise comes from the generator, or from torch's global one."""
        if self.beta == 0:
            return score_cross_entropy(model(images), labels).mean()
        points = self.craft(model, images, generator=generator)
        scores = model(images)
        divergence = kl_divergence(scores, model(points)).mean()
        return score_cross_entropy(scores, labels).mean() + self.beta * divergence

    def craft(self, model: nn.Module, images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Points in the ball and in [0, 1], found by PGD on the KL divergence of the answers; shape of the images."""
        eps, step_size = parse_eps(self.eps, "eps"), parse_eps(self.step_size, "step_size")
        images = images.detach()
        low, high = (images - eps).clamp_(min=0), (images + eps).clamp_(max=1)
        noise = torch.randn(images.shape, generator=generator, device=images.device, dtype=images.dtype)
        points = torch.clamp(images + START_DEVIATION * noise, low, high)
        with eval_mode(model), torch.enable_grad():
            # Not under no_grad: autocast would cache weights without gradient and use them in the next pass.
            scores = model(images).detach()
            for _ in range(self.steps):
                points.requires_grad_(True)
                divergence = kl_divergence(scores, model(points)).sum()
                (gradient,) = torch.autograd.grad(divergence, points)
                points = torch.clamp(points.detach() + step_size * gradient.sign(), low, high)
        return points.detach()
