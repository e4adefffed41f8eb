"""The result of an evaluation: accuracies with intervals, worst cases, curves and a table, computed from records."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ecnn.attacks.norms import NORMS, Norm
from ecnn.checks import check_choice, parse_eps
from ecnn.errors import InputError
from ecnn.evaluation.intervals import CONFIDENCE, Interval, Rate
from ecnn.evaluation.outcomes import Criterion, Outcomes

CLEAN = "clean"
#: In `broken_by`, instead of the number of an attack: nothing broke the image, or it was wrong when clean.
STANDS, WRONG = -1, -2
#: Columns of the table that measure the change of an image, with the significant digits shown.
_CHANGES: dict[str, int] = {**dict.fromkeys(NORMS, 3), "l0": 4}


@dataclass(frozen=True)
class Curve:
    """Robust accuracy by radius.

    Attributes:
        eps: increasing radii; the first is 0, without an attack.
        robust: at each radius, the images that the attack at this radius did not break. It can rise with eps if an
            attack fails.
        cumulative: at each radius, the images that no attack up to this radius broke. It never rises. Read this one: a
            point within a small radius lies within the larger ones too.
    """

    eps: tuple[float, ...]
    robust: tuple[Rate, ...]
    cumulative: tuple[Rate, ...]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Outcomes of several attacks on one model and the same images, and the figures computed from them.

    An attack of a cascade was run only on images that earlier attacks did not break. Its accuracies here count the
    images that are right after it and after all attacks before it, so that they compare with those of other attacks.

    Attributes:
        clean: outcomes without an attack.
        outcomes: by name of the attack, or of attack and radius as in "pgd@8/255".
        failures: by name, why an attack could not be run (`evaluate(..., keep_going=True)`) on any image, in which case
            it has no outcomes, or on some.
        undone: by name, (n,) positions of the images on which it could not be run; they keep their clean outcome.
    """

    clean: Outcomes
    outcomes: Mapping[str, Outcomes]
    failures: Mapping[str, str] = field(default_factory=dict)
    undone: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        failures, undone = dict(self.failures), dict(self.undone)
        for name, outcomes in self.outcomes.items():
            if "undone" in outcomes.about:
                left = outcomes.about["undone"]
                failures[name] = f"{len(left['images'])} of {left['of']} images: {left['reason']}"
                undone[name] = np.intersect1d(left["images"], self.clean.index)
        object.__setattr__(self, "failures", failures)
        object.__setattr__(self, "undone", undone)
        for name, outcomes in self.outcomes.items():
            for column in ("index", "label", "image_hash", "clean_prediction"):
                if not np.array_equal(getattr(outcomes, column), getattr(self.clean, column)):
                    raise InputError(
                        f"{name!r} was not evaluated on the same images by the same model ({column})."
                    )

    def __len__(self) -> int:
        return len(self.clean)

    def __repr__(self) -> str:
        return f"Evaluation({len(self)} images, {', '.join([CLEAN, *self.outcomes])})"

    @property
    def clean_accuracy(self) -> float:
        """Share of images that are classified correctly without an attack."""
        return self.clean.rate().accuracy

    @property
    def accuracy(self) -> dict[str, float]:
        """Robust accuracy under each attack: the share of images that are right before and after it."""
        return {name: self.rate_of(name).accuracy for name in self.outcomes}

    @property
    def accuracy_after(self) -> dict[str, float]:
        """Share of images that are right after each attack, even if wrong before; it can exceed clean accuracy.

        The paper's tables show this. With keep="last" it also counts last iterates that are classified correctly again.
        """
        return {name: self.rate_of(name, "correct_after").accuracy for name in self.outcomes}

    @property
    def interval(self) -> dict[str, Interval]:
        """Wilson's 95 % interval of each robust accuracy, and of "clean"."""
        return {
            CLEAN: self.clean.rate().interval,
            **{name: self.rate_of(name).interval for name in self.outcomes},
        }

    def rate_of(self, name: str, criterion: Criterion = "robust") -> Rate:
        """The share of images that meet the criterion: "robust" under an attack, or "correct_after" it."""
        return Rate(int(self._standing(name, criterion).sum()), len(self))

    def _standing(self, name: str, criterion: Criterion = "robust") -> np.ndarray:
        """(image,) whether each meets the criterion under the attack and, in a cascade, under all before it."""
        outcomes = self._outcomes_of(name)
        standing = outcomes.meets(criterion)
        for earlier in outcomes.about.get("after", ()):
            standing = standing & self._outcomes_of(earlier).meets(criterion)
        return standing

    @property
    def broken_by(self) -> np.ndarray:
        """(image,) number of the first attack that broke it; -1 if none did, -2 if it was wrong when clean."""
        breaker = np.where(self.clean.robust, STANDS, WRONG)
        for number, outcomes in enumerate(self.outcomes.values()):
            breaker[(breaker == STANDS) & ~outcomes.robust] = number
        return breaker

    @property
    def worst_case(self) -> Rate:
        """Share of images that are right when clean and after every attack, at every radius."""
        return self.worst_over()

    def worst_over(self, names: Sequence[str] | None = None) -> Rate:
        """Share of images that are right when clean and after each of the named attacks; None names all."""
        return Rate(int(self.survivors(names).sum()), len(self))

    def survivors(self, names: Sequence[str] | None = None) -> np.ndarray:
        """(image,) whether each is right when clean and after each of the named attacks; None names all.

        In a cascade an attack was not run on all images, so a part of the attacks may miss broken images: use all.
        """
        alive = self.clean.robust
        for name in self.outcomes if names is None else names:
            alive = alive & self._outcomes_of(name).robust
        return alive

    def curve(self, name: str) -> Curve:
        """Robust accuracy by eps of an attack that was run at one or more radii.

        Args:
            name: of the attack, without a radius.
        """
        known: dict[str, list[tuple[float, np.ndarray]]] = {}
        for key, outcomes in self.outcomes.items():
            base, eps = outcomes.about.get("base"), outcomes.about.get("eps")
            if base is not None and eps is not None:
                known.setdefault(base, []).append((eps, self._standing(key)))
        if name not in known:
            raise InputError(
                f"no attack called {name!r} was run at a radius; known: {', '.join(known) or 'none'}."
            )
        steps = [(0.0, self.clean.robust), *sorted(known[name], key=lambda step: step[0])]
        return _make_curve(steps)

    def curve_by_distance(
        self, name: str, *, norm: Norm | Literal["l0"], eps: Sequence[float | str]
    ) -> Curve:
        """Robust accuracy by eps from one run: at each radius, images broken at a larger distance count as robust.

        Use it for attacks that search the nearest misclassified point. For an attack with a radius it is only a loose
        upper bound.
        """
        outcomes = self._outcomes_of(name)
        check_choice("norm", norm, _CHANGES)
        if norm not in outcomes.columns:
            raise InputError(
                f"the records of {name!r} were made before {norm} was measured: evaluate once more."
            )
        if outcomes.about.get("after"):
            raise InputError(
                f"{name!r} was run in a cascade: it has no distances for images that other attacks broke."
            )
        distance = np.where(outcomes.robust, np.inf, outcomes.columns[norm])
        radii = sorted({0.0, *(parse_eps(radius) for radius in eps)})
        # A point at distance eps counts as within it, however its float32 distance was rounded.
        steps = [
            (radius, outcomes.correct_clean & (distance > radius + 1e-6)) for radius in radii if radius > 0
        ]
        return _make_curve([(0.0, self.clean.robust), *steps])

    def curves(self) -> dict[str, dict[str, Curve]]:
        """Robust accuracy by radius: a curve for each norm and attack.

        Attacks without a radius get a `curve_by_distance`, in their norm or, for attacks of this package without one,
        in L2. Other attacks without a norm have no curve.
        """
        found: dict[str, dict[str, Curve]] = {}
        for name, outcomes in self.outcomes.items():
            norm, base = _norm_of(outcomes.about.get("attack")), outcomes.about.get("base")
            if norm not in NORMS or base in found.get(norm, {}):
                continue
            if outcomes.about.get("eps") is not None:
                found.setdefault(norm, {})[str(base)] = self.curve(str(base))
            elif norm in outcomes.columns and not outcomes.about.get("after") and outcomes.broken.any():
                radii = np.quantile(
                    outcomes.columns[norm][outcomes.broken], np.linspace(0.05, 1, 20)
                ).tolist()
                found.setdefault(norm, {})[name] = self.curve_by_distance(name, norm=norm, eps=radii)
        return found

    def table(self) -> str:
        """The figures as text: accuracies, median size of the changes that broke an image, and cost."""
        norms = [norm.capitalize() for norm in _CHANGES]
        head = ("attack", "robust", "95 % interval", "after", *norms, "passes", "gradients")
        rows = [_table_row(CLEAN, self.clean, self.clean.rate(), self.clean.rate())]
        rows += [
            _table_row(name, outcomes, self.rate_of(name), self.rate_of(name, "correct_after"))
            for name, outcomes in self.outcomes.items()
        ]
        if len(self.outcomes) > 1:
            rows.append(("worst case", *_rate_cells(self.worst_case), *[""] * (len(head) - 3)))
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (head, *rows)
        ]
        note = (
            f"{len(self)} images. robust: right before and after an attack; after: right after it, as the paper counts."
            f"\n{', '.join(norms)}: median where the attack broke an image. passes, gradients: mean per image."
        )
        if any(outcomes.about.get("after") for outcomes in self.outcomes.values()):
            note += (
                "\nA cascade: each attack was run on the images that those above left; images that those broke "
                "count as broken."
            )
        for name, outcomes in self.outcomes.items():
            if spoiled := outcomes.about.get("nan_gradients"):
                note += f"\n{name}: {spoiled:,} gradients had entries that are not numbers; these counted as zero."
            if outside := outcomes.about.get("outside"):
                note += f"\n{name}: {outside:,} points lie outside the ball or [0, 1] and do not count."
        for name, reason in self.failures.items():
            note += f"\n{name} could not be run: {reason}"
        return "\n".join([*lines, note])

    def to_json(self) -> dict[str, Any]:
        """All figures and their provenance, as plain values for JSON."""
        return {
            "images": len(self),
            "images_sha256": self.images_sha256,
            "model": self.clean.about.get("model"),
            "confidence": CONFIDENCE,
            CLEAN: summarise_outcomes(self.clean),
            "attacks": {name: self.summarise(name) for name in self.outcomes},
            "worst_case": {"attacks": list(self.outcomes), **_rate_json(self.worst_case)},
            **({"failures": dict(self.failures)} if self.failures else {}),
        }

    def summarise(self, name: str) -> dict[str, Any]:
        """The figures of one attack and its provenance, as plain values for JSON."""
        own = summarise_outcomes(self._outcomes_of(name))
        after = self.rate_of(name, "correct_after").accuracy
        return {**own, **_rate_json(self.rate_of(name)), "accuracy_after": after}

    @property
    def images_sha256(self) -> str:
        """A checksum of the images and their labels."""
        return hashlib.sha256(self.clean.image_hash.tobytes() + self.clean.label.tobytes()).hexdigest()

    def _outcomes_of(self, name: str) -> Outcomes:
        if name not in self.outcomes:
            raise InputError(f"no attack is called {name!r}; known: {', '.join(self.outcomes) or 'none'}.")
        return self.outcomes[name]


def summarise_outcomes(outcomes: Outcomes) -> dict[str, Any]:
    """The figures of one attack by itself, without those before it in a cascade, and its provenance, for JSON."""
    found = outcomes.calibration()
    return {
        **_rate_json(outcomes.rate()),
        "accuracy_after": outcomes.rate("correct_after").accuracy,
        "calibration": {
            "nll": found.nll if math.isfinite(found.nll) else str(found.nll),
            "ece": found.ece,
            "brier": found.brier,
        },
        "images": len(outcomes),
        **{key: value for key, value in outcomes.about.items() if key not in ("model", "base", "answers")},
    }


def _rate_json(rate: Rate) -> dict[str, Any]:
    return {"accuracy": rate.accuracy, "interval": list(rate.interval), "robust": rate.successes}


def _norm_of(attack: Any) -> Any:
    """The norm of a described attack (`describe`); for one that wraps another, such as `Transfer`, that of the other.

    Attacks of this package without a norm count as L2. None for other attacks without one: their aim is not known.
    """
    if not isinstance(attack, Mapping):
        return None
    if "attack" in attack:
        return _norm_of(attack["attack"])
    usual = "l2" if str(attack.get("kind")).startswith("ecnn.attacks.") else None
    return attack.get("norm", usual)


def _make_curve(steps: Sequence[tuple[float, np.ndarray]]) -> Curve:
    alive = np.logical_and.accumulate([robust for _, robust in steps])
    return Curve(
        tuple(eps for eps, _ in steps),
        tuple(Rate(int(robust.sum()), len(robust)) for _, robust in steps),
        tuple(Rate(int(row.sum()), len(row)) for row in alive),
    )


def _table_row(name: str, outcomes: Outcomes, robust: Rate, correct_after: Rate) -> tuple[str, ...]:
    broken = outcomes.broken
    changes = [
        f"{np.median(outcomes.columns[norm][broken]):.{digits}g}"
        if broken.any() and norm in outcomes.columns
        else "-"
        for norm, digits in _CHANGES.items()
    ]
    costs = [
        "-" if (count < 0).any() else f"{count.mean():,.0f}"
        for count in (outcomes.forwards, outcomes.backwards)
    ]
    after = f"{correct_after.accuracy:.1%}".replace("%", " %")
    return (name, *_rate_cells(robust), after, *changes, *costs)


def _rate_cells(rate: Rate) -> tuple[str, str]:
    low, high = rate.interval
    return f"{100 * rate.accuracy:.1f} %", f"{100 * low:.1f} - {100 * high:.1f} %"
