"""audit(): the strongest attacks we have, then checks whether they were misled, then a verdict."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ecnn import files
from ecnn.asking import in_usual_state, read_model, undisturbed, without_tf32
from ecnn.attacks.deadlines import OutOfTimeError, time_is_over, until
from ecnn.attacks.images import at_most, together
from ecnn.attacks.norms import NORMS, Norm
from ecnn.attacks.randomness import forked_generators
from ecnn.auditing.budgets import Budget, resolve_budget
from ecnn.auditing.certificates import Certificate, certify
from ecnn.auditing.deployment import Deployment, filled_up, largest_batch, meet, take_copy
from ecnn.auditing.diagnostics import CHECKS, diagnose, read_evidence
from ecnn.auditing.examination import (
    Late,
    batch_dependent,
    examine,
    is_random_nearby,
    named,
    outside,
    stateful,
)
from ecnn.auditing.findings import Finding, alarm
from ecnn.auditing.first_answers import FirstAnswers, FirstContact, as_given
from ecnn.auditing.own import AnyAttack, join_own, notes_on_request, own_attacks
from ecnn.auditing.power import Power
from ecnn.auditing.remarks import (
    FLAGGED,
    cut_short,
    failed_attacks,
    flags_of,
    half_precision,
    luck_of,
    nan_gradients_of,
    wide_ball,
)
from ecnn.auditing.report import AUDIT_VERSION, RESULT, Audit
from ecnn.auditing.responses import Responses, settle, take_turns
from ecnn.auditing.smoothing import Smoothed
from ecnn.auditing.stages import JUDGED_PASSES, Staged, make_stages
from ecnn.auditing.subject import Subject
from ecnn.auditing.suite import suite, suite_parts
from ecnn.auditing.surrogates import MOST_EXAMPLES, choose_examples
from ecnn.auditing.traits import find_traits
from ecnn.auditing.verdicts import RESOLUTION, interval_of, judge
from ecnn.checks import check_choice, check_count, check_kind, check_number, check_shares, parse_eps
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation import Evaluation
from ecnn.evaluation.batch import BATCH_SIZE, check_request, place
from ecnn.evaluation.cluster import CLUSTERS
from ecnn.evaluation.inputs import Images, read_images
from ecnn.evaluation.provenance import describe, describe_model, same_answers
from ecnn.evaluation.readings import check_reading
from ecnn.progress import Progress

FOLDER, PAGE = "audit", "audit.md"
#: Alarms that devalue a certificate: it is not about the deployed model, or an attack contradicts it.
_NOT_PROVEN = {"stateful", "copies", "certificate_contradicted"}
_QUESTIONS, _PART_OF_TIME = 200, 0.1
_FEW = 8  # images for the first queries, by which `meet` adapts to the model; also the smallest batch
_COMPARED = 4  # images by which copies are compared with the model itself
_STRANGERS = 16  # images for `FirstContact`, audited ones only if there are no others
_TOGETHER = 2**16  # pixel values up to which several attempts at few images share a pass


@in_usual_state
def audit(
    model: nn.Module,
    split: Images,
    *,
    norm: Norm,
    eps: float | str,
    claim: float | None = None,
    min_accuracy: float | None = None,
    limit: int | None = None,
    classes: Sequence[int] | None = None,
    attacks: Mapping[str, AnyAttack] | None = None,
    batch_size: int | None = None,
    cluster: str | None = None,
    budget: str | Budget = "standard",
    minutes: float | None = None,
    seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = True,
    progress: Progress | None = None,
) -> Audit:
    """Measures the accuracy of a model under attack, and judges whether to believe a claimed one.

    The attacks of the suite run in a fixed order, each on the images that the earlier ones left. An image counts as
    robust only if fresh passes in float32 classify it correctly, both clean and under every attack. Then the
    diagnostics look for signs that attacks fail for another reason than robustness. The verdict is

    - "not believable" when the claim is more than a point above the audited accuracy and above its interval;
    - "below minimum" when the audited accuracy is below `min_accuracy`;
    - "inconclusive" when the claim is not refuted, but an open alarm says that the attacks may be misled, and the claim
      is not proven either; or when the images are too few to rule out, at 95 %, that the true accuracy is five points
      below the claim (ten points if the audited accuracy is at most two points below it);
    - "believable" otherwise. Without a claim the audited accuracy itself is judged, and this verdict is "trustworthy".

    A model whose passes differ is judged by the mean over passes, and every attack runs on all images. Of each image
    the point with the fewest correct passes is kept; the share of new passes that are correct there is the image's
    part in the accuracy. If one unlucky pass in hundreds counted as broken, every random model would fail. A finding
    reports randomness that follows no seed of torch, NumPy or Python.

    Args:
        model: maps pixels in [0, 1] to scores (batch, class) of two classes or more, on any device; left as it was.
        split: as `evaluate` takes it: a Split, (images, labels), a torch Dataset or a DataLoader. Up to 1,000 images
            after the audited ones are used to train surrogates.
        norm, eps: of the ball in which robustness is claimed.
        claim: the claimed accuracy under attack, from 0 to 1; None if nothing is claimed.
        min_accuracy: the lowest acceptable accuracy under attack, from 0 to 1; None accepts any.
        limit: how many images to audit, the first of the data; by default the budget's number.
        classes: audits only images of these classes; the model may answer with any of its classes.
        attacks: your own attacks by name, made at the end of the suite: an `Attack`, or a function (model, images,
            labels, *, norm, eps, seed) -> images as `ecnn.evaluation.OwnAttack` takes it. Points outside the ball do
            not count and are reported in a finding. An attack that raises an error is listed as not made.
        batch_size: images attacked at a time; it decides the memory needed, and changes results only by rounding.
        cluster: "ray" runs the attacks on batches as tasks of a Ray cluster, as `evaluate` does. The rest of the audit
            stays in this process, and the result is that of one process.
        budget: "quick", "fast", "standard", "thorough", or a `Budget` of your own.
        minutes: time limit of the search; None for none. Afterwards the points found so far are judged, however long
            that takes, and a finding reports what was left out. With a run_dir the next audit continues there. Your
            own attacks are not interrupted.
        seed: of all randomness.
        run_dir: folder for the records (under audit/) and the result (audit.json and audit.md); None keeps nothing.
        resume: continues with the records of an interrupted audit; False starts anew.
        progress: called as progress(done, total, note).
    """
    eps, budget, limit = check_settings(
        norm=norm,
        eps=eps,
        claim=claim,
        min_accuracy=min_accuracy,
        limit=limit,
        batch_size=batch_size,
        cluster=cluster,
        budget=budget,
        minutes=minutes,
        seed=seed,
        run_dir=run_dir,
    )
    check_kind("model", model, nn.Module, "a torch module")
    end = None if minutes is None else time.monotonic() + 60 * minutes
    patience = None if minutes is None else _PART_OF_TIME * 60 * minutes
    deployment = take_copy(model)  # before the model is asked anything
    split = read_images(split, limit + MOST_EXAMPLES, classes=classes, progress=progress)
    strangers = place(model, split[max(0, len(split) - _STRANGERS) :][0])
    deployment = as_given(deployment, model, strangers[:_COMPARED], int(seed))
    contact = FirstContact(deployment, strangers, norm, eps, int(seed), patience and patience / 4)
    deployment = meet(deployment, place(model, split[:_FEW][0]))
    deployment = dataclasses.replace(deployment, switches=deployment.switches or contact.switches)
    most = batch_size or BATCH_SIZE
    chosen = check_request(deployment.fresh(), split, limit, most)
    some = place(model, chosen[:most][0])
    batch_size = largest_batch(deployment.fresh(), filled_up(some, most), least=_FEW) or batch_size
    check_reading(deployment.fresh(), chosen, batch_size=batch_size or BATCH_SIZE)
    if minutes is not None and batch_size is None:
        batch_size = _batch_in_time(deployment.fresh(), place(model, chosen[:_FEW][0]), 60 * minutes)
    folder = None if run_dir is None else Path(run_dir) / FOLDER
    images = place(model, chosen[:][0])
    labels = chosen.labels.to(images.device)
    subject = Subject(
        model=model, images=images, labels=labels, norm=norm, eps=eps, budget=budget, seed=int(seed)
    )
    with (
        forked_generators(images.device, subject.seed),  # a random model draws from these generators
        at_most(batch_size),
        together(_TOGETHER),
        nullcontext() if run_dir is None else files.locked(run_dir, "audit"),
    ):
        started = time.monotonic()
        answers = FirstAnswers(deployment, subject)
        if patience is not None:
            patience -= time.monotonic() - started
        deployment, findings = examine(deployment, subject, patience)
        findings += contact.findings(deployment, findings)
        request = _Request(split, folder, resume, progress, attacks, classes, batch_size, cluster, end)
        found = _audit(dataclasses.replace(subject, model=deployment.fresh()), deployment, request)
        while (
            late := found.staged.late
        ) is not None:  # each of them at most once: the model is then asked so
            if late == "random":
                subject = dataclasses.replace(subject, is_random=True)
            else:
                deployment, finding = _ask_otherwise(deployment, late, subject)
                findings.append(finding)
            inner = None if request.folder is None else request.folder / late
            request = dataclasses.replace(request, folder=inner)
            found = _audit(dataclasses.replace(subject, model=deployment.fresh()), deployment, request)
        findings += answers.findings(deployment, findings)
        if minutes is not None and end is not None and time.monotonic() > end:
            findings += cut_short(found.staged, found.checks, minutes)
        result = _conclude(subject, found, findings, claim, min_accuracy, deployment)
        if run_dir is not None:
            files.write_text(Path(run_dir) / PAGE, result.markdown())
            result.save(Path(run_dir) / RESULT)  # written last: it marks the audit as finished
    return result


def check_settings(
    *,
    norm: str,
    eps: float | str,
    claim: float | None,
    min_accuracy: float | None,
    limit: int | None,
    batch_size: int | None,
    cluster: str | None,
    budget: str | Budget,
    minutes: float | None,
    seed: int,
    run_dir: str | os.PathLike[str] | None,
) -> tuple[float, Budget, int]:
    """The radius, the budget and the number of images; raises InputError for settings that `audit` would refuse.

    Needs no model and no images, so that settings can be checked before anything is loaded.
    """
    check_choice("norm", norm, NORMS)
    check_count("seed", seed, least=0)
    check_shares(claim=claim, min_accuracy=min_accuracy)
    radius, chosen = parse_eps(eps, most=NORMS[norm].longest), resolve_budget(budget)
    images = chosen.images if limit is None else limit
    check_count("limit", images, least=0)
    if batch_size is not None:
        check_count("batch_size", batch_size)
    if cluster is not None:
        check_choice("cluster", cluster, CLUSTERS)
    if minutes is not None:
        check_number("minutes", minutes)
    if run_dir is not None:
        for name in (RESULT, PAGE):
            files.check_writable(Path(run_dir) / name)
    return radius, chosen, images


def _batch_in_time(model: nn.Module, images: Tensor, seconds: float) -> int | None:
    """How many images to attack at a time so that an audit of so many seconds loses little; None for the usual number.

    The batch under way when the time is over is lost. So 200 passes over a batch should take no more than a tenth of
    the time.
    """
    started = time.monotonic()
    with undisturbed(model), suppress(Exception):  # a model that fails here raises its error later
        read_model(model, images)
    each = (time.monotonic() - started) / len(images)
    most = int(_PART_OF_TIME * seconds / (_QUESTIONS * each)) if each > 0 else BATCH_SIZE
    return None if most >= BATCH_SIZE else max(_FEW, most)


@dataclass(frozen=True)
class _Request:
    """Settings of an audit besides its subject: arguments of `audit`, and `end`, the `time.monotonic` at its limit."""

    split: Split
    folder: Path | None
    resume: bool
    progress: Progress | None
    own: Mapping[str, AnyAttack] | None
    classes: Sequence[int] | None
    batch_size: int | None
    cluster: str | None
    end: float | None


@dataclass(frozen=True)
class _Found:
    """Results of the attacks and of the diagnostics; `checks` is how many diagnostics were made."""

    staged: Staged
    is_random: bool
    findings: list[Finding]
    certified: Certificate | None = None
    power: Power | None = None
    checks: int = 0


def _audit(subject: Subject, deployment: Deployment, request: _Request) -> _Found:
    """Runs attacks and diagnostics on a model from `Deployment.fresh`; stops when `late` asks for another one."""
    with undisturbed(subject.model), without_tf32():
        num_classes = read_model(subject.model, subject.images[:2]).shape[1]
        traits = find_traits(subject.model, subject.images[:FLAGGED], num_classes)
        is_random = subject.is_random or traits.is_random or is_random_nearby(deployment, subject)
        subject = dataclasses.replace(subject, is_random=is_random)
        examples = choose_examples(subject.model, request.split, subject.images)
        kept: dict[str, Any] = {"folder": request.folder, "resume": request.resume}
        stages = make_stages(
            subject,
            request.split,
            deployment,
            is_random=is_random,
            progress=request.progress,
            batch_size=request.batch_size,
            cluster=request.cluster,
            **kept,
        )
        about: dict[str, Any] = {"num_classes": num_classes, "is_random": is_random}
        own = own_attacks(request.own, subject, taken=suite(subject, **about))
        with until(request.end):
            stages.compare(attacked=False)  # before attacks that would have to be made again
            parts = join_own(suite_parts(subject, examples=examples, **about, **kept), own)
            stages.make_parts([] if stages.late else parts)
            stages.compare(attacked=True)
        staged = stages.result()
        if staged.late is not None:
            return _Found(staged, is_random, [])
        with until(request.end):
            found = _find(subject, staged.evaluation, request.folder, request.resume, request.progress)
            if not is_random and any(one.name == "randomness" and one.level != "ok" for one in found):
                return _Found(dataclasses.replace(staged, late="random"), is_random, [])
            read = _read(subject, staged, is_random)
            doubts = [finding.name for finding in (*read, *found) if finding.is_open]
            responses = Responses(subject, num_classes, is_random, examples, request.folder, request.resume)
            turns = take_turns(responses, stages, doubts)
            power = stages.power(turns)
            if not doubts and (luck := luck_of(power)):
                found += luck
                more = take_turns(responses, stages, [finding.name for finding in luck], start=turns.effort)
                turns = more if more.effort > turns.effort else turns  # the budget's turns may be used up
                power = stages.power(turns)
        staged = stages.result()
        if staged.late is not None:
            return _Found(staged, is_random, [])
        certified = _certify(subject, is_random)
    findings = [
        *staged.findings,
        *_read(subject, staged, is_random),
        *_contradictions(subject, staged, certified),
        *notes_on_request(staged.evaluation, request.classes, request.own),
    ]
    missed = power.missed
    is_answered = missed is not None and missed <= RESOLUTION and power.has_flattened and power.agrees
    findings = [
        settle(finding, is_answered=is_answered, facts=power.to_dict()) for finding in (*findings, *found)
    ]
    checks = sum(finding.name in CHECKS for finding in found)
    return _Found(staged, is_random, findings, certified, power, checks)


def _read(subject: Subject, staged: Staged, is_random: bool) -> list[Finding]:
    """Findings from outcomes, failed attacks and settings; a random model's outcomes are of one pass, so left out."""
    evidence = [] if is_random else read_evidence(staged.evaluation)
    return [
        *evidence,
        *failed_attacks(staged),
        *nan_gradients_of(staged),
        *half_precision(subject),
        *wide_ball(subject),
    ]


def _ask_otherwise(deployment: Deployment, late: Late, subject: Subject) -> tuple[Deployment, Finding]:
    """The new deployment and the finding if only attacks revealed that a model remembers or depends on its batch."""
    evidence = {"shown_by": "points where attacks end"}
    if late == "outside":
        changed = deployment.surroundings.changed()
        other = dataclasses.replace(deployment, surroundings=changed, puts_back=True, is_vectorised=False)
        return other, named(outside({**evidence, "kept_in": list(changed.names)}), "stateful")
    if late == "stateful":
        fresh = dataclasses.replace(deployment, forgets=True, in_buffers=False, is_vectorised=False)
        return fresh, named(stateful(evidence), late)
    single = deployment.alone().sped_up(subject.images, subject.seed)
    return single, named(batch_dependent(evidence), late)


def _certify(subject: Subject, is_random: bool) -> Certificate | None:
    """What can be proven of the model; None for a random one, unless it is `Smoothed`, whose noise is known."""
    if is_random and not isinstance(subject.model, Smoothed):
        return None
    return certify(
        subject.model, subject.images, subject.labels, norm=subject.norm, eps=subject.eps, seed=subject.seed
    )


def _contradictions(subject: Subject, staged: Staged, certified: Certificate | None) -> list[Finding]:
    """An alarm if attacks broke images that are proven robust: either the proof or the attacks must be wrong."""
    if certified is None:
        return []
    proven = np.array(certified.proven)
    broken = int(((proven == 1) & (staged.right == 0)).sum())
    if isinstance(subject.model, Smoothed):  # shares of correct passes, which vary by chance
        spread = 0.5 / np.sqrt(JUDGED_PASSES * subject.budget.eot * len(proven))
        broken = int((proven.mean() - staged.right.mean() > 5 * spread) * len(proven))
    if not broken:
        return []
    claim = (
        f"Attacks broke {broken} images that are proven robust: the model answers differently at different times, or "
        "there is an error in this program."
    )
    evidence = {"images": broken, "certified": certified.accuracy, "audited": float(staged.right.mean())}
    advice = "Believe neither the audited nor the certified accuracy, and report this."
    found = alarm(claim, evidence, advice)
    name = "certificate_contradicted"
    return [dataclasses.replace(found, name=name, kind=name, source="the certificate")]


def _find(
    subject: Subject, evaluation: Evaluation, folder: Path | None, resume: bool, progress: Progress | None
) -> list[Finding]:
    """Findings of AutoAttack's flags and of the diagnostics, from `folder` if an earlier run has completed them."""
    asked = {"norm": subject.norm, "eps": subject.eps, "budget": subject.budget, "seed": subject.seed}
    model, images = evaluation.clean.about["model"], evaluation.images_sha256
    identity = {"model": model, "images": images, **describe(asked)}
    answers = evaluation.clean.about.get("answers")
    kept = _kept_findings(folder, identity, answers) if resume else None
    if kept is not None:
        return kept
    looked_at = subject.standing_first(torch.from_numpy(evaluation.survivors()))
    found: list[Finding] = []
    with suppress(OutOfTimeError):
        found += map(_plain, flags_of(subject))
        found += map(_plain, diagnose(looked_at, progress=progress))
    if folder is not None and not time_is_over():
        found_values = [finding.to_dict() for finding in found]
        values = {"identity": identity, "answers": answers, "findings": found_values}
        files.write_json(folder / "findings.json", values)
    return found


def _plain(finding: Finding) -> Finding:
    """The finding with evidence of plain JSON values, so that saving and reading does not change it."""
    return dataclasses.replace(finding, evidence=describe(finding.evidence))


def _conclude(
    subject: Subject,
    found: _Found,
    deployed: list[Finding],
    claim: float | None,
    min_accuracy: float | None,
    deployment: Deployment,
) -> Audit:
    """The result of the audit, with its verdict.

    Args:
        deployed: findings on how the model must be asked.
    """
    staged, findings = found.staged, [*deployed, *found.findings]
    accuracy, images = float(staged.right.mean()), len(staged.right)
    alarms = [finding.name for finding in findings if finding.is_open]
    answered = [finding.name for finding in findings if "converged" in finding.evidence]
    is_sure = found.certified is not None and not set(alarms) & _NOT_PROVEN
    power = found.power
    if power is not None and found.certified is not None and is_sure and not found.is_random:
        proven = (np.array(found.certified.proven) == 1) & (staged.right == 1)
        power = dataclasses.replace(power, proven=int(proven.sum()))
    verdict, reason = judge(
        accuracy,
        images,
        alarms,
        claim=claim,
        min_accuracy=min_accuracy,
        answered=answered,
        certified=found.certified.accuracy if found.certified is not None and is_sure else 0.0,
    )
    if power is not None:
        reason = f"{reason} {power.sentence()}"
    return Audit(
        verdict=verdict,
        reason=reason,
        claimed=None if claim is None else float(claim),
        min_accuracy=None if min_accuracy is None else float(min_accuracy),
        accuracy=accuracy,
        interval=interval_of(accuracy, images),
        clean_accuracy=float(staged.right_when_clean.mean()),
        plain_accuracy=float(staged.right_when_plain.mean()),
        images=images,
        norm=subject.norm,
        eps=subject.eps,
        budget=subject.budget.name,
        seed=subject.seed,
        is_random=found.is_random,
        stages=staged.stages,
        broken_by=tuple(int(position) for position in staged.broken_by),
        findings=tuple(_plain(finding) for finding in findings),
        model=describe_model(deployment.given)
        if deployment.is_wrapped
        else staged.evaluation.clean.about["model"],
        environment=staged.environment,
        audit_version=AUDIT_VERSION,
        certified=found.certified,
        power=power,
    )


def _kept_findings(
    folder: Path | None, identity: dict[str, Any], answers: dict[str, Any] | None
) -> list[Finding] | None:
    """The findings of an earlier run of the same audit, if its diagnostics were completed; None otherwise."""
    if folder is None or not files.exists(folder / "findings.json"):
        return None
    kept = files.read_json(folder / "findings.json")
    if not isinstance(kept, dict) or kept.get("identity") != identity:
        return None
    if not same_answers(kept.get("answers"), answers):
        return None
    try:
        return [Finding(**finding) for finding in kept["findings"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / 'findings.json'} is damaged ({error}): delete it.") from error
