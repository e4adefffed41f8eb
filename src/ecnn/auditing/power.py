"""How much an audit may have missed: what attacks that know nothing of each other found, and what more effort found."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from ecnn.evaluation.intervals import wilson_interval

#: One-sided, as in "95 % sure that it is not more".
_SURE = 0.95
#: Of all images: what the last doubling of effort may break and still have flattened.
FLAT = 0.005
#: Of the images that one family broke, how many may the other not break and still be said to see.
_UNSEEN = 0.1


def has_flattened(broken: float, images: int) -> bool:
    """Whether a doubling of the effort that broke so many images' worth broke next to nothing."""
    return broken <= max(1.0, FLAT * images)


@dataclass(frozen=True)
class Turns:
    """What became of doubling the effort on what stands.

    Attributes:
        effort: how often it was doubled.
        doubling: images' worth that the last time broke; None where it was never done.
    """

    effort: int
    doubling: float | None


@dataclass(frozen=True, kw_only=True)
class Power:
    """What the attacks of an audit can be trusted to have found.

    Two families of attacks know nothing of each other: those that follow a gradient, the model's or a surrogate's, and
    those that ask for answers alone. As with two nets in one pond, what both caught tells how much both missed.

    Attributes:
        images: that were audited, of which
        standing: these many stand in the end (of a random model, images' worth).
        broken: these many fell.
        retried: of those that a gradient broke, how many were given to the other family too,
        found_again: and how many it broke.
        alone: images that answers alone broke, and no gradient.
        effort: how often the effort was doubled.
        doubling: images' worth that the last doubling broke; None where none was made.
    """

    images: int
    standing: float
    broken: int
    retried: int
    found_again: int
    alone: int
    effort: int
    doubling: float | None

    @property
    def missed(self) -> float | None:
        """Share of the images that both families may have missed, at 95 %; None where nothing fell to measure it by.

        The larger of two figures: what capture and recapture say, and what another doubling would break if it breaks
        as much as the last.
        """
        if self.standing <= 0:
            return 0.0
        if not self.retried or not self.found_again:
            return None
        least = wilson_interval(self.found_again, self.retried, confidence=2 * _SURE - 1)[0]
        unseen = _at_most(self.alone) * (1 - least) / least
        again = 0.0 if self.doubling is None else _at_most(self.doubling)
        return min(self.standing, max(unseen, again)) / self.images

    @property
    def has_flattened(self) -> bool:
        """Whether the last doubling of effort broke next to nothing."""
        return self.doubling is not None and has_flattened(self.doubling, self.images)

    @property
    def agrees(self) -> bool:
        """Whether one family sees nearly all that the other sees.

        Gradients broke nearly all that fell; or, of a model that gives none, answers alone break nearly all that
        surrogates' gradients broke, where two that it does not break are chance. What neither sees is `missed`, which
        few images leave open.
        """
        by_gradients = self.alone <= max(1.0, _UNSEEN * self.broken)
        unseen = self.retried - self.found_again
        return by_gradients or (self.retried > 0 and unseen <= max(2.0, _UNSEEN * self.retried))

    def sentence(self) -> str:
        """What was measured, for a person."""
        if self.standing <= 0:
            return "Nothing stands that could have been missed."
        parts = []
        if self.retried:
            parts.append(
                f"of {self.retried} images that gradients broke, attacks by answers alone break {self.found_again}; "
                f"and {self.alone} that no gradient broke"
            )
        if self.doubling is not None:
            parts.append(f"twice the effort broke {self.doubling:.3g} more")
        measured = "; ".join(parts) or "no image fell that both families could be tried on"
        missed = self.missed
        found = (
            "How much may be missed is not known"
            if missed is None
            else f"It may miss up to {100 * missed:.1f} points"
        )
        return f"{found}: {measured}."

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with what follows from them."""
        return {**asdict(self), "missed": self.missed}


def read_power(values: Any) -> Power | None:
    """What `Power.to_dict` wrote; None where nothing was written."""
    if values is None:
        return None
    return Power(**{name: value for name, value in values.items() if name != "missed"})


def _at_most(count: float) -> float:
    """What a count may have been, at 95 %, if it is Poisson's; 3 for none (Wilson and Hilferty's approximation)."""
    degrees = 2 * (count + 1)
    normal = NormalDist().inv_cdf(_SURE)
    return degrees * (1 - 2 / (9 * degrees) + normal * math.sqrt(2 / (9 * degrees))) ** 3 / 2
