"""When a count of images is too large to be chance, and the tolerances that diagnostics share."""

from __future__ import annotations

import math

#: One false alarm in a thousand per check: with about twenty checks, 2 % of honest models would meet one by chance
#: even if each of them sat exactly at the tolerances below.
ALPHA = 0.001

#: Share of images by which two attacks of the same kind may differ before one of them is said to fail. It is the error
#: that the audit as a whole grants a claim (5 points).
TOLERANCE = 0.05

#: The same where the weaker attack follows from the stronger one: one step, noise or a blind search can do nothing that
#: a working gradient attack with its many steps cannot. AutoAttack warns at 0.2 points, of thousands of images and 100
#: steps with restarts; diagnostics have tens of images and a single start.
DOMINATED_TOLERANCE = 0.02


#: The same among images that stood the whole suite: one of them that a single simple attack breaks is a miss of the
#: suite, and of an honest model next to none does. Of 32 such images 4 are an alarm, of 96 6.
STOOD_TOLERANCE = 0.01


def tail_probability(count: int, n: int, rate: float) -> float:
    """Chance of `count` or more among n images if each has the chance `rate` by itself (exact binomial)."""
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
    """Whether so many of n images are more than a share of `rate` explains, one-sided at ALPHA.

    Few images can never sound an alarm by themselves: of one image, one is not more than 5 % explains.
    """
    return tail_probability(count, n, rate) < ALPHA
