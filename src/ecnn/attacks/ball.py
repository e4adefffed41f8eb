"""The set an attack may search: a ball around each image, cut to [0, 1]."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ecnn.attacks.draws import Draws
from ecnn.checks import check_choice
from ecnn.errors import InputError

Norm = Literal["linf", "l2"]


def check_norm(norm: str) -> None:
    """Raises InputError unless the norm is one that balls have here."""
    check_choice("norm", norm, get_args(Norm))


def check_unit_range(images: Tensor) -> None:
    """Raises InputError unless all pixels lie in [0, 1]; not while a CUDA graph is recorded, which must not wait."""
    if images.numel() == 0 or (images.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    low, high = (float(bound) for bound in images.aminmax())
    if not (low >= 0 and high <= 1):  # also catches nan
        raise InputError(
            f"images must have pixels in [0, 1], but these reach from {low:.4g} to {high:.4g}: put the normalisation "
            "into the model (ecnn.Normalized) and divide bytes by 255."
        )


def per_image(values: Tensor, images: Tensor) -> Tensor:
    """(batch,) values shaped to be broadcast over the pixels of each image."""
    return values.view(-1, *[1] * (images.ndim - 1))


def l2_norm(differences: Tensor) -> Tensor:
    """(batch,) Euclidean length of each image-shaped row."""
    length: Tensor = torch.linalg.vector_norm(differences.flatten(1), dim=1)
    return length


def length_of(moves: Tensor, norm: Norm) -> Tensor:
    """(batch,) length of each image-shaped row in the norm."""
    return moves.flatten(1).abs().amax(dim=1) if norm == "linf" else l2_norm(moves)


def project(points: Tensor, images: Tensor, norm: Norm, eps: float) -> Tensor:
    """Points within eps of the images and within [0, 1]: the nearest ones in Linf, scaled back and cut in L2.

    Cutting to [0, 1] moves a point no further from its image, which lies there.
    """
    if norm == "linf":
        low, high = (images - eps).clamp_(min=0), (images + eps).clamp_(max=1)
        return torch.minimum(torch.maximum(points, low), high)
    moves = points - images
    scale = (eps / l2_norm(moves).clamp_min(1e-30)).clamp(max=1)
    return (images + moves * per_image(scale, images)).clamp(0, 1)


def random_start(images: Tensor, norm: Norm, eps: float, draws: Draws) -> Tensor:
    """A uniformly drawn point of each image's ball, cut to [0, 1]."""
    shape = images.shape[1:]
    if norm == "linf":
        return project(images + (2 * draws.uniform(*shape, dtype=images.dtype) - 1) * eps, images, norm, eps)
    direction = draws.normal(*shape, dtype=images.dtype)
    # A uniform point of a ball in n dimensions has a radius distributed as u^(1/n).
    radius = eps * draws.fold(3).uniform(dtype=images.dtype) ** (1 / max(1, images[0].numel()))
    moves = direction * per_image(radius / l2_norm(direction).clamp_min(1e-30), images)
    return project(images + moves, images, norm, eps)


def steepest(gradient: Tensor, norm: Norm) -> Tensor:
    """The move of length 1 in the norm that raises the loss fastest; zero where the gradient is."""
    if norm == "linf":
        return gradient.sign()
    # Dividing by the largest entry first keeps the squares of tiny gradients from vanishing.
    scaled = gradient / per_image(gradient.flatten(1).abs().amax(dim=1).clamp_min(1e-38), gradient)
    return scaled / per_image(l2_norm(scaled).clamp_min(1e-12), gradient)
