"""Calibration: whether a model's probabilities match its accuracy, as NLL, ECE and Brier score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ecnn.checks import check_count
from ecnn.errors import InputError

BINS = 15


@dataclass(frozen=True)
class Calibration:
    """Three measures of how well predicted probabilities match the true classes; smaller is better for all.

    Attributes:
        nll: mean negative log probability of the true class, in nats; infinite if one true class had probability 0.
        ece: expected calibration error: mean gap between confidence and accuracy, from 0 to 1.
        brier: mean squared distance of the probabilities from the one-hot truth, summed over classes, from 0 to 2.
        n: number of images.
    """

    nll: float
    ece: float
    brier: float
    n: int


def calibration(probabilities: np.ndarray, labels: np.ndarray, *, bins: int = BINS) -> Calibration:
    """NLL, ECE and Brier score of class probabilities.

    Args:
        probabilities: (image, class), each row summing to 1.
        labels: (image,) true classes.
        bins: number of bins of equal width, for the ECE.
    """
    probabilities, labels = np.asarray(probabilities, dtype=np.float64), np.asarray(labels)
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1] or not len(labels):
        raise InputError(
            f"probabilities must be (image, class) with a label per image, not of shapes {probabilities.shape} and "
            f"{labels.shape}."
        )
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= probabilities.shape[1]:
        raise InputError(f"labels must be whole numbers from 0 to {probabilities.shape[1] - 1}.")
    if not (probabilities >= 0).all() or not np.allclose(probabilities.sum(axis=1), 1, atol=1e-4):
        raise InputError(
            "probabilities must be from 0 up and sum to 1 in each row: softmax the scores first."
        )
    of_truth = probabilities[np.arange(len(labels)), labels]
    with np.errstate(divide="ignore"):
        nll = -np.log(of_truth)
    brier = (probabilities**2).sum(axis=1) - 2 * of_truth + 1
    right = probabilities.argmax(axis=1) == labels
    return summarise(nll, brier, probabilities.max(axis=1), right, bins=bins)


def summarise(
    nll: np.ndarray, brier: np.ndarray, confidence: np.ndarray, right: np.ndarray, *, bins: int = BINS
) -> Calibration:
    """The three measures from per-image values (image,), as `Outcomes` hold them."""
    check_count("bins", bins)
    return Calibration(
        nll=float(nll.mean(dtype=np.float64)),
        ece=expected_calibration_error(confidence, right, bins=bins),
        brier=float(brier.mean(dtype=np.float64)),
        n=len(nll),
    )


def expected_calibration_error(confidence: np.ndarray, right: np.ndarray, *, bins: int = BINS) -> float:
    """Mean gap between confidence and accuracy over bins of equal width, closed above (Guo et al. 2017).

    Args:
        confidence: (image,) probability of the predicted class.
        right: (image,) whether that class is the true one.
    """
    confidence = confidence.astype(np.float64)
    places = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gaps = np.bincount(places, weights=right - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))
