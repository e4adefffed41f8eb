"""Error-correcting neural networks: design codes, train on them, attack them, and audit the result.

The public names are imported when they are first used, so that `import ecnn.codes` and `ecnn --help` stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecnn.annealing import design_code as design_code
    from ecnn.annealing import exhaustive_code as exhaustive_code
    from ecnn.auditing import audit as audit
    from ecnn.backbones import Normalized as Normalized
    from ecnn.backbones import ResNet as ResNet
    from ecnn.codes import CodeMatrix as CodeMatrix
    from ecnn.codes import codebook as codebook
    from ecnn.codes import load_code as load_code
    from ecnn.data import load_data as load_data
    from ecnn.errors import InputError as InputError
    from ecnn.estimators import ECNNClassifier as ECNNClassifier
    from ecnn.estimators import ErrorCorrectingClassifier as ErrorCorrectingClassifier
    from ecnn.evaluation import evaluate as evaluate
    from ecnn.model import ECNN as ECNN
    from ecnn.plots import plot_audit as plot_audit
    from ecnn.plots import plot_code as plot_code
    from ecnn.plots import plot_curve as plot_curve
    from ecnn.plots import plot_members as plot_members
    from ecnn.plots import plot_transfer as plot_transfer
    from ecnn.predicting import load_classifier as load_classifier
    from ecnn.progress import progress_bar as progress_bar
    from ecnn.runs import load_model as load_model
    from ecnn.spec import Spec as Spec
    from ecnn.spec import load_spec as load_spec
    from ecnn.training import fit as fit

__version__ = "0.1.0"

_ROOM_OF = {
    "CodeMatrix": "codes",
    "ECNN": "model",
    "ECNNClassifier": "estimators",
    "ErrorCorrectingClassifier": "estimators",
    "InputError": "errors",
    "Normalized": "backbones",
    "ResNet": "backbones",
    "Spec": "spec",
    "audit": "auditing",
    "codebook": "codes",
    "design_code": "annealing",
    "evaluate": "evaluation",
    "exhaustive_code": "annealing",
    "fit": "training",
    "load_classifier": "predicting",
    "load_code": "codes",
    "load_data": "data",
    "load_model": "runs",
    "load_spec": "spec",
    "plot_audit": "plots",
    "plot_code": "plots",
    "plot_curve": "plots",
    "plot_members": "plots",
    "plot_transfer": "plots",
    "progress_bar": "progress",
}

__all__ = ["__version__", *_ROOM_OF]


def __getattr__(name: str) -> Any:
    if name in _ROOM_OF:
        return getattr(importlib.import_module(f"ecnn.{_ROOM_OF[name]}"), name)
    raise AttributeError(f"module 'ecnn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOM_OF})
