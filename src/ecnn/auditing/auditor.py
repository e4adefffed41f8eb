"""audit(): the strongest attacks we have, then reasons to doubt even them, then a verdict."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ecnn import files
from ecnn.attacks import Attack
from ecnn.attacks.auto import Doubt, examine
from ecnn.attacks.base import Target
from ecnn.attacks.norms import NORMS, Norm
from ecnn.auditing.budgets import Budget, resolve_budget
from ecnn.auditing.diagnostics import diagnose, read_evidence
from ecnn.auditing.findings import Finding, alarm, note
from ecnn.auditing.report import Audit, Verdict
from ecnn.auditing.stages import Staged, run_stages
from ecnn.auditing.subject import Subject
from ecnn.auditing.suite import find_traits, suite
from ecnn.auditing.surrogates import choose_examples
from ecnn.backbones import eval_mode, without_tf32
from ecnn.checks import check_choice, check_number, parse_eps
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation import Evaluation
from ecnn.evaluation.batch import BATCH_SIZE, check_request, place, read_model, seeded
from ecnn.evaluation.intervals import Interval, wilson_interval
from ecnn.evaluation.provenance import describe
from ecnn.progress import Progress

FOLDER, RESULT, PAGE = "audit", "audit.json", "audit.md"
#: A claim this little above the audited accuracy is rounding, not a false claim.
SLACK = 0.01
#: A claim this far above it should not pass for want of images.
RESOLUTION = 0.05
_FLAGGED = 256


def audit(
    model: nn.Module,
    split: Split,
    *,
    norm: Norm,
    eps: float | str,
    claim: float | None = None,
    limit: int | None = None,
    budget: str | Budget = "standard",
    seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = True,
    progress: Progress | None = None,
) -> Audit:
    """Whether to believe that a model keeps a claimed accuracy under attack.

    The suite of attacks is made in its order, each on the images that the earlier ones left, and an image counts as
    robust only if it is right when clean and under all of them, by fresh passes in float32. Then the diagnostics look
    for signs that attacks fail for another reason than robustness. The verdict is

    - "not believable" when the claim lies above the audited accuracy by more than a point and above its interval;
    - "inconclusive" when no attack contradicts it but an alarm says that attacks are fooled, or when it lies more than
      five points above and the images are too few to tell;
    - "believable" otherwise.

    A model whose passes differ is judged by the mean over passes: of each image the point is taken at which it is
    wrong most often, and the share of new passes that are right there is its part in the accuracy. Counting an image
    as broken by one unlucky pass in hundreds would condemn every random model. Its randomness must come from torch.

    Args:
        model: pixels in [0, 1] to scores (batch, class), 2 to 1,000 classes, on any device; left as it was.
        split: usually `data.test`; what follows the audited images serves to train surrogates.
        norm, eps: of the ball it is said to be robust in.
        claim: the accuracy under attack in question, from 0 to 1. Without one, what the plain attack alone leaves
            stands for it, which a usual evaluation would have reported.
        limit: how many images, the first of the split; the budget's number if not given.
        budget: "quick", "standard", "thorough", or one of your own.
        seed: of all randomness.
        run_dir: keeps the records there under audit/, and the result as audit.json and audit.md.
        resume: goes on with what a killed audit left there; False begins anew.
        progress: called as progress(done, total, note).
    """
    check_choice("norm", norm, NORMS)
    eps, budget = parse_eps(eps), resolve_budget(budget)
    if claim is not None:
        check_number("claim (such as 0.72 for 72 %)", claim, most=1.0)
    chosen = check_request(model, split, budget.images if limit is None else limit, BATCH_SIZE)
    folder = None if run_dir is None else Path(run_dir) / FOLDER
    if run_dir is not None:
        files.check_writable(Path(run_dir) / RESULT)
    images = place(model, chosen[:][0])
    labels = chosen.labels.to(images.device)
    subject = Subject(model=model, images=images, labels=labels, norm=norm, eps=eps, budget=budget, seed=seed)
    with eval_mode(model), without_tf32():
        attacks, is_random = _choose_attacks(subject, split, folder, resume)
        staged = run_stages(
            subject, split, attacks, is_random=is_random, folder=folder, resume=resume, progress=progress
        )
        findings = _find(subject, staged.evaluation, folder, resume, progress)
    # One pass of a random model is no evidence.
    evidence = [] if is_random else read_evidence(staged.evaluation)
    result = _conclude(
        subject, staged, [*evidence, *_failures(staged.evaluation), *findings], claim, is_random
    )
    if run_dir is not None:
        result.save(Path(run_dir) / RESULT)
        files.write_text(Path(run_dir) / PAGE, result.markdown())
    return result


def _choose_attacks(
    subject: Subject, split: Split, folder: Path | None, resume: bool
) -> tuple[dict[str, Attack], bool]:
    """The suite that this model needs, and whether the model is random."""
    num_classes = read_model(subject.model, subject.images[:1]).shape[1]
    is_random = find_traits(subject.model, subject.images[:_FLAGGED], num_classes).is_random
    examples = choose_examples(subject.model, split, len(subject.images))
    attacks = suite(
        subject, num_classes=num_classes, random=is_random, examples=examples, folder=folder, resume=resume
    )
    return attacks, is_random


def _find(
    subject: Subject, evaluation: Evaluation, folder: Path | None, resume: bool, progress: Progress | None
) -> list[Finding]:
    """What AutoAttack's flags and the diagnostics find, or found in an earlier run of the same audit."""
    asked = {"norm": subject.norm, "eps": subject.eps, "budget": subject.budget, "seed": subject.seed}
    model, images = evaluation.clean.about["model"], evaluation.images_sha256
    identity = {"model": model, "images": images, **describe(asked)}
    kept = _kept_findings(folder, identity) if resume else None
    if kept is not None:
        return kept
    found = [_plain(finding) for finding in (*_flags(subject), *diagnose(subject, progress=progress))]
    if folder is not None:
        values = {"identity": identity, "findings": [finding.to_dict() for finding in found]}
        files.write_json(folder / "findings.json", values)
    return found


def _plain(finding: Finding) -> Finding:
    """With evidence that JSON can hold, and gives back as it was."""
    return dataclasses.replace(finding, evidence=describe(finding.evidence))


def judge(claimed: float, accuracy: float, interval: Interval, alarms: Sequence[str]) -> tuple[Verdict, str]:
    """The verdict on a claim, and a sentence that says why.

    Args:
        claimed: the accuracy in question.
        accuracy, interval: what the audit found.
        alarms: names of the findings that say attacks are fooled. Where nothing stands they have nothing to hide, and
            a claim of nothing cannot be too high.
    """
    above, (_, high) = claimed - accuracy, interval
    figures = f"The claim is {100 * claimed:.1f} %, and the audit finds {100 * accuracy:.1f} %"
    if above > SLACK and claimed > high:
        return "not believable", f"{figures}, at most {100 * high:.1f} % allowing for the choice of images."
    if alarms and accuracy > 0 and claimed > SLACK:
        names = ", ".join(alarms)
        return "inconclusive", (
            f"{figures}, which does not contradict it; but there are signs that attacks fail for another reason than "
            f"robustness ({names}), so that the truth may be lower."
        )
    if above > RESOLUTION:
        return (
            "inconclusive",
            f"{figures}; on so few images that may be chance (up to {100 * high:.1f} %): take more.",
        )
    return "believable", f"{figures}, and nothing says that the attacks were fooled."


def _conclude(
    subject: Subject, staged: Staged, findings: list[Finding], claim: float | None, is_random: bool
) -> Audit:
    n = len(staged.right)
    accuracy, plain = float(staged.right.mean()), float(staged.right_when_plain.mean())
    claimed = plain if claim is None else float(claim)
    # Of a random model shares of images are added up; a share has no more spread than a whole image.
    interval = wilson_interval(round(float(staged.right.sum())), n)
    alarms = [finding.name for finding in findings if finding.is_open]
    verdict, reason = judge(claimed, accuracy, interval, alarms)
    return Audit(
        verdict=verdict,
        reason=reason,
        claimed=claimed,
        claim_source="plain attack" if claim is None else "given",
        accuracy=accuracy,
        interval=interval,
        clean_accuracy=float(staged.right_when_clean.mean()),
        plain_accuracy=plain,
        images=n,
        norm=subject.norm,
        eps=subject.eps,
        budget=subject.budget.name,
        seed=subject.seed,
        is_random=is_random,
        stages=staged.stages,
        broken_by=tuple(int(position) for position in staged.broken_by),
        findings=tuple(_plain(finding) for finding in findings),
        model=staged.evaluation.clean.about["model"],
        environment=staged.environment,
    )


def _flags(subject: Subject) -> list[Finding]:
    """What AutoAttack warns of, each warning a finding.

    The suite has an answer to all but one, so that they are notes: means over passes, logarithms, attacks on members
    and features, float64, attacks by classes alone. It has none to a model that takes gradients while it classifies.
    """
    checked = subject.images[:_FLAGGED]
    try:
        with seeded(checked.device, subject.seed):
            _, doubts = examine(Target(subject.model, len(checked), checked.device), checked)
    except RuntimeError as error:  # a model that cannot be differentiated at all
        doubts = (Doubt("no_gradient", f"The model cannot be differentiated: {str(error).splitlines()[0]}."),)
    findings = []
    for number, doubt in enumerate(doubts):
        evidence = {"images": len(checked)}
        if doubt.kind == "dynamic":
            advice = "Attack the optimisation inside the model."
            found = alarm(doubt.sentence, evidence, advice, kind=doubt.kind)
        else:
            found = note(doubt.sentence, evidence, "See which attack broke what.", kind=doubt.kind)
        name, source = f"autoattack_flag_{number + 1}", "Croce & Hein 2020, AutoAttack: flags"
        findings.append(dataclasses.replace(found, name=name, source=source))
    return findings


def _failures(evaluation: Evaluation) -> list[Finding]:
    """A note that names the attacks which the model does not bear, if there are any."""
    failures = dict(evaluation.failures)
    if not failures:
        return []
    claim = f"The model does not bear {len(failures)} of the attacks: {', '.join(failures)}."
    advice = "They broke nothing for that reason: read why, and mend it if you can."
    found = note(claim, failures, advice)
    return [dataclasses.replace(found, name="attacks_not_made", source="the suite")]


def _kept_findings(folder: Path | None, identity: dict[str, Any]) -> list[Finding] | None:
    """The findings of an earlier run of the same audit, if its diagnostics had come to an end."""
    if folder is None or not (folder / "findings.json").exists():
        return None
    kept = files.read_json(folder / "findings.json")
    if not isinstance(kept, dict) or kept.get("identity") != identity:
        return None
    try:
        return [Finding(**finding) for finding in kept["findings"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / 'findings.json'} is damaged ({error}): delete it.") from error
