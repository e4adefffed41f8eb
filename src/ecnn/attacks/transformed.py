"""PGD for images that are still misclassified when rotated, scaled, shifted or lit differently (EOT)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor

from ecnn.attacks.base import BallAttack, Cost, Target, gradient_of
from ecnn.attacks.images import per_image
from ecnn.attacks.norms import NORMS
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import Aim, Loss, find_view
from ecnn.checks import check_count, check_number, parse_eps


@dataclass(frozen=True, kw_only=True)
class TransformedPGD(BallAttack):
    """PGD on the mean loss over random transformations of the image (EOT, Athalye et al. 2018).

    Each step draws new transformations for each image: rotation about the centre, scaling and shift, with bilinear
    interpolation and repeated edge pixels, then a change of brightness. The search returns its last point, without
    regard to whether the untransformed point is misclassified; such points transfer better to other models.

    Attributes:
        norm: of the ball and of the steps, a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        steps: gradient steps from a random point of the ball.
        step_size: length of a step, on the [0, 1] scale.
        transformations: how many are drawn for each image in each step.
        degrees: largest rotation in either direction.
        scale: largest relative change of size.
        shift: largest shift along each axis, as a share of the image's side.
        brightness: largest relative change of brightness.
        loss, on: as in `PGD`.
    """

    steps: int
    step_size: float | str
    transformations: int = 8
    degrees: float = 15.0
    scale: float = 0.15
    shift: float = 0.1
    brightness: float = 0.2
    loss: Loss = "cross_entropy"
    on: str = "scores"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("steps", self.steps, least=0)
        check_count("transformations", self.transformations)
        parse_eps(self.step_size, "step_size")
        check_number("degrees", self.degrees, most=180)
        for name in ("scale", "shift", "brightness"):
            check_number(name, getattr(self, name), most=1, below=True)
        find_view(self.on).check_loss(self.loss)

    def cost(self, num_classes: int) -> Cost:
        looks = self.steps * self.transformations * find_view(self.on).passes_per_look
        return Cost(2 + looks, looks)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        norm = NORMS[self.norm]
        points = norm.random(images, self.radius, draws.fold(0))
        for step in range(self.steps):
            gradient = self._mean_gradient(target, points, labels, draws.fold(1 + step))
            moved = points + parse_eps(self.step_size) * norm.step(gradient, points)
            points = norm.project(moved, images, self.radius)
        return points

    def _mean_gradient(self, target: Target, points: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        view, total = find_view(self.on), torch.zeros_like(points)
        for number in range(self.transformations):
            leaf = points.detach().requires_grad_(True)
            with torch.enable_grad(), target.autocast():
                seen = self.transform(leaf, draws.fold(number))
                look = view.look(target.model, seen, Aim(labels, loss=self.loss))
                total += gradient_of(look.losses, leaf)
            target.count(view.passes_per_look, view.passes_per_look)
        return total / self.transformations

    def transform(self, images: Tensor, draws: Draws) -> Tensor:
        """The images, each under its own random transformation, cut to [0, 1]."""
        drawn = 2 * draws.uniform(5, dtype=images.dtype) - 1
        angle, size = drawn[:, 0] * math.radians(self.degrees), 1 + self.scale * drawn[:, 1]
        cos, sin = angle.cos() / size, angle.sin() / size
        move = 2 * self.shift * drawn[:, 2:4]  # the side has length 2 in the grid's measure
        rows = torch.stack([cos, -sin, move[:, 0], sin, cos, move[:, 1]], dim=1)
        grid = F.affine_grid(rows.view(-1, 2, 3), list(images.shape), align_corners=False)
        seen = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
        return (seen * per_image(1 + self.brightness * drawn[:, 4], seen)).clamp(0, 1)
