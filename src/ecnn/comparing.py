"""Compares the scores of two passes in units of their leads: no offset and no masked class hides a change."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: A difference up to this share of a score may be rounding: four units in the last place of float32.
_ROUNDING = 2.0**-21
#: The spread of scores counts up to this many leads of the best score: a class masked by -1e9 is no scale for the rest.
_LEADS = 10.0


def typical_lead(scores: Tensor) -> float:
    """The median, over the images, of the difference of the two largest finite scores; ties do not count.

    Infinite if no image has a lead, so that it bounds nothing.
    """
    finite = torch.where(scores.isfinite(), scores, -math.inf)
    if scores.shape[1] < 2 or not len(scores):
        return math.inf
    first, second = finite.topk(2, dim=1).values.unbind(dim=1)
    leads = (first - second)[second.isfinite() & (first > second)]
    return float(leads.detach().double().median()) if len(leads) else math.inf


def spread_of(scores: Tensor, lead: float | None = None) -> Tensor:
    """(image,) the scale on which scores decide: their range, but at most ten typical leads of the best score.

    The range alone would not do: a class that is never predicted can have any score, such as -1e9.

    Args:
        scores: (image, class); infinite and NaN scores do not count.
        lead: of scores of clean images, if these are of points close to a decision boundary; `typical_lead` of the
            scores themselves if None.
    """
    most = torch.where(scores.isfinite(), scores, -math.inf).amax(dim=1)
    least = torch.where(scores.isfinite(), scores, math.inf).amin(dim=1)
    lengths = torch.where(most.isfinite(), most - least, torch.zeros_like(most))
    return lengths.clamp_max(_LEADS * (typical_lead(scores) if lead is None else lead))


def scores_apart(one: Tensor, other: Tensor) -> Tensor:
    """(image,) the largest difference between two passes' scores beyond rounding, relative to the first's spread.

    A score that lies farther below the best than the spread is compared with that distance instead: where scores are
    that large, so is their rounding, and only a change of that size could change the answer. NaN in both passes, or the
    same infinity in both, counts as equal. A score that is not finite in one pass alone gives inf, and so does any
    difference between scores that were all equal.
    """
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, 0.0, one - other).abs().nan_to_num(nan=math.inf)
    rounding = _ROUNDING * torch.where(one.isfinite(), one, 0.0).abs()
    beyond = (apart - rounding).clamp_min(0)
    finite = one.isfinite()
    best = torch.where(finite, one, -math.inf).amax(dim=1, keepdim=True)
    below = torch.where(finite & best.isfinite(), best - one, 0.0)
    scale = torch.maximum(below, spread_of(one)[:, None])
    return torch.where(beyond > 0, beyond / scale, 0.0).amax(dim=1)
