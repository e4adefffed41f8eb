"""What became of each image under one attack: the records that every accuracy is computed from."""

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
_WITHOUT_L1 = "1"  # the version of files whose attacks were not measured in L1
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
#: What must agree between records for them to be parts of one.
IDENTITY = ("attack", "seed", "model", "after")
#: What an image must be to be counted: right before and after the attack, or right after it alone.
Criterion = Literal["robust", "correct_after"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Outcomes:
    """One attack on one model, image by image; arrays (image,), read-only.

    Attributes:
        name: of the attack; "clean" for no attack.
        index: position of the image in its split.
        image_hash: checksum of its pixels, so that records of other images are recognised.
        label: true class.
        clean_prediction: class predicted for the image as it is; -1 where the scores were not numbers.
        prediction: class predicted for what the attack returned.
        linf: largest change of a value, on the [0, 1] scale.
        l2: Euclidean length of the change.
        l1: sum of all changes of values; None if it is not known, in records of version 1.
        l0: number of values (channel, row, column) that changed.
        forwards: passes that the attack asked for; -1 where an attack of other make does not say; 0 where it was not
            run: in a cascade because another had broken the image, with keep_going because it could not be.
        backwards: gradients that it asked for; -1 likewise.
        nll: negative log probability of the true class after the attack, in nats, from a softmax of the scores.
        confidence: probability of the predicted class after the attack.
        brier: squared distance of the probabilities from the truth, 0 to 2.
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
        """(image,) whether the attack was run on it; False in a cascade, and where it could not be."""
        return np.asarray(self.forwards != 0)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """All that is known of each image, by the names of `COLUMNS`."""
        every = {column: getattr(self, column) for column in COLUMNS}
        return {column: values for column, values in every.items() if values is not None}

    @property
    def correct_clean(self) -> np.ndarray:
        """(image,) right before the attack."""
        return np.asarray(self.clean_prediction == self.label)

    @property
    def correct_after(self) -> np.ndarray:
        """(image,) right after the attack, whatever it was before: the paper's protocol counts these."""
        return np.asarray(self.prediction == self.label)

    @property
    def robust(self) -> np.ndarray:
        """(image,) right before and after the attack."""
        return np.asarray(self.correct_clean & self.correct_after)

    @property
    def true_probability(self) -> np.ndarray:
        """(image,) probability of the true class after the attack."""
        return np.asarray(np.exp(-self.nll))

    @property
    def broken(self) -> np.ndarray:
        """(image,) right before the attack and wrong after it."""
        return np.asarray(self.correct_clean & ~self.correct_after)

    def rate(self, criterion: Criterion = "robust") -> Rate:
        """The share of images that are robust, or "correct_after"."""
        return Rate(int(self.meets(criterion).sum()), len(self))

    def meets(self, criterion: Criterion) -> np.ndarray:
        """(image,) whether each is robust, or "correct_after"."""
        check_choice("criterion", criterion, get_args(Criterion))
        column: np.ndarray = getattr(self, criterion)
        return column

    def calibration(self, *, bins: int = BINS) -> Calibration:
        """NLL, ECE and Brier score on what the attack returned, all images included."""
        return summarise(self.nll, self.brier, self.confidence, self.correct_after, bins=bins)

    def take(self, rows: np.ndarray | slice) -> Outcomes:
        """The records of some images, by position here or mask."""
        chosen: dict[str, Any] = {column: values[rows] for column, values in self.columns.items()}
        return dataclasses.replace(self, **chosen)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes a .npz that NumPy reads without pickles; `robust` and `correct_after` are columns too, for others."""
        arrays = {**self.columns, "correct_after": self.correct_after, "robust": self.robust}
        version = _WITHOUT_L1 if self.l1 is None else VERSION
        header = {"format": FORMAT, "version": version, "name": self.name, "about": json.dumps(self.about)}
        return files.write_arrays(path, arrays, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Outcomes:
        """What `save` wrote; a truncated, altered or foreign file is an InputError."""
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
    """The records of all parts as one, in the order of their images; an image in several parts counts once.

    Times are added up and environments collected, since a part may have been computed on another day and machine.
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
    """Whether a is better than b on the same images: difference, interval (Newcombe 1998, method 10), exact McNemar.

    Two models on the same images err together, so the difference is surer than two separate intervals suggest.
    Outcomes of other images, or of the same in another number, are refused.
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
                f"{outcomes.name!r} was run only on what {', '.join(outcomes.about['after'])} left, so that its "
                "outcomes alone say little: compare evaluations that were made without cascade=True."
            )
    won_a, won_b = a.meets(criterion), b.meets(criterion)
    counts = [int((one & other).sum()) for one in (won_a, ~won_a) for other in (won_b, ~won_b)]
    both, only_a, only_b, neither = counts
    return compare_counts(both, only_a, only_b, neither, confidence)
