"""Two families of models that hide no gradient on purpose: decoded members, and evaluations that are too weak."""

from __future__ import annotations

from torch import nn

from ecnn.attacks import FGSM
from ecnn.auditing.bench.claims import BY_FGSM, Subjects, large_steps, own_label, reports, tiny_steps
from ecnn.auditing.bench.networks import (
    coded,
    convolutional,
    low_precision,
    resnet,
    training,
    two_symbols,
    voting,
)
from ecnn.auditing.bench.subject import EPS
from ecnn.baselines import ADPObjective, EMPIRObjective
from ecnn.data import Dataset
from ecnn.objectives import MemberObjective

MEMBERS, WEAK = "decoded members", "weak evaluation"

SUBJECTS = Subjects()


@SUBJECTS.false(
    MEMBERS,
    training(MemberObjective(kind="hinge", diversity_weight=0.1), epochs=15),
    (reports(large_steps("margin"), "after"), "the paper's PGD on scores, last iterate"),
)
def q2_hinge(data: Dataset) -> nn.Module:
    """Members with two outputs, trained on their difference: attacks on scores only raise the outputs' common level."""
    return two_symbols(data)


@SUBJECTS.false(
    MEMBERS,
    training(MemberObjective(kind="cross_entropy", diversity_weight=0.1), epochs=30, lr=0.01),
    (
        reports(large_steps("cross_entropy"), "after"),
        "the paper's PGD on scores with cross-entropy, last iterate",
    ),
)
def binary_cross_entropy(data: Dataset) -> nn.Module:
    """Cross-entropy drives members into the flat parts of tanh."""
    return coded(data)


@SUBJECTS.false(MEMBERS, training(ADPObjective(), epochs=12), BY_FGSM)
def adp_one_step(data: Dataset) -> nn.Module:
    """Diverse members that vote, attacked by one step only."""
    return voting(data)


@SUBJECTS.false(MEMBERS, training(EMPIRObjective(), epochs=15), BY_FGSM)
def empir_one_step(data: Dataset) -> nn.Module:
    """Members of low precision that vote, attacked by one step only."""
    return low_precision(data)


@SUBJECTS.false(WEAK, training(epochs=30, attack=FGSM(norm="linf", eps=2 * EPS, keep="last")), BY_FGSM)
def trained_on_one_step(data: Dataset) -> nn.Module:
    """Trained on FGSM until it has learnt FGSM and nothing else."""
    return resnet(data)


@SUBJECTS.false(
    WEAK,
    training(epochs=10),
    (
        reports(own_label, "after"),
        "PGD without labels, 7 steps of twice the radius, last iterate",
    ),
)
def own_label_last_iterate(data: Dataset) -> nn.Module:
    """An ordinary network; the attack has no labels, takes steps as wide as the ball and reports its last iterate."""
    return resnet(data)


@SUBJECTS.false(
    WEAK, training(epochs=15, lr=0.01), (reports(tiny_steps), "BIM, 10 steps of a hundredth of the radius")
)
def short_walk() -> nn.Module:
    """An ordinary network; the attack covers a tenth of the ball."""
    return convolutional()
