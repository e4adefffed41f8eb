"""How many images an audit may have missed, estimated from independent attacks and from doubled effort."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from ecnn.evaluation.intervals import wilson_interval

#: Confidence of the one-sided upper bounds.
_SURE = 0.95
#: A search has converged (flattened) if the last doubling of effort broke at most this share of all images.
FLAT = 0.005
#: Two families of attacks agree if one fails to break at most this share of the images that the other broke.
_UNSEEN = 0.1


def has_flattened(broken: float, images: int) -> bool:
    """Whether a doubling of the effort that broke `broken` images broke next to nothing: at most one, or 0.5 %."""
    return broken <= max(1.0, FLAT * images)


@dataclass(frozen=True)
class Turns:
    """The outcome of repeating attacks with doubled effort on the images that none has broken.

    Attributes:
        effort: how often the effort was doubled.
        doubling: how many images the last doubling broke, a fraction for a random model; None if there was none.
    """

    effort: int
    doubling: float | None


@dataclass(frozen=True, kw_only=True)
class Power:
    """How thoroughly the attacks of an audit searched, by two measurements.

    The first compares two independent families of attacks: those that follow a gradient, of the model or a surrogate,
    and those that only query the model. How many images both break tells how many both miss (capture and recapture).
    The second is how many images the last doubling of the effort broke.

    Attributes:
        images: how many were audited.
        standing: how many of them no attack broke, a fraction for a random model.
        broken: how many of them an attack broke.
        retried: how many of those that a gradient attack broke were also given to the other family.
        found_again: how many of the retried images that family broke.
        alone: how many images query attacks broke that no gradient attack had broken.
        effort: how often the effort was doubled.
        doubling: how many images the last doubling broke, a fraction for a random model; None if there was none.
        proven: how many images are proven robust: no attack can have missed these.
    """

    images: int
    standing: float
    broken: int
    retried: int
    found_again: int
    alone: int
    effort: int
    doubling: float | None
    proven: int = 0

    @property
    def missed(self) -> float | None:
        """Upper bound, at 95 %, of the share of images that the attacks missed; None if no image was found again.

        The larger of two figures: the capture-recapture estimate, and what another doubling would break if it breaks
        as much as the last. It is never more than the share that no attack broke and that is not proven.
        """
        open_ones = self.standing - self.proven
        if open_ones <= 0:
            return 0.0
        if not self.retried or not self.found_again:
            return None
        least = wilson_interval(self.found_again, self.retried, confidence=2 * _SURE - 1)[0]
        unseen = _at_most(self.alone) * (1 - least) / least
        again = 0.0 if self.doubling is None else _at_most(self.doubling)
        return min(open_ones, max(unseen, again)) / self.images

    @property
    def has_flattened(self) -> bool:
        """Whether the last doubling of effort broke next to nothing; False if there was none."""
        return self.doubling is not None and has_flattened(self.doubling, self.images)

    @property
    def agrees(self) -> bool:
        """Whether one family of attacks breaks nearly all images that the other breaks.

        Either gradient attacks broke nearly all broken images. Or query attacks broke nearly all retried images, as on
        a model without useful gradients, where surrogates broke them; two that they miss count as chance. What neither
        family breaks is `missed`, which stays uncertain with few images.
        """
        by_gradients = self.alone <= max(1.0, _UNSEEN * self.broken)
        unseen = self.retried - self.found_again
        return by_gradients or (self.retried > 0 and unseen <= max(2.0, _UNSEEN * self.retried))

    def sentence(self) -> str:
        """One sentence for a reader: how much may be missed, and the counts behind it."""
        if self.standing <= 0:
            return "No unbroken image is left that could have been missed."
        if self.standing <= self.proven:
            return "The attacks missed no image: all that they left are proven robust."
        parts = []
        if self.retried:
            parts.append(
                f"of {self.retried} images that gradient attacks broke, attacks without gradients break "
                f"{self.found_again}; and they break {self.alone} that no gradient attack broke"
            )
        if self.doubling is not None:
            parts.append(f"doubling the effort broke {self.doubling:.3g} more")
        measured = "; ".join(parts) or "no broken image could be tried with both families of attacks"
        missed = self.missed
        found = (
            "How many images the attacks missed is not known"
            if missed is None
            else f"The attacks may have missed up to {100 * missed:.1f} % of the images"
        )
        return f"{found}: {measured}."

    def to_dict(self) -> dict[str, Any]:
        """The attributes and `missed`, as plain JSON values."""
        return {**asdict(self), "missed": self.missed}


def read_power(values: Any) -> Power | None:
    """The `Power` that `Power.to_dict` gave; None stays None."""
    if values is None:
        return None
    return Power(**{name: value for name, value in values.items() if name != "missed"})


def _at_most(count: float) -> float:
    """Upper 95 % bound of the mean of a Poisson count; 3 for a count of 0 (Wilson and Hilferty's approximation)."""
    degrees = 2 * (count + 1)
    normal = NormalDist().inv_cdf(_SURE)
    return degrees * (1 - 2 / (9 * degrees) + normal * math.sqrt(2 / (9 * degrees))) ** 3 / 2
