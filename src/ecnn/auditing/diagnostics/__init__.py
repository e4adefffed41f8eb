"""Diagnostics: signs that attacks fail on a model for another reason than its robustness.

Each check takes a `Subject` and returns one `Finding`, whatever errors the model raises. An alarm needs harm on
more of the audited images than an exact test allows for chance; only a NaN score or a missing gradient is enough by
itself. What is odd but harmless is a note. Where another of our attacks has broken every image concerned, the evidence
contains "answered": the finding then explains why a claim was too high, and is no reason to doubt the audited accuracy.
"""

from __future__ import annotations

from collections.abc import Callable

from ecnn.attacks.deadlines import OutOfTimeError
from ecnn.auditing.diagnostics.binarization import check_binarization
from ecnn.auditing.diagnostics.border import check_border
from ecnn.auditing.diagnostics.evidence import read_evidence
from ecnn.auditing.diagnostics.gradients import (
    check_differentiable,
    check_finite_scores,
    check_gradient_direction,
    check_probabilities,
    check_randomness,
    check_unstable_loss,
    check_zero_gradients,
)
from ecnn.auditing.diagnostics.loss_paths import (
    check_incomplete_optimization,
    check_loss_path,
    check_saturation,
)
from ecnn.auditing.diagnostics.members import check_member_gradients
from ecnn.auditing.diagnostics.probes import probe_of
from ecnn.auditing.diagnostics.sanity import (
    check_black_box,
    check_labels,
    check_last_iterate,
    check_noise,
    check_one_step,
    check_radius,
    check_restarts,
    check_steps,
    check_unbounded,
)
from ecnn.auditing.findings import Finding
from ecnn.auditing.subject import Subject
from ecnn.progress import Milestone, Progress

#: By name, in the order for a reader: is there a gradient, does it help, do stronger attacks break no less.
CHECKS: dict[str, Callable[[Subject], Finding]] = {
    "finite_scores": check_finite_scores,
    "differentiable": check_differentiable,
    "randomness": check_randomness,
    "probabilities": check_probabilities,
    "zero_gradients": check_zero_gradients,
    "gradient_direction": check_gradient_direction,
    "unstable_loss": check_unstable_loss,
    "border": check_border,
    "loss_path": check_loss_path,
    "last_iterate": check_last_iterate,
    "incomplete_optimization": check_incomplete_optimization,
    "steps": check_steps,
    "restarts": check_restarts,
    "one_step": check_one_step,
    "noise": check_noise,
    "black_box": check_black_box,
    "radius": check_radius,
    "unbounded": check_unbounded,
    "binarization": check_binarization,
    "saturation": check_saturation,
    "labels": check_labels,
    "member_gradients": check_member_gradients,
}


def diagnose(subject: Subject, *, progress: Progress | None = None) -> list[Finding]:
    """The findings of all checks that query the model, in the order of `CHECKS`; checks share passes and gradients.

    At the deadline (`OutOfTimeError`) the checks that are left are skipped.
    """
    findings: list[Finding] = []
    for done, (name, check) in enumerate(CHECKS.items()):
        if progress is not None:
            progress(done, len(CHECKS), name)
        try:
            findings.append(check(subject))
        except OutOfTimeError:
            return findings
    if progress is not None:
        alarms = sum(finding.level == "alarm" for finding in findings)
        progress(len(CHECKS), len(CHECKS), Milestone(f"{len(CHECKS)} diagnostics, {alarms} alarms"))
    return findings


def count_questions(subject: Subject) -> tuple[int, int]:
    """(forward passes, gradients) that the checks of this subject have used so far, each counted per image."""
    return probe_of(subject).cost


__all__ = ["CHECKS", "count_questions", "diagnose", "read_evidence", *(f"check_{name}" for name in CHECKS)]
