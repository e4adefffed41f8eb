"""Confidence intervals for the accuracy on some images, and for the difference of two accuracies on the same images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from ecnn.checks import check_count
from ecnn.errors import InputError

CONFIDENCE = 0.95
Interval = tuple[float, float]


def wilson_interval(successes: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Lower and upper end of Wilson's score interval for a share (Wilson 1927), both in [0, 1].

    Unlike the normal approximation it has a width above zero even if none or all of the images pass.
    """
    _check_counts(successes=successes, failures=n - successes)
    z = _quantile(confidence)
    share = successes / n
    centre = share + z * z / (2 * n)
    reach = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = ((centre + side * reach) / (1 + z * z / n) for side in (-1, 1))
    # These ends are exactly 0 and 1; rounding would miss them by 1e-17.
    return (0.0 if successes == 0 else low, 1.0 if successes == n else high)


@dataclass(frozen=True)
class Rate:
    """A share of images, with the counts from which its interval follows.

    Attributes:
        successes: number of images that passed.
        n: number of all images.
    """

    successes: int
    n: int

    @property
    def accuracy(self) -> float:
        """The share, between 0 and 1."""
        return self.successes / self.n

    @property
    def interval(self) -> Interval:
        """Wilson's 95 % interval."""
        return wilson_interval(self.successes, self.n)

    def __float__(self) -> float:
        return self.accuracy

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.accuracy:.1%} [{low:.1%}, {high:.1%}]".replace("%", " %")


@dataclass(frozen=True)
class PairedComparison:
    """A comparison of two models, or two attacks, on the same images.

    Attributes:
        difference: share of a minus share of b.
        interval: of the difference, by Newcombe's method 10.
        p_value: of the exact two-sided McNemar test; the null hypothesis is that neither is better.
        only_a: number of images that only a got right.
        only_b: number of images that only b got right.
        n: number of images.
    """

    difference: float
    interval: Interval
    p_value: float
    only_a: int
    only_b: int
    n: int


def compare_counts(
    both: int, only_a: int, only_b: int, neither: int, confidence: float = CONFIDENCE
) -> PairedComparison:
    """The comparison of two shares, from the numbers of images that both, one or neither got right."""
    _check_counts(both=both, only_a=only_a, only_b=only_b, neither=neither)
    n = both + only_a + only_b + neither
    interval = _newcombe_interval(both, only_a, only_b, neither, confidence)
    return PairedComparison(
        (only_a - only_b) / n, interval, mcnemar_p_value(only_a, only_b), only_a, only_b, n
    )


def mcnemar_p_value(only_a: int, only_b: int) -> float:
    """Probability of a split at least this uneven if each image on which the two differ were a fair coin toss."""
    _check_counts(only_a=only_a, only_b=only_b, may_be_empty=True)
    tosses = only_a + only_b
    term = total = 1
    for heads in range(min(only_a, only_b)):  # whole numbers: exact for any count
        term = term * (tosses - heads) // (heads + 1)
        total += term
    return min(1.0, float(2 * total / 2**tosses))


def _newcombe_interval(both: int, only_a: int, only_b: int, neither: int, confidence: float) -> Interval:
    """Method 10 of Newcombe (1998, Stat. Med. 17:2635): combines two Wilson intervals with the shares' correlation.

    It stays within [-1, 1]. Its width is above zero even where Wald's is zero, for instance when the two never differ.
    """
    n = both + only_a + only_b + neither
    count_a, count_b = both + only_a, both + only_b
    share_a, share_b = count_a / n, count_b / n
    (low_a, high_a), (low_b, high_b) = (wilson_interval(count, n, confidence) for count in (count_a, count_b))
    margins = count_a * (n - count_a) * count_b * (n - count_b)
    agreement = both * neither - only_a * only_b
    corrected = max(agreement - n / 2, 0.0) if agreement > 0 else float(agreement)
    correlation = corrected / math.sqrt(margins) if margins else 0.0
    difference = (only_a - only_b) / n

    def reach(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one * one - 2 * correlation * one * other + other * other))

    return (
        max(-1.0, difference - reach(share_a - low_a, high_b - share_b)),
        min(1.0, difference + reach(high_a - share_a, share_b - low_b)),
    )


def _quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise InputError(f"confidence must lie between 0 and 1, not {confidence!r}.")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _check_counts(*, may_be_empty: bool = False, **counts: int) -> None:
    for name, count in counts.items():
        check_count(name, count, least=0)
    if not may_be_empty and not sum(counts.values()):
        raise InputError("a share of no images has no interval: count at least one.")
