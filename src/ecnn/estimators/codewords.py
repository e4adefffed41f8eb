"""The code that an estimator uses, and predictions from class scores, as both estimators make them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ecnn.annealing import design_code
from ecnn.codes import CodeMatrix, codebook, load_code
from ecnn.errors import InputError

_MOST_STEPS, _STEPS_PER_SYMBOL = 400_000, 1000
# Above this many symbols the search for the largest distances takes minutes, and that for a low energy seconds. The
# columns of such a large code differ even if the energy has no column term.
_MANY_SYMBOLS = 2000


@functools.lru_cache(maxsize=64)
def find_code(num_classes: int, code_length: int) -> CodeMatrix:
    """The shipped code of this size, or one that is designed, with a fixed seed and so always the same.

    Codes are cached, because a search over parameters or a cross-validation asks for the same one many times.
    """
    name = f"{num_classes}x{code_length}"
    if name in codebook():
        return load_code(name)
    symbols = num_classes * code_length
    search: dict[str, Any] = {"steps": min(_MOST_STEPS, _STEPS_PER_SYMBOL * symbols), "objective": "distance"}
    if symbols > _MANY_SYMBOLS:
        search |= {"objective": "energy", "column_weight": 0.0, "chains": 1}
    code = design_code(num_classes, code_length, seed=0, **search)
    if code.provenance["stopped_by"] == "interrupt":  # the best so far is not the result of a whole search
        raise KeyboardInterrupt
    return code


def check_several_classes(owner: Any, classes: np.ndarray) -> None:
    """Raises InputError unless there are at least two classes."""
    if len(classes) < 2:
        found = "only one" if len(classes) else "no"
        raise InputError(
            f"{type(owner).__name__} needs at least 2 classes, but the labels hold {found} class."
        )


def mean_distance(code: CodeMatrix) -> float:
    """Average Hamming distance between the codewords of two classes.

    A member whose task separates two classes estimates the log odds between them. On average this many members do. So
    the sum over members, divided by this number, estimates the log odds and not a multiple of them.
    """
    return float(code.row_distances.sum() / (code.num_classes * (code.num_classes - 1)))


def as_decision(scores: np.ndarray) -> np.ndarray:
    """Scores as scikit-learn returns them: (sample, class), or for two classes (sample,) the second minus the first."""
    return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores


def softmax(scores: np.ndarray) -> np.ndarray:
    """(sample, class) probabilities from scores."""
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: np.ndarray = shares / shares.sum(axis=1, keepdims=True)
    return result


def checked_scores(scores: np.ndarray) -> np.ndarray:
    """(sample, class) the same scores; InputError unless all are finite, as others would give a meaningless class."""
    is_known = np.isfinite(scores).all(axis=1)
    if not is_known.all():
        raise InputError(
            f"row {is_known.argmin()} gets scores that are not finite numbers: its values are too far from those of "
            "the training data."
        )
    return scores


class ScoringMixin:
    """The predictions of both estimators, made from their class scores."""

    classes_: np.ndarray

    def _scores(self, X: Any) -> np.ndarray:
        """(row, class) scores on the scale of log odds; scikit-learn's NotFittedError before `fit`."""
        raise NotImplementedError

    def decision_function(self, X: Any) -> np.ndarray:
        """(row, class) scores, the largest for the predicted class; for two classes (row,) the second minus the first.

        They are weighted sums of the members' outputs, on the scale of log odds.
        """
        return as_decision(self._scores(X))

    def predict_proba(self, X: Any) -> np.ndarray:
        """(row, class) probabilities: the softmax of the scores."""
        return softmax(self._scores(X))

    def predict(self, X: Any) -> np.ndarray:
        """(row,) labels."""
        best = self._scores(X).argmax(axis=1)  # first: it raises the right error when nothing is fitted
        labels: np.ndarray = self.classes_[best]
        return labels
