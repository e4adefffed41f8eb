"""How far two passes lie apart: in units in which scores decide, whatever is added to all scores or to one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ecnn.comparing import scores_apart, spread_of, typical_lead

INF, NAN = math.inf, math.nan


def draw(seed: int, *, images: int = 9, classes: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 4 * torch.randn(images, classes, generator=generator, dtype=torch.float64)


def test_the_lead_is_the_median_over_images_without_ties() -> None:
    scores = torch.tensor(
        [[5.0, 1.0, 4.0], [2.0, 2.0, 0.0], [0.0, 9.0, 2.0], [3.0, -INF, 1.0], [NAN, INF, 7.0]]
    )
    assert typical_lead(scores) == 2.0  # of 1, 7 and 2
    assert typical_lead(scores[1:2]) == typical_lead(scores[4:]) == typical_lead(scores[:0]) == INF
    assert typical_lead(scores[:, :1]) == INF


def test_the_spread_is_the_range_and_at_most_ten_leads() -> None:
    scores = torch.tensor(
        [[1.0, 0.0, -4.0], [0.0, 1.0, -1e9], [2.0, 2.0, 2.0], [NAN, INF, -INF], [3.0, 1.0, -INF]]
    )
    assert typical_lead(scores) == 1.0
    assert spread_of(scores).tolist() == [5.0, 10.0, 0.0, 0.0, 2.0]
    assert spread_of(scores, lead=0.2).tolist() == [2.0, 2.0, 0.0, 0.0, 2.0]


@pytest.mark.parametrize("offset", [0.0, -1e5, 1e6])
def test_an_offset_changes_nothing(offset: float) -> None:
    one, other = draw(0), draw(0) + 0.01 * draw(1)
    moved = scores_apart(one + offset, other + offset)
    rounding = 2.0**-21 * (abs(offset) + 20) / spread_of(one)
    assert ((scores_apart(one, other) - moved).abs() <= rounding + 1e-9).all()
    assert (scores_apart(one, one + 0.5) > 0).all()  # but an offset in one of the passes is a difference


@pytest.mark.parametrize("low", [-1e4, -1e9, -INF])
def test_a_masked_class_hides_no_difference(low: float) -> None:
    """Without the mask the spread is the range; with it, ten leads, which is at most some three times as much."""
    mask = torch.full((9, 1), low, dtype=torch.float64)
    one, other = draw(0), draw(0) + 0.01 * draw(1)
    apart, beside = (
        scores_apart(one, other),
        scores_apart(torch.cat([one, mask], 1), torch.cat([other, mask], 1)),
    )
    assert (apart > 1e-3).all()
    assert (beside > apart / 10).all()


def test_rounding_is_no_difference_and_everything_else_is() -> None:
    one = (draw(0) + 1e6).float()
    assert not scores_apart(one, torch.nextafter(one, one + 1)).any()
    assert not scores_apart(one, one).any()
    assert (scores_apart(draw(0), draw(0) * (1 + 1e-4)) > 0).all()


def test_rounding_of_scores_far_below_the_best_is_no_difference() -> None:
    """Such as -exp(-2 z): logits rounded otherwise move a score near -1e6 by more than the leads of the best."""
    logits = draw(0)
    one, other = -(-2 * logits).exp(), -(-2 * logits * (1 + 1e-7)).exp()
    assert (one - other).abs().max() > 1e-3
    assert (scores_apart(one, other) < 1e-4).all()
    lifted = other.clone()
    lifted[0, logits[0].argmin()] = 0.0  # but what becomes the best is one
    assert scores_apart(one, lifted)[0] > 0.99


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([INF, 1.0], [INF, 1.0], 0.0),
        ([NAN, 1.0], [0.0, 1.0], INF),
        ([INF, 1.0], [-INF, 1.0], INF),
        ([2.0, 2.0], [2.0, 3.0], INF),
        ([2.0, 2.0], [2.0, 2.0], 0.0),
        ([0.0, 2.0], [0.0, 3.0], 0.5),
    ],
)
def test_scores_that_are_not_finite_and_scores_that_are_equal(
    one: list[float], other: list[float], apart: float
) -> None:
    found = float(scores_apart(torch.tensor([one]), torch.tensor([other])))
    assert found == pytest.approx(apart, abs=1e-6)
