"""The border check: just before the model's answer changes, its score margin should be nearly zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecnn.asking import full_precision
from ecnn.attacks.images import per_image
from ecnn.auditing.diagnostics.probes import Probe, diagnostic, percent
from ecnn.auditing.diagnostics.statistics import TOLERANCE, exceeds
from ecnn.auditing.findings import Finding, alarm, note, ok
from ecnn.objectives import predicted_classes, score_margin

#: Bisection steps on the line to an image of another class; the last interval is a few times float32's precision.
_HALVINGS = 20
#: Share of the image's margin that may be left at the border. Scores that explain the answers have almost nothing left.
#: Where pixels or features are rounded, one of them jumps at the border, which leaves a few hundredths.
_LEFT = 0.5


@diagnostic(
    "border",
    "walks to the border by predicted classes alone; after Brendel et al. 2018, Decision-based attacks",
)
def check_border(probe: Probe) -> Finding:
    """Alarm where the score margin at the border of the class is still more than half of that at the image.

    For each image that PGD left, bisection finds the border on the line to the nearest image with another answer, by
    predicted classes alone. The margin at the last point with the right answer is compared with that at the image.
    Scores that do not explain the answers, such as a decision added to the scores of another network, keep their margin
    up to the border. Attacks that climb such scores come no nearer to it.
    """
    answers = predicted_classes(probe.scores)
    standing = probe.standing.to(answers.device)
    margins = score_margin(full_precision(probe.scores), probe.labels)
    rows, ends = _find_ends(probe, standing & torch.isfinite(margins) & (margins > 0), answers)
    evidence: dict[str, Any] = {"images": len(rows)}
    if not len(rows):
        claim = "No image that withstands PGD has another image with a different answer to walk to."
        return note(claim, evidence, kind="nothing_to_attack")
    last = torch.cat([_margin_at_border(probe, rows[part], ends[part]) for part in _parts(probe, rows)])
    left = (last / margins[rows]).nan_to_num(nan=0.0).float().cpu()
    kept, n = int((left > _LEFT).sum()), len(rows)
    evidence |= {"margin_left": left.quantile(left.new_tensor([0.25, 0.5, 0.75])), "kept_their_margin": kept}
    if exceeds(kept, n, TOLERANCE):
        claim = (
            f"Where the predicted class changes, the scores of {percent(kept, n)} still have more than half of their "
            "margin: these scores do not explain the predicted classes."
        )
        advice = "Attacks that follow these scores come no nearer to the border: use attacks that need only classes."
        return alarm(claim, evidence, advice)
    middle = float(left.median())
    return ok(
        f"Where the predicted class changes, {100 * middle:.1f} % of the score margin is left (median).",
        evidence,
    )


def _find_ends(probe: Probe, wanted: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) positions of the wanted images that have an image with another answer, and of the nearest such image."""
    flat = probe.images.flatten(1)
    apart = torch.cdist(flat, flat)
    apart = apart.masked_fill((answers == probe.labels[:, None]) | (answers < 0), torch.inf)
    nearest = apart.min(dim=1)
    rows = torch.nonzero(wanted & torch.isfinite(nearest.values)).squeeze(1)
    return rows, nearest.indices[rows]


def _parts(probe: Probe, rows: Tensor) -> tuple[Tensor, ...]:
    return probe.groups(torch.arange(len(rows), device=rows.device))


def _margin_at_border(probe: Probe, rows: Tensor, ends: Tensor) -> Tensor:
    """(n,) the score margin at the last point with the right answer on the way from the images to the ends."""
    images, goals, labels = probe.images[rows], probe.images[ends], probe.labels[rows]
    target = probe.target.narrow(rows)
    low, high = (
        torch.full((len(rows),), share, dtype=images.dtype, device=images.device) for share in (0, 1)
    )
    last = score_margin(full_precision(probe.scores[rows]), labels)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        scores = full_precision(target.scores(torch.lerp(images, goals, per_image(middle, images))))
        right = predicted_classes(scores) == labels
        low, high = torch.where(right, middle, low), torch.where(right, high, middle)
        last = torch.where(right, score_margin(scores, labels), last)
    return last
