"""`ErrorCorrectingClassifier`: any binary estimator, fitted once per task of a designed code."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from sklearn import get_config
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.utils import check_random_state, get_tags
from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, process_routing
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import check_is_fitted, validate_data

from ecnn.checks import check_number, shown
from ecnn.codes import MAX_CLASSES, MAX_SYMBOLS, CodeMatrix
from ecnn.errors import InputError
from ecnn.estimators.codewords import (
    ScoringMixin,
    check_several_classes,
    checked_scores,
    find_code,
    mean_distance,
)

# Members' odds are limited to this, because trees give probabilities of 0 and 1.
_LARGEST_ODDS = 1e3
_MOST_MEMBERS = MAX_SYMBOLS // 2  # of two symbols each


class ErrorCorrectingClassifier(ScoringMixin, MetaEstimatorMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier for several classes that fits a binary estimator for each task of an error-correcting code.

    It can replace `sklearn.multiclass.OutputCodeClassifier` and has the same arguments. There the code is random; here
    it is designed for large distances. The members' log odds are added up, and there is `predict_proba`.

    Args:
        estimator: binary estimator with `fit` and one of `predict_proba` and `decision_function`.
        code_size: members for each class: int(code_size * number of classes) in all.
        random_state: decides which class gets which codeword.
        n_jobs: how many members are fitted at once; None for one, -1 for one per core.

    Attributes:
        classes_: labels in the order of the scores.
        estimators_: one fitted estimator per task.
        code_: the `CodeMatrix`, a codeword for each class.
        code_book_: (class, task) the same code as -1 and +1, as in OutputCodeClassifier.
        n_features_in_, feature_names_in_: those of the estimators, if they have them.
    """

    def __init__(
        self, estimator: Any, *, code_size: float = 1.5, random_state: Any = None, n_jobs: int | None = None
    ) -> None:
        self.estimator = estimator
        self.code_size = code_size
        self.random_state = random_state
        self.n_jobs = n_jobs

    def fit(self, X: Any, y: Any, **fit_params: Any) -> Self:
        """Fits one copy of the estimator per task and returns itself.

        Args:
            fit_params: passed to the estimators' `fit` by scikit-learn's metadata routing, which must be enabled.
        """
        if fit_params and not get_config()["enable_metadata_routing"]:
            raise InputError(
                f"{', '.join(fit_params)} reaches the estimators only with scikit-learn's metadata routing: call "
                "sklearn.set_config(enable_metadata_routing=True), and set_fit_request on the estimator."
            )
        routed = process_routing(self, "fit", **fit_params)
        check_number("code_size", self.code_size, above=True, most=MAX_SYMBOLS)
        if not any(hasattr(self.estimator, name) for name in ("predict_proba", "decision_function")):
            raise InputError(
                f"estimator must have predict_proba or decision_function, which {type(self.estimator).__name__} lacks."
            )
        y = validate_data(self, X="no_validation", y=y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        check_several_classes(self, self.classes_)
        self.code_ = self._choose_code(len(self.classes_))
        self.code_book_ = self.code_.signed
        self.estimators_ = Parallel(n_jobs=self.n_jobs)(
            delayed(_fit_member)(self.estimator, X, bits, routed.estimator.fit)
            for bits in self.code_.symbols[labels].T
        )
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(self.estimators_[0], name):
                setattr(self, name, getattr(self.estimators_[0], name))
        return self

    def get_metadata_routing(self) -> Any:
        """How scikit-learn routes arguments of `fit` to the estimators."""
        mapping = MethodMapping().add(caller="fit", callee="fit")
        return MetadataRouter(owner=self).add(estimator=self.estimator, method_mapping=mapping)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = get_tags(self.estimator).input_tags.sparse
        return tags

    def _choose_code(self, num_classes: int) -> CodeMatrix:
        """A designed code with its codewords in random order."""
        members, least = int(num_classes * self.code_size), (num_classes - 1).bit_length()
        if members > _MOST_MEMBERS and num_classes <= MAX_CLASSES:
            raise InputError(
                f"a code_size of {shown(self.code_size)} gives {members} members for {num_classes} classes, more than "
                f"the {_MOST_MEMBERS} that a code may have: use {_MOST_MEMBERS // num_classes} or less."
            )
        if members < least:
            raise InputError(
                f"a code_size of {shown(self.code_size)} gives {members} members, and {num_classes} classes need "
                f"{least}: use {math.ceil(100 * least / num_classes) / 100:g} or more."
            )
        found = find_code(num_classes, members)
        order = check_random_state(self.random_state).permutation(num_classes)
        return CodeMatrix(found.symbols[order], provenance=found.provenance)

    def _scores(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        odds = np.stack([_log_odds(member, X) for member in self.estimators_], axis=1)
        return checked_scores(odds @ self.code_.signed.T.astype(np.float64) / (2 * mean_distance(self.code_)))


def _fit_member(estimator: Any, X: Any, bits: np.ndarray, fit_params: dict[str, Any]) -> Any:
    return clone(estimator).fit(X, bits, **fit_params)


def _log_odds(member: Any, X: Any) -> np.ndarray:
    """(row,) a member's log odds of symbol 1, or its decision_function if it has no predict_proba."""
    if not hasattr(member, "predict_proba"):
        values: np.ndarray = np.asarray(member.decision_function(X), dtype=np.float64).ravel()
        return values
    ones = np.asarray(member.predict_proba(X), dtype=np.float64)[:, 1]
    least = 1 / (1 + _LARGEST_ODDS)
    ones = ones.clip(least, 1 - least)
    return np.log(ones) - np.log1p(-ones)
