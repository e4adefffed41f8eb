"""The scikit-learn face of the same parts: an ECNN as an estimator, and designed codes over any binary estimator."""

from ecnn.estimators.network import ECNNClassifier
from ecnn.estimators.output_codes import ErrorCorrectingClassifier

__all__ = ["ECNNClassifier", "ErrorCorrectingClassifier"]
