"""Datasets as uint8 tensors with train, val and test splits, checked against known checksums; no normalisation."""

from ecnn.data.augment import Augmentation
from ecnn.data.datasets import AdversarialSigns, Dataset, Split
from ecnn.data.loading import NAMES, load_adversarial_signs, load_data

__all__ = [
    "AdversarialSigns",
    "Augmentation",
    "Dataset",
    "NAMES",
    "Split",
    "load_adversarial_signs",
    "load_data",
]
