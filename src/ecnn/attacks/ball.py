"""The set an attack may search: a ball around each image, cut to [0, 1]."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from ecnn.errors import InputError


def parse_eps(eps: float | str) -> float:
    """The radius as a number; `"8/255"` is accepted as people write it."""
    try:
        value = float(Fraction(eps)) if isinstance(eps, str) else float(eps)
    except (ValueError, ZeroDivisionError):
        raise InputError(f'eps must be a number or a fraction such as "8/255", not {eps!r}.') from None
    if not 0 <= value < float("inf"):
        raise InputError(f"eps must be from 0 up and finite, not {eps!r}.")
    return value


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


def project(points: Tensor, images: Tensor, eps: float) -> Tensor:
    """The nearest points (in Linf) within eps of the images and within [0, 1]."""
    low, high = (images - eps).clamp_(min=0), (images + eps).clamp_(max=1)
    return torch.minimum(torch.maximum(points, low), high)


def random_start(images: Tensor, eps: float, generator: torch.Generator | None = None) -> Tensor:
    """A uniformly drawn point of each image's Linf ball, cut to [0, 1]."""
    noise = torch.rand(images.shape, device=images.device, dtype=images.dtype, generator=generator)
    return project(images + (2 * noise - 1) * eps, images, eps)
