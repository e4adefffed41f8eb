"""An exact test of whether a count of images is too large to be chance, and the tolerances of the diagnostics."""

from __future__ import annotations

import math

#: One false alarm in a thousand per check: with about twenty checks, 2 % of honest models would meet one by chance
#: even if each of them sat exactly at the tolerances below.
ALPHA = 0.001

#: Share of images by which two attacks of the same kind may differ before one of them counts as failing. It equals the
#: error that the audit as a whole allows a claim (5 points).
TOLERANCE = 0.05

#: The same where one attack should dominate the other: one step, noise or a search without gradients finds nothing that
#: a working gradient attack with many steps does not. AutoAttack warns at 0.2 points, for thousands of images and 100
#: steps with restarts; diagnostics have tens of images and a single start.
DOMINATED_TOLERANCE = 0.02


#: The same among images that the whole suite left: the suite has missed each of them that one simple attack breaks, and
#: on an honest model hardly any is broken. An alarm needs 4 of 32 such images, or 6 of 96.
STOOD_TOLERANCE = 0.01


def tail_probability(count: int, n: int, rate: float) -> float:
    """Probability of `count` or more among n images if each counts with probability `rate` (exact binomial)."""
    if count <= 0:
        return 1.0
    if count > n or rate <= 0:
        return 0.0
    if rate >= 1:
        return 1.0
    logs = (
        math.lgamma(n + 1)
        - math.lgamma(k + 1)
        - math.lgamma(n - k + 1)
        + k * math.log(rate)
        + (n - k) * math.log1p(-rate)
        for k in range(count, n + 1)
    )
    return min(1.0, math.fsum(math.exp(log) for log in logs))


def exceeds(count: int, n: int, rate: float) -> bool:
    """Whether `count` of n images is significantly more than a share of `rate`, one-sided at ALPHA.

    A very small sample never is: two of two images are not significantly more than 5 %.
    """
    return tail_probability(count, n, rate) < ALPHA
