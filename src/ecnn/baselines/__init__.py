"""Baselines that an ECNN is compared with, as modules from pixels in [0, 1] to scores, and their objectives."""

from ecnn.baselines.adp import ADPObjective, Ensemble, ensemble_diversity, ensemble_entropy, log_mean_probs
from ecnn.baselines.ecoc import independent_ecoc
from ecnn.baselines.empir import (
    EMPIR,
    EMPIR_PRECISIONS,
    EMPIRObjective,
    majority_scores,
    majority_vote,
    quantise_activations,
    quantise_resnet,
    quantise_weights,
)
from ecnn.baselines.multiscale import MultiScaleCNN
from ecnn.baselines.output_codes import OutputCodeAccuracy, output_code_baseline
from ecnn.baselines.specialists import (
    Specialists,
    SpecialistsObjective,
    confusion_sets,
    count_confusions,
    specialist_vote,
)
from ecnn.baselines.squeezing import SQUEEZERS, Detection, FeatureSqueezing, reduce_bits, smooth_by_median
from ecnn.baselines.tanh_ensemble import (
    TANH_DISTURBANCES,
    TANH_SIZES,
    TanhEnsemble,
    TanhEnsembleObjective,
    tanh_code,
)
from ecnn.baselines.trades import TRADESObjective, kl_divergence

__all__ = [
    "ADPObjective",
    "Detection",
    "EMPIR",
    "EMPIRObjective",
    "EMPIR_PRECISIONS",
    "Ensemble",
    "FeatureSqueezing",
    "MultiScaleCNN",
    "OutputCodeAccuracy",
    "SQUEEZERS",
    "Specialists",
    "SpecialistsObjective",
    "TANH_DISTURBANCES",
    "TANH_SIZES",
    "TRADESObjective",
    "TanhEnsemble",
    "TanhEnsembleObjective",
    "confusion_sets",
    "count_confusions",
    "ensemble_diversity",
    "ensemble_entropy",
    "independent_ecoc",
    "kl_divergence",
    "log_mean_probs",
    "majority_scores",
    "majority_vote",
    "output_code_baseline",
    "quantise_activations",
    "quantise_resnet",
    "quantise_weights",
    "reduce_bits",
    "smooth_by_median",
    "specialist_vote",
    "tanh_code",
]
