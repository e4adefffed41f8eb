"""Evaluation: per-image outcomes of attacks, and accuracies, intervals, curves and matrices computed from them."""

from ecnn.evaluation.calibration import Calibration, calibration
from ecnn.evaluation.flips import MemberFlips, member_flips
from ecnn.evaluation.inputs import Images, read_images
from ecnn.evaluation.intervals import PairedComparison, Rate, wilson_interval
from ecnn.evaluation.loop import evaluate
from ecnn.evaluation.outcomes import Outcomes, compare
from ecnn.evaluation.own_attacks import OwnAttack
from ecnn.evaluation.records import load_evaluation, load_images
from ecnn.evaluation.results import Curve, Evaluation
from ecnn.evaluation.transfer import TRANSFER_PGD, TransferMatrix, member_transfer, model_transfer

__all__ = [
    "Calibration",
    "Curve",
    "Evaluation",
    "Images",
    "MemberFlips",
    "Outcomes",
    "OwnAttack",
    "PairedComparison",
    "Rate",
    "TRANSFER_PGD",
    "TransferMatrix",
    "calibration",
    "compare",
    "evaluate",
    "load_evaluation",
    "load_images",
    "member_flips",
    "member_transfer",
    "model_transfer",
    "read_images",
    "wilson_interval",
]
