"""Per-image outcomes of one attack: the records from which every accuracy is computed."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ecnn import files
from ecnn.checks import check_choice
from ecnn.errors import InputError
from ecnn.evaluation.calibration import BINS, Calibration, summarise
from ecnn.evaluation.intervals import CONFIDENCE, PairedComparison, Rate, compare_counts

FORMAT, VERSION = "ecnn-outcomes", "2"
_WITHOUT_L1 = "1"  # version of older files, without the L1 length of the changes
COLUMNS: dict[str, str] = {
    "index": "int32",
    "image_hash": "uint64",
    "label": "int32",
    "clean_prediction": "int32",
    "prediction": "int32",
    "linf": "float32",
    "l2": "float32",
    "l1": "float32",
    "l0": "int32",
    "forwards": "int32",
    "backwards": "int32",
    "nll": "float32",
    "confidence": "float32",
    "brier": "float32",
}
#: Entries of `about` that must agree between records of the same attack.
IDENTITY = ("attack", "seed", "model", "after")
#: Which images count: those right before and after the attack, or those right after it, even if wrong before.
Criterion = Literal["robust", "correct_after"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Outcomes:
    """Outcomes of one attack on one model; read-only arrays (image,).

    Attributes:
        name: of the attack; "clean" for no attack.
        index: position of the image in its split, increasing.
        image_hash: checksum of the image's pixels, by which records of other images are recognised.
        label: true class.
        clean_prediction: predicted class of the clean image; -1 if the scores give no answer.
        prediction: predicted class of the attacked image; -1 likewise.
        linf: largest change of a value, on the [0, 1] scale.
        l2: Euclidean length of the change.
        l1: sum of the absolute changes of all values; None if unknown, in records of version 1.
        l0: number of values (channel, row, column) that changed.
        forwards: forward passes of the attack; -1 if the attack does not count them; 0 if it was not run: in a cascade
            because the image was wrong or broken already, with keep_going because it could not be run.
        backwards: gradients that the attack computed; -1 likewise.
        nll: negative log probability of the true class after the attack, in nats, from a softmax of the scores.
        confidence: probability of the predicted class after the attack.
        brier: squared distance of the probabilities from the one-hot truth after the attack, from 0 to 2.
        about: where the records come from: settings of the attack, seed, model, environment, time; in a cascade
            "after", the names of the attacks before this one.
    """

    name: str
    index: np.ndarray
    image_hash: np.ndarray
    label: np.ndarray
    clean_prediction: np.ndarray
    prediction: np.ndarray
    linf: np.ndarray
    l2: np.ndarray
    l1: np.ndarray | None
    l0: np.ndarray
    forwards: np.ndarray
    backwards: np.ndarray
    nll: np.ndarray
    confidence: np.ndarray
    brier: np.ndarray
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for column, given in self.columns.items():
            dtype = COLUMNS[column]
            given = np.asarray(given)
            values = given.astype(dtype)
            if values.ndim != 1 or len(values) != len(self.index):
                raise InputError(
                    f"outcomes of {self.name!r}: every column needs one value per image ({column})."
                )
            if values.dtype.kind != "f" and not np.array_equal(values, given):
                raise InputError(f"outcomes of {self.name!r}: {column} does not fit in {dtype}.")
            if values.dtype.kind == "f" and not (values >= 0).all():  # also false for nan
                raise InputError(f"outcomes of {self.name!r}: {column} must be from 0 up.")
            values.setflags(write=False)
            object.__setattr__(self, column, values)
        if not len(self.index):
            raise InputError(f"outcomes of {self.name!r}: there is no image.")
        if (np.diff(self.index) <= 0).any() or self.index[0] < 0:
            raise InputError(f"outcomes of {self.name!r}: positions must rise from 0 up, each once.")

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        return f"Outcomes({self.name!r}, {len(self)} images, robust {self.rate()})"

    @property
    def attacked(self) -> np.ndarray:
        """(image,) whether the attack was run on the image."""
        return np.asarray(self.forwards != 0)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The per-image arrays by the names of `COLUMNS`, without those that are None."""
        every = {column: getattr(self, column) for column in COLUMNS}
        return {column: values for column, values in every.items() if values is not None}

    @property
    def correct_clean(self) -> np.ndarray:
        """(image,) whether the clean image is classified correctly."""
        return np.asarray(self.clean_prediction == self.label)

    @property
    def correct_after(self) -> np.ndarray:
        """(image,) whether the attacked image is classified correctly; the paper's protocol counts these."""
        return np.asarray(self.prediction == self.label)

    @property
    def robust(self) -> np.ndarray:
        """(image,) whether the image is classified correctly before and after the attack."""
        return np.asarray(self.correct_clean & self.correct_after)

    @property
    def true_probability(self) -> np.ndarray:
        """(image,) probability of the true class after the attack."""
        return np.asarray(np.exp(-self.nll))

    @property
    def broken(self) -> np.ndarray:
        """(image,) whether the image is classified correctly before the attack and wrong after it."""
        return np.asarray(self.correct_clean & ~self.correct_after)

    def rate(self, criterion: Criterion = "robust") -> Rate:
        """The share of images that meet the criterion: "robust" or "correct_after"."""
        return Rate(int(self.meets(criterion).sum()), len(self))

    def meets(self, criterion: Criterion) -> np.ndarray:
        """(image,) whether each image meets the criterion: "robust" or "correct_after"."""
        check_choice("criterion", criterion, get_args(Criterion))
        column: np.ndarray = getattr(self, criterion)
        return column

    def calibration(self, *, bins: int = BINS) -> Calibration:
        """NLL, ECE and Brier score on the attacked images, over all images."""
        return summarise(self.nll, self.brier, self.confidence, self.correct_after, bins=bins)

    def take(self, rows: np.ndarray | slice) -> Outcomes:
        """The records of some images, by rows of these arrays or a mask."""
        chosen: dict[str, Any] = {column: values[rows] for column, values in self.columns.items()}
        return dataclasses.replace(self, **chosen)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes a .npz file that NumPy reads without pickles, with `robust` and `correct_after` for other programs."""
        arrays = {**self.columns, "correct_after": self.correct_after, "robust": self.robust}
        version = _WITHOUT_L1 if self.l1 is None else VERSION
        header = {"format": FORMAT, "version": version, "name": self.name, "about": json.dumps(self.about)}
        return files.write_arrays(path, arrays, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Outcomes:
        """The outcomes in a file that `save` wrote; InputError if it is truncated, altered or of another kind."""
        arrays, header = files.read_arrays(path)
        if header.get("format") != FORMAT or header.get("version") not in (VERSION, _WITHOUT_L1):
            raise InputError(f"{path} does not hold outcomes of this version of ecnn.")
        wanted = {**COLUMNS, "correct_after": "bool", "robust": "bool"}
        if header["version"] == _WITHOUT_L1:
            del wanted["l1"]
        for column, dtype in wanted.items():
            if column not in arrays or arrays[column].dtype != dtype:
                raise InputError(f"{path} is damaged: the column {column!r} is missing or is not {dtype}.")
        try:
            about = json.loads(header["about"])
            columns: dict[str, Any] = {column: arrays.get(column) for column in COLUMNS}
            outcomes = cls(name=header["name"], about=dict(about), **columns)
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{path} is damaged: {error}") from error
        for column in get_args(Criterion):
            if not np.array_equal(arrays[column], getattr(outcomes, column)):
                raise InputError(f"{path} is damaged: {column} contradicts the predictions.")
        return outcomes


def join(parts: Sequence[Outcomes]) -> Outcomes:
    """The records of all parts as one, by increasing position; of an image in several parts the first is kept.

    Seconds and counts are summed and environments collected, since parts may come from different days and machines.
    """
    first = parts[0]
    index, rows = np.unique(np.concatenate([part.index for part in parts]), return_index=True)
    columns: dict[str, Any] = dict.fromkeys(COLUMNS)
    for name in COLUMNS:
        if all(name in part.columns for part in parts):
            columns[name] = np.concatenate([part.columns[name] for part in parts])[rows]
    abouts = [part.about for part in parts]
    about = {
        **first.about,
        "seconds": sum(about.get("seconds", 0.0) for about in abouts),
        **{
            count: sum(about.get(count, 0) for about in abouts)
            for count in ("disagreements", "nan_gradients")
        },
        **({"outside": outside} if (outside := sum(about.get("outside", 0) for about in abouts)) else {}),
        "environments": sorted({line for about in abouts for line in about.get("environments", ())}),
        "started": min(about.get("started", "") for about in abouts),
        "finished": max(about.get("finished", "") for about in abouts),
    }
    assert np.array_equal(index, columns["index"])
    return Outcomes(name=first.name, about=about, **columns)


def compare(
    a: Outcomes, b: Outcomes, *, criterion: Criterion = "robust", confidence: float = CONFIDENCE
) -> PairedComparison:
    """The difference of a and b on the same images, with its interval (Newcombe 1998, method 10) and McNemar's test.

    Two models often err on the same images, so the interval of the difference is narrower than two separate intervals
    suggest. Raises InputError if the images differ, or if one was run after other attacks in a cascade.
    """
    for column in ("index", "label", "image_hash"):
        if not np.array_equal(getattr(a, column), getattr(b, column)):
            raise InputError(
                f"{a.name!r} and {b.name!r} are not outcomes of the same images ({len(a)} and {len(b)} images, other "
                f"{column}): evaluate both on the same first images of one split."
            )
    for outcomes in (a, b):
        if outcomes.about.get("after"):
            raise InputError(
                f"{outcomes.name!r} was run only on images that {', '.join(outcomes.about['after'])} left, so its "
                "outcomes alone say little: compare evaluations that were made without cascade=True."
            )
    won_a, won_b = a.meets(criterion), b.meets(criterion)
    counts = [int((one & other).sum()) for one in (won_a, ~won_a) for other in (won_b, ~won_b)]
    both, only_a, only_b, neither = counts
    return compare_counts(both, only_a, only_b, neither, confidence)
