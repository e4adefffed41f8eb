"""Which code the classes get, and what its members' answers say about the classes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ecnn.annealing import design_code
from ecnn.codes import CodeMatrix, codebook, load_code
from ecnn.errors import InputError

_MOST_STEPS, _STEPS_PER_SYMBOL = 400_000, 1000
# Beyond this many symbols the search for the largest distances takes minutes, and that for a low energy seconds; the
# columns of so large a code differ without being asked to.
_MANY_SYMBOLS = 2000


@functools.lru_cache(maxsize=64)
def find_code(num_classes: int, code_length: int) -> CodeMatrix:
    """The shipped code of this size, or a design of our own, always the same one.

    Found codes are kept, because a search over parameters or a cross-validation asks for the same one many times.
    """
    name = f"{num_classes}x{code_length}"
    if name in codebook():
        return load_code(name)
    symbols = num_classes * code_length
    search: dict[str, Any] = {"steps": min(_MOST_STEPS, _STEPS_PER_SYMBOL * symbols), "objective": "distance"}
    if symbols > _MANY_SYMBOLS:
        search |= {"objective": "energy", "column_weight": 0.0, "chains": 1}
    code = design_code(num_classes, code_length, seed=0, **search)
    if code.provenance["stopped_by"] == "interrupt":  # the best so far is not the code of this size
        raise KeyboardInterrupt
    return code


def check_several_classes(owner: Any, classes: np.ndarray) -> None:
    """Raises InputError unless there are two classes at least."""
    if len(classes) < 2:
        found = "only one" if len(classes) else "no"
        raise InputError(f"{type(owner).__name__} tells classes apart, but the labels hold {found} class.")


def mean_distance(code: CodeMatrix) -> float:
    """In how many tasks two classes differ, on average over all pairs.

    A member that tells two classes apart estimates the odds between them. This many do, so a sum over members divided
    by it is again an estimate of the odds and not a multiple of them.
    """
    return float(code.row_distances.sum() / (code.num_classes * (code.num_classes - 1)))


def as_decision(scores: np.ndarray) -> np.ndarray:
    """(sample, class) scores as scikit-learn returns them: of two classes only the lead of the second, (sample,)."""
    return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores


def softmax(scores: np.ndarray) -> np.ndarray:
    """(sample, class) probabilities."""
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: np.ndarray = shares / shares.sum(axis=1, keepdims=True)
    return result


def checked_scores(scores: np.ndarray) -> np.ndarray:
    """(sample, class) the same; InputError unless all are numbers, since the largest of others is no answer."""
    is_known = np.isfinite(scores).all(axis=1)
    if not is_known.all():
        raise InputError(
            f"row {is_known.argmin()} gets scores that are not finite numbers: its values are too far from those of "
            "the training."
        )
    return scores


class ScoringMixin:
    """What both estimators answer alike once the classes have scores."""

    classes_: np.ndarray

    def _scores(self, X: Any) -> np.ndarray:
        """(row, class); an error of scikit-learn's when nothing is fitted."""
        raise NotImplementedError

    def decision_function(self, X: Any) -> np.ndarray:
        """(row, class) scores, the largest for the class that is predicted; of two classes (row,) the second's lead.

        They are sums over what the members say, on the scale of log odds.
        """
        return as_decision(self._scores(X))

    def predict_proba(self, X: Any) -> np.ndarray:
        """(row, class) probabilities: the softmax of the scores."""
        return softmax(self._scores(X))

    def predict(self, X: Any) -> np.ndarray:
        """(row,) labels."""
        best = self._scores(X).argmax(axis=1)  # first, because it says so when nothing is fitted
        labels: np.ndarray = self.classes_[best]
        return labels
