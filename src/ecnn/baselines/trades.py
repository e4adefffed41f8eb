"""TRADES (Zhang et al. 2019): right on clean images, and the same answer nearby."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ecnn.asking import eval_mode, full_precision
from ecnn.checks import check_count, check_number, parse_eps
from ecnn.objectives import score_cross_entropy

# The inner search leaves the image by this much noise first: at the image itself the gradient is zero.
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
    """Cross entropy on the images + beta * KL between what is said of them and of the worst points near them.

    Works for any model that gives scores, of which it takes the softmax; an ECNN is so trained through its decoder.
    Points are crafted in eval mode, as in the authors' program, and both passes then run in the model's own mode. The
    gradient flows through both sides of the divergence. Nothing waits for the device: a CUDA graph can hold it.

    Attributes:
        eps: Linf radius on the [0, 1] scale; 0.031 in the authors' program for CIFAR-10.
        steps: of the inner search; 10 there.
        step_size: its length; 0.007 there.
        beta: weight of the divergence; the authors' 1/lambda.

    Departs: the noisy start is cut to the ball and to [0, 1] too, and the clean pass is not run a second time.
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
        """Points within eps of the images and within [0, 1] where the model's answer differs most from theirs."""
        eps, step_size = parse_eps(self.eps, "eps"), parse_eps(self.step_size, "step_size")
        images = images.detach()
        low, high = (images - eps).clamp_(min=0), (images + eps).clamp_(max=1)
        noise = torch.randn(images.shape, generator=generator, device=images.device, dtype=images.dtype)
        points = torch.clamp(images + START_DEVIATION * noise, low, high)
        with eval_mode(model), torch.enable_grad():
            # Not under no_grad: autocast would remember weights without a gradient and hand them to the pass after.
            scores = model(images).detach()
            for _ in range(self.steps):
                points.requires_grad_(True)
                divergence = kl_divergence(scores, model(points)).sum()
                (gradient,) = torch.autograd.grad(divergence, points)
                points = torch.clamp(points.detach() + step_size * gradient.sign(), low, high)
        return points.detach()
