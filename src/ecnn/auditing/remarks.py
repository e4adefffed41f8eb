"""Findings besides the diagnostics: failed or unfinished attacks, AutoAttack's warnings, NaN gradients, precision."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from ecnn.asking import half_precision_of
from ecnn.attacks.auto import examine as examine_as_autoattack
from ecnn.attacks.base import Target
from ecnn.attacks.deadlines import NO_TIME
from ecnn.attacks.images import at_once
from ecnn.attacks.randomness import forked_generators
from ecnn.auditing.diagnostics import CHECKS
from ecnn.auditing.diagnostics.sanity import grey_radius
from ecnn.auditing.findings import Finding, alarm, note
from ecnn.auditing.power import Power
from ecnn.auditing.stages import Staged
from ecnn.auditing.subject import Subject

#: How many images are tested for AutoAttack's warnings.
FLAGGED = 256
_SPOILED = 0.01  # share of gradients with NaN entries from which the finding is an alarm


def flags_of(subject: Subject) -> list[Finding]:
    """AutoAttack's warnings about the model, each as a finding.

    All but one are notes, because the suite has attacks against them: means over passes, logarithms, attacks on
    members and features, float64, attacks by classes alone. The exception is an alarm: if a model takes gradients
    while it classifies, those of autograd may be wrong. Attacks without gradients can answer this alarm.
    """
    checked = subject.images[:FLAGGED]
    with forked_generators(checked.device, subject.seed):
        parts = [
            examine_as_autoattack(Target(subject.model, len(part), checked.device), part)[1]
            for part in torch.split(checked, at_once(FLAGGED))
        ]
    doubts = {doubt.kind: doubt for part in reversed(parts) for doubt in part}.values()
    findings = []
    for doubt in doubts:
        evidence = {"images": len(checked)}
        if doubt.kind == "dynamic":
            advice = "Attack the optimisation inside the model."
            found = alarm(doubt.sentence, evidence, advice, kind=doubt.kind)
        else:
            found = note(
                doubt.sentence,
                evidence,
                "See in the table of attacks which attack broke how many images.",
                kind=doubt.kind,
            )
        name, source = f"autoattack_{doubt.kind}", "Croce & Hein 2020, AutoAttack: flags"
        findings.append(dataclasses.replace(found, name=name, source=source))
    return findings


def failed_attacks(staged: Staged) -> list[Finding]:
    """An alarm that names attacks that failed on some or all images; answered if all of these images are broken.

    Attacks for which no time was left are not among them: see `cut_short`.
    """
    undone = staged.evaluation.undone
    reasons = staged.evaluation.failures.items()
    failures = {name: why for name, why in reasons if not why.endswith(NO_TIME)}
    if not failures:
        return []
    standing = staged.right > 0
    left = int(standing[np.unique(np.concatenate([undone[name] for name in failures]))].sum())
    whole = [name for name in failures if name not in staged.evaluation.outcomes]
    claim = (
        f"{len(failures)} of the attacks failed on some or all images: {', '.join(failures)}. Of these images {left} "
        "remain unbroken, perhaps only for that reason."
    )
    evidence = {"attacks": dict(failures), "standing": left, "answered": left == 0}
    advice = "Read the reasons, and remove them if you can: an attack that fails on an image cannot break it."
    found = alarm(claim, evidence, advice, kind="not_made" if whole else "partly_made")
    return [dataclasses.replace(found, name="attacks_not_made", source="the suite")]


def cut_short(staged: Staged, checks: int, minutes: float) -> list[Finding]:
    """An alarm that time ran out, with what was done until then; answered if no image is left unbroken.

    Args:
        checks: how many diagnostics were made.
        minutes: the time that the audit was given.
    """
    late = [name for name, why in staged.evaluation.failures.items() if why.endswith(NO_TIME)]
    made, standing = len(staged.stages), int((staged.right > 0).sum())
    claim = (
        f"The search ended at its limit of {minutes:g} minutes, before all attacks and checks were made: {made} "
        f"attacks and {checks} of {len(CHECKS)} were. {standing} images remain unbroken, perhaps only for that reason."
    )
    evidence = {
        "minutes": minutes,
        "attacks": made,
        "not_made_on_all_images": late,
        "checks": checks,
        "standing": standing,
        "answered": standing == 0,
    }
    advice = "Give the audit more minutes, or fewer images; if it keeps records, the next audit continues from them."
    name = "out_of_time"
    return [dataclasses.replace(alarm(claim, evidence, advice), name=name, kind=name, source="the clock")]


def nan_gradients_of(staged: Staged) -> list[Finding]:
    """An alarm if gradients that the attacks took had NaN entries, which count as zero and do not move their pixels.

    A note if fewer than one gradient in a hundred had any, nothing if none had; answered if all images are broken.
    """
    outcomes = staged.evaluation.outcomes.values()
    spoiled = sum(int(found.about.get("nan_gradients", 0)) for found in outcomes)
    if not spoiled:
        return []
    taken = sum(int(found.backwards.clip(min=0).sum()) for found in outcomes)
    claim = (
        f"{spoiled:,} of {taken:,} gradients that attacks followed have entries that are not numbers: these entries "
        "counted as zero, and their pixels did not move."
    )
    evidence = {"nan_gradients": spoiled, "gradients": taken, "answered": not bool((staged.right > 0).any())}
    advice = "Find the operation whose derivative is infinite or undefined, such as a root or logarithm at 0."
    say = alarm if spoiled >= _SPOILED * taken else note
    found = say(claim, evidence, advice)
    return [dataclasses.replace(found, name="nan_gradients", kind="nan_gradients", source="the suite")]


def luck_of(power: Power) -> list[Finding]:
    """An alarm if gradient and query attacks break different images, so that more attempts would break more."""
    if power.standing <= 0 or not power.retried or power.agrees:
        return []
    claim = (
        f"Of {power.retried} images that gradient attacks broke, attacks without gradients break {power.found_again}; "
        f"and they break {power.alone} that no gradient attack broke: which images are broken depends on luck."
    )
    advice = (
        "Query many more points: wrong answers are scattered in the balls, and gradients do not lead to them."
    )
    found = alarm(claim, power.to_dict(), advice)
    return [dataclasses.replace(found, name="luck", kind="luck", source="the suite")]


def half_precision(subject: Subject) -> list[Finding]:
    """A note where the model computes in half precision."""
    kind = half_precision_of(subject.model)
    if kind is None:
        return []
    name = str(kind).removeprefix("torch.")
    claim = (
        f"The model computes in {name}: images are rounded to this precision first, and gradients may vanish."
    )
    advice = "Audit the model in float32 too: images that only rounding protects are not robust."
    found = note(claim, {"dtype": name}, advice, kind=name)
    return [dataclasses.replace(found, name="precision", source="the model")]


def wide_ball(subject: Subject) -> list[Finding]:
    """A note if the grey image lies in the ball around every image, so that no classifier can be robust."""
    wide = grey_radius(subject.norm, subject.images)
    if subject.eps < wide:
        return []
    claim = f"All balls of radius {subject.eps:.4g} hold the same grey image: no classifier is robust in such a ball."
    advice = f'Lengths are on the [0, 1] scale of pixels: was "{subject.eps:g}/255" meant?'
    found = note(claim, {"eps": subject.eps, "grey_image_within": wide}, advice)
    return [dataclasses.replace(found, name="wide_ball", kind="wide_ball", source="the ball")]
