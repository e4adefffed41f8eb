"""Baselines and their objectives by name, as a run folder names them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from ecnn.backbones import Mean, ResNet
from ecnn.baselines.adp import ADPObjective, Ensemble
from ecnn.baselines.ecoc import independent_ecoc
from ecnn.baselines.empir import EMPIR, EMPIRObjective
from ecnn.baselines.specialists import Specialists, SpecialistsObjective
from ecnn.baselines.squeezing import FeatureSqueezing
from ecnn.baselines.tanh_ensemble import TanhEnsemble, TanhEnsembleObjective
from ecnn.baselines.trades import TRADESObjective
from ecnn.codes import CodeMatrix
from ecnn.errors import InputError
from ecnn.objectives import OBJECTIVES, Objective, named_objective


def build_adp(num_classes: int, in_channels: int, mean: Mean | None, **options: Any) -> nn.Module:
    """Three ResNet-20 that vote; options of `Ensemble`. Train it by `ADPObjective`."""
    return Ensemble(num_classes, in_channels, mean=mean, **options)


def build_tanh_ensemble(num_classes: int, in_channels: int, mean: Mean | None, **options: Any) -> nn.Module:
    """Options of `TanhEnsemble`. The mean plays no part but to tell the image size: the original subtracts 0.5."""
    shape = np.shape(mean) if mean is not None else ()
    if "image_size" not in options and len(shape) == 3 and shape[1:] != (1, 1):
        options["image_size"] = [int(length) for length in shape[1:]]
    return TanhEnsemble(num_classes, in_channels, **options)


def build_independent_ecoc(
    num_classes: int, in_channels: int, mean: Mean | None, *, code: CodeMatrix | None = None, **options: Any
) -> nn.Module:
    """One network per task of the code, which must be given; options of `ECNN`."""
    if code is None:
        raise InputError('an "independent_ecoc" model needs a code.')
    if code.num_classes != num_classes:
        raise InputError(f"the code has {code.num_classes} classes, but {num_classes} are wanted.")
    return independent_ecoc(code, in_channels, mean=mean, **options)


def build_specialists(num_classes: int, in_channels: int, mean: Mean | None, **options: Any) -> nn.Module:
    """Options of `Specialists`, of which `sets` must be given. Train it by `SpecialistsObjective`."""
    if "sets" not in options:
        raise InputError(
            'a "specialists" model needs sets, the classes of each class\'s specialist: docs/baselines.md says how to '
            "find them."
        )
    return Specialists(num_classes, in_channels, mean=mean, **options)


def build_feature_squeezing(
    num_classes: int, in_channels: int, mean: Mean | None, *, bits: int, window: int, **options: Any
) -> nn.Module:
    """A ResNet with a `FeatureSqueezing` detector around it; other options of `ResNet`."""
    return FeatureSqueezing(ResNet(num_classes, in_channels, mean=mean, **options), bits=bits, window=window)


def build_empir(num_classes: int, in_channels: int, mean: Mean | None, **options: Any) -> nn.Module:
    """Options of `EMPIR`. Train it by `EMPIRObjective`."""
    return EMPIR(num_classes, in_channels, mean=mean, **options)


#: name -> builder(num_classes, in_channels, mean, **options); options are what the model's `config` holds.
BASELINES: dict[str, Callable[..., nn.Module]] = {
    "adp": build_adp,
    "tanh_ensemble": build_tanh_ensemble,
    "independent_ecoc": build_independent_ecoc,
    "specialists": build_specialists,
    "feature_squeezing": build_feature_squeezing,
    "empir": build_empir,
}

#: name -> objective; those of `ecnn.objectives` have names of their own.
BASELINE_OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "adp": ADPObjective,
    "tanh_ensemble": TanhEnsembleObjective,
    "specialists": SpecialistsObjective,
    "empir": EMPIRObjective,
    "trades": TRADESObjective,
}


def make_objective(name: str, **options: Any) -> Objective:
    """The objective of that name, of this room or of `ecnn.objectives`, with these attributes."""
    if name in OBJECTIVES:
        return named_objective(name, **options)
    if name not in BASELINE_OBJECTIVES:
        known = ", ".join((*OBJECTIVES, *BASELINE_OBJECTIVES))
        raise InputError(f"no objective is called {name!r}; known: {known}.")
    kind: Any = BASELINE_OBJECTIVES[name]
    fields = dataclasses.fields(kind)
    unknown = sorted(set(options) - {field.name for field in fields})
    if unknown:
        has = ", ".join(field.name for field in fields) or "none"
        raise InputError(f"the objective {name!r} has no option {unknown[0]!r}; it has {has}.")
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    missing = [option for option in needed if option not in options]
    if missing:
        raise InputError(
            f"the objective {name!r} needs {', '.join(missing)}, which decide its result and have no default."
        )
    objective: Objective = kind(**options)
    return objective
