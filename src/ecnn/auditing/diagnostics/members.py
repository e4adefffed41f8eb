"""Whether the gradients of an ensemble's members are parallel, so that one step attacks many members."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecnn.attacks.views import member_margins
from ecnn.auditing.diagnostics.probes import Probe, diagnostic, unusable
from ecnn.auditing.findings import Finding, ok
from ecnn.objectives import score_margin

#: At most so many, to bound the cost: each member needs a gradient on each image.
_IMAGES, _MEMBERS = 16, 16


@diagnostic("member_gradients", "Pang et al. 2019 and Kariyappa & Qureshi 2019 on diversity of ensembles")
def check_member_gradients(probe: Probe) -> Finding:
    """Mean cosine between the margin gradients of two members, over pairs and images. For information, never an alarm.

    Members with parallel gradients are fooled together. Orthogonal gradients make attacks on the loss of a single
    member harder, and that alone is neither robustness nor a fault.
    """
    rows = probe.rows[probe.right.to(probe.rows.device)][:_IMAGES]
    if not len(rows):
        return ok(
            "No image is classified correctly, so no gradients of members were compared.", {"images": 0}
        )
    points = probe.images[rows].clone().requires_grad_(True)
    with torch.enable_grad():
        margins = _margins(probe, points, probe.labels[rows])
    if margins is None:
        return ok("The model has no members.", {"members": 0})
    chosen = (
        torch.linspace(0, margins.shape[1] - 1, min(_MEMBERS, margins.shape[1]), device="cpu")
        .round()
        .long()
        .tolist()
    )
    gradients = torch.stack([_gradient(margins[:, member], points) for member in chosen], dim=1).double()
    probe.target.narrow(rows).count(1, len(chosen))
    alive = ~unusable(gradients.flatten(0, 1)).view(len(rows), len(chosen))
    scaled = torch.nn.functional.normalize(
        gradients / gradients.abs().amax(dim=2, keepdim=True).clamp_min(1e-300), dim=2
    )
    cosines = scaled @ scaled.transpose(1, 2)
    pairs = (
        alive[:, :, None] & alive[:, None, :] & ~torch.eye(len(chosen), dtype=torch.bool, device=alive.device)
    )
    evidence: dict[str, Any] = {
        "images": len(rows),
        "members": margins.shape[1],
        "members_compared": len(chosen),
        "mean_cosine": float(cosines[pairs].mean()) if bool(pairs.any()) else None,
        "zero_gradients": float((~alive).double().mean()),
    }
    if evidence["mean_cosine"] is None:
        return ok("No two members have usable gradients to compare.", evidence)
    claim = f"The gradients of two members have a cosine of {evidence['mean_cosine']:.2f} on average."
    return ok(claim, evidence)


def _margins(probe: Probe, points: Tensor, labels: Tensor) -> Tensor | None:
    """(image, member) margin of each member's right answer; None if the model has no members."""
    anything: Any = probe.model
    if hasattr(anything, "member_logits"):
        return member_margins(probe.model, points, labels)
    if hasattr(anything, "member_scores"):
        scores = anything.member_scores(points)
        return torch.stack([score_margin(part, labels) for part in scores.unbind(dim=1)], dim=1)
    return None


def _gradient(values: Tensor, points: Tensor) -> Tensor:
    gradient: Tensor | None = None
    if values.requires_grad:
        (gradient,) = torch.autograd.grad(values.sum(), points, retain_graph=True, allow_unused=True)
    return (torch.zeros_like(points) if gradient is None else gradient).flatten(1)
