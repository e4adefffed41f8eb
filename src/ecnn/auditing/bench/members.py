"""Families where an ordinary attack fails without a trick: members that are decoded, and evaluations too weak."""

from __future__ import annotations

from ecnn.attacks import FGSM
from ecnn.auditing.bench.claims import BY_FGSM, false, large_steps, own_label, reports, short_walk
from ecnn.auditing.bench.networks import (
    always,
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
from ecnn.objectives import MemberObjective

MEMBERS, WEAK = "decoded members", "weak evaluation"

SUBJECTS = [
    false(
        MEMBERS,
        "q2_hinge",
        "members of two symbols trained by margin: attacks on scores raise their free common level instead",
        two_symbols,
        training(MemberObjective(kind="hinge", diversity_weight=0.1), epochs=15),
        (reports(large_steps("margin"), "after"), "the paper's PGD on scores, last iterate"),
    ),
    false(
        MEMBERS,
        "binary_cross_entropy",
        "cross-entropy drives members into the flat parts of tanh",
        coded,
        training(MemberObjective(kind="cross_entropy", diversity_weight=0.1), epochs=30, lr=0.01),
        (
            reports(large_steps("cross_entropy"), "after"),
            "the paper's PGD on scores with cross-entropy, last iterate",
        ),
    ),
    false(
        MEMBERS,
        "adp_one_step",
        "diverse members that vote, attacked by one step only",
        voting,
        training(ADPObjective(), epochs=12),
        BY_FGSM,
    ),
    false(
        MEMBERS,
        "empir_one_step",
        "members of low precision that vote, attacked by one step only",
        low_precision,
        training(EMPIRObjective(), epochs=15),
        BY_FGSM,
    ),
    false(
        WEAK,
        "trained_on_one_step",
        "trained on FGSM until it has learnt FGSM and nothing else",
        resnet,
        training(epochs=30, attack=FGSM(norm="linf", eps=2 * EPS, keep="last")),
        BY_FGSM,
    ),
    false(
        WEAK,
        "own_label_last_iterate",
        "an ordinary network; the attack has no labels, strides across the ball and reports its last iterate",
        resnet,
        training(epochs=10),
        (
            reports(own_label, "after"),
            "PGD without labels, 7 steps of twice the radius, last iterate",
        ),
    ),
    false(
        WEAK,
        "short_walk",
        "an ordinary network; the attack covers a tenth of the ball",
        always(convolutional),
        training(epochs=15, lr=0.01),
        (reports(short_walk), "BIM, 10 steps of a hundredth of the radius"),
    ),
]
