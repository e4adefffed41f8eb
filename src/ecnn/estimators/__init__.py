"""Estimators for scikit-learn: an ECNN, and a designed code over any binary estimator."""

from ecnn.estimators.network import ECNNClassifier
from ecnn.estimators.output_codes import ErrorCorrectingClassifier

__all__ = ["ECNNClassifier", "ErrorCorrectingClassifier"]
