"""Output codes of logistic regressions on a trained model's features: a simple reference beside deep models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ecnn.codes import CodeMatrix
from ecnn.errors import InputError


@dataclass(frozen=True)
class OutputCodeAccuracy:
    """Test accuracies, 0 to 1.

    Attributes:
        random_code: of scikit-learn's OutputCodeClassifier, whose code is drawn at random.
        own_code: of the code that was given, decoded to the nearest codeword in Hamming distance.
    """

    random_code: float
    own_code: float


def output_code_baseline(
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    *,
    code: CodeMatrix,
    seed: int,
) -> OutputCodeAccuracy:
    """Test accuracies of a random code of scikit-learn and of the given one, with a logistic regression per column.

    Both codes have the same length. It shows what a good code gains when the features are fixed.

    Args:
        train_features, test_features: (image, feature), such as `ResNet.features` of images; both are standardised by
            the mean and deviation of the training features.
        train_labels, test_labels: (image,) classes; the training labels must contain every class of the code.
        seed: of the random code.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OutputCodeClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train_labels, test_labels = np.asarray(train_labels), np.asarray(test_labels)
    _check_examples(train_features, train_labels, code, "train")
    _check_examples(test_features, test_labels, code, "test")
    if len(np.unique(train_labels)) != code.num_classes:
        raise InputError(f"training must hold all {code.num_classes} classes of the code.")
    learner = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    # Half a column more than wanted, because scikit-learn rounds classes * code_size down.
    size = (code.code_length + 0.5) / code.num_classes
    drawn = OutputCodeClassifier(learner, code_size=size, random_state=seed)
    random_code = drawn.fit(train_features, train_labels).predict(test_features)
    own_code = _predict_by_code(learner, code, train_features, train_labels, test_features)
    return OutputCodeAccuracy(
        random_code=float(np.mean(random_code == test_labels)),
        own_code=float(np.mean(own_code == test_labels)),
    )


def _predict_by_code(
    learner: Any,
    code: CodeMatrix,
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
) -> np.ndarray:
    """(image,) class with the nearest codeword; the first of equally near ones."""
    from sklearn.base import clone

    said = np.stack(
        [
            clone(learner).fit(train_features, column[train_labels]).predict(test_features)
            for column in code.symbols.T
        ],
        axis=1,
    )
    wrong = (said[:, None, :] != code.symbols).sum(axis=2)
    return np.asarray(wrong.argmin(axis=1))


def _check_examples(features: np.ndarray, labels: np.ndarray, code: CodeMatrix, which: str) -> None:
    if np.ndim(features) != 2 or labels.shape != (len(features),) or len(labels) == 0:
        raise InputError(
            f"{which} features must be (image, feature) with one label each, not {np.shape(features)} and "
            f"{labels.shape}."
        )
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= code.num_classes:
        raise InputError(f"{which} labels must be classes from 0 to {code.num_classes - 1}, as the code has.")
