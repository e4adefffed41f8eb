"""Gradient attacks in a ball."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ecnn.attacks.ball import check_unit_range, parse_eps, project, random_start
from ecnn.attacks.views import Loss, View, make_view
from ecnn.errors import InputError


@dataclass(frozen=True, kw_only=True)
class PGD:
    """Projected gradient descent in Linf (Madry et al. 2018): steps of the gradient's sign, projected to the ball.

    Called inside a training step it can be captured in a CUDA graph: no shape and no branch depends on the data.

    Attributes:
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        steps: gradient steps.
        step_size: length of each, on the [0, 1] scale.
        loss: "margin" (best wrong score minus true score) or "cross_entropy"; not used by the member views.
        on: where it looks, a name of `VIEWS` or a callable (model, images, labels) -> (batch,) loss to raise.
        loss_slack: the margin is not pushed beyond this, the paper's c.
        random_start: begin at a random point of the ball instead of the image.
        keep: "last" returns the last iterate; "best" the iterate with the highest loss, the image included.
    """

    eps: float | str
    steps: int
    step_size: float | str
    loss: Loss = "margin"
    on: str | View = "scores"
    loss_slack: float = math.inf
    random_start: bool = True
    keep: Literal["best", "last"] = "best"

    def __post_init__(self) -> None:
        for length in (self.eps, self.step_size):
            parse_eps(length)
        make_view(self.on, self.loss, self.loss_slack)
        if self.steps < 0:
            raise InputError(f"steps must be from 0 up, not {self.steps}.")
        if self.loss not in get_args(Loss):
            raise InputError(f"loss must be one of {', '.join(get_args(Loss))}, not {self.loss!r}.")
        if self.keep not in ("best", "last"):
            raise InputError(f'keep must be "best" or "last", not {self.keep!r}.')

    def __call__(
        self, model: nn.Module, images: Tensor, labels: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Images of the same shape, within eps and [0, 1]; the model's mode and gradients are left as they are.

        Args:
            images: (batch, channel, height, width) in [0, 1].
            labels: (batch,) the classes to move away from.
            generator: where the random start is drawn from; torch's global generator if not given.
        """
        eps, step_size = parse_eps(self.eps), parse_eps(self.step_size)
        view = make_view(self.on, self.loss, self.loss_slack)
        images = images.detach()
        check_unit_range(images)
        points = random_start(images, eps, generator) if self.random_start else images.clone()
        best, best_loss = images, None
        if self.keep == "best":
            with torch.no_grad():
                best_loss = view(model, images, labels)
        for _ in range(self.steps):
            points.requires_grad_(True)
            with torch.enable_grad():
                losses = view(model, points, labels)
                (gradient,) = torch.autograd.grad(losses.sum(), points)
            points = points.detach()
            if best_loss is not None:
                best, best_loss = _better(best, best_loss, points, losses.detach())
            points = project(points + step_size * gradient.sign(), images, eps)
        if best_loss is None:
            return points
        with torch.no_grad():
            return _better(best, best_loss, points, view(model, points, labels))[0]


def _better(best: Tensor, best_loss: Tensor, points: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Row by row, whichever has the higher loss."""
    wins = losses > best_loss
    return torch.where(wins[:, None, None, None], points, best), torch.where(wins, losses, best_loss)
