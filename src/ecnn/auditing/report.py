"""The result of an audit: the verdict with its figures as a dataclass, as versioned JSON and as a Markdown page."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from ecnn import files
from ecnn.auditing.certificates import Certificate, read_certificate
from ecnn.auditing.findings import Finding
from ecnn.auditing.power import Power, read_power
from ecnn.checks import check_choice
from ecnn.errors import InputError
from ecnn.evaluation.intervals import Interval
from ecnn.evaluation.provenance import check_is_of

FORMAT, VERSION = "ecnn-audit", 2
RESULT = "audit.json"
#: Version of the suite and the diagnostics. Raised by hand whenever audits become stronger and may find less accuracy.
AUDIT_VERSION = 2
Verdict = Literal["believable", "trustworthy", "not believable", "below minimum", "inconclusive"]
EXIT_CODES: dict[str, int] = {
    "believable": 0,
    "trustworthy": 0,
    "not believable": 1,
    "below minimum": 1,
    "inconclusive": 3,
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One attack of an audit, on the images that the earlier ones had left; on all images of a random model.

    Attributes:
        name: of the attack.
        attacked: how many images it was made on.
        broken: how many of these it broke; for a random model, by how many images the accuracy fell, a fraction.
        accuracy: share of all images that are still classified correctly after it.
        forwards, backwards: passes of single images that it made through the model; 0 if a user's attack does not tell.
        seconds: wall-clock time.
    """

    name: str
    attacked: int
    broken: float
    accuracy: float
    forwards: int
    backwards: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class AuditSummary:
    """The verdict of an audit and its figures.

    Attributes:
        verdict: "believable" or "not believable" for a claim; without one "trustworthy", if nothing suggests that the
            audited accuracy is too high; "below minimum"; or "inconclusive".
        reason: one sentence that gives the reason.
        claimed: the claimed accuracy under attack, from 0 to 1; None without a claim.
        min_accuracy: the least accuracy under attack that was asked for; None if none was.
        accuracy: share of the images that are right when clean and under every attack: an upper bound of the share
            that is robust.
        interval: Wilson's 95 % interval of that share.
        clean_accuracy: accuracy without an attack.
        plain_accuracy: accuracy under the plain attack alone, PGD on cross-entropy; the clean one if it was not made.
        images: how many were audited.
        norm, eps: of the ball.
        budget: name of the budget.
    """

    verdict: Verdict
    reason: str
    claimed: float | None
    min_accuracy: float | None
    accuracy: float
    interval: Interval
    clean_accuracy: float
    plain_accuracy: float
    images: int
    norm: str
    eps: float
    budget: str

    def __post_init__(self) -> None:
        check_choice("verdict", self.verdict, get_args(Verdict))


@dataclass(frozen=True, kw_only=True)
class Audit(AuditSummary):
    """The full result of an audit: whether to believe a robust accuracy, and why.

    Attributes:
        verdict, reason, claimed, min_accuracy, accuracy, interval, clean_accuracy, plain_accuracy, images, norm, eps,
            budget: the summary, see `AuditSummary`.
        seed: of all randomness.
        is_random: the model answers differently from pass to pass, so that accuracies are means over passes.
        stages: the attacks in their order.
        broken_by: (image,) position in `stages` of the attack that broke each image; -1 if none did, -2 if the clean
            image was misclassified.
        findings: the results of all checks.
        model: description of the audited model.
        environment: where the audit ran, in one line.
        audit_version: `AUDIT_VERSION` of the audit that found this.
        certified: what is proven, so that certified <= robust accuracy <= audited; None if nothing is.
        power: how many images the attacks may have missed; None for audits made before `AUDIT_VERSION` 2.
    """

    seed: int
    is_random: bool
    stages: tuple[Stage, ...]
    broken_by: tuple[int, ...]
    findings: tuple[Finding, ...]
    model: dict[str, Any]
    environment: str
    audit_version: int = AUDIT_VERSION
    certified: Certificate | None = None
    power: Power | None = None

    def __str__(self) -> str:
        low, high = self.interval
        found = f"{_percent(self.accuracy)} [{_percent(low)}, {_percent(high)}] on {self.images} images"
        if self.claimed is None:
            return f"audited {found}: {self.verdict}"
        return f"{self.verdict}: claimed {_percent(self.claimed)}, audited {found}"

    @property
    def headline(self) -> str:
        """A few words: the verdict on the claim; without a claim, the audited accuracy and the verdict."""
        if self.claimed is None:
            return f"{_percent(self.accuracy)} under attack, {self.verdict}"
        return self.verdict

    @property
    def missed(self) -> float | None:
        """Upper bound, at 95 %, of the share of images that the attacks missed; None if it is not known."""
        return None if self.power is None else self.power.missed

    @property
    def exit_code(self) -> int:
        """0 believable or trustworthy, 1 not believable or below minimum, 3 inconclusive."""
        return EXIT_CODES[self.verdict]

    @property
    def explanation(self) -> tuple[str, ...]:
        """Sentences for readers: which attacks broke what the plain attack had left, and what the alarms found."""
        if not self.stages:
            return ()
        lost = self.plain_accuracy - self.accuracy
        later = sorted(self.stages[1:], key=lambda stage: -stage.broken)
        main = [stage for stage in later if stage.broken * 10 >= max(1.0, lost * self.images)][:3]
        sentences = []
        if lost * self.images >= 1 and main:
            parts = ", ".join(f"{stage.name} ({_count(stage.broken)} of {stage.attacked})" for stage in main)
            sentences.append(
                f"The plain attack leaves {_percent(self.plain_accuracy)}. More images are broken by: {parts}."
            )
        sentences += [finding.claim for finding in self.findings if finding.level == "alarm"]
        return tuple(sentences)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with format and version."""
        values = dataclasses.asdict(self)
        values["findings"] = [finding.to_dict() for finding in self.findings]
        values["stages"] = [dataclasses.asdict(stage) for stage in self.stages]
        values["interval"], values["broken_by"] = list(self.interval), list(self.broken_by)
        values["power"] = None if self.power is None else self.power.to_dict()
        values["certified"] = None if self.certified is None else self.certified.to_dict()
        return {"format": FORMAT, "version": VERSION, "exit_code": self.exit_code, **values}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes `to_dict` as JSON."""
        return files.write_json(path, self.to_dict())

    def markdown(self) -> str:
        """A Markdown page: the verdict with its figures, what explains it, a table of the attacks, all findings."""
        low, high = self.interval
        draws = " The model is random: accuracies are means over passes." if self.is_random else ""
        lines = [
            f"# Audit: {self.headline}",
            "",
            self.reason,
            "",
            "| | accuracy |",
            "|---|---|",
            *([] if self.claimed is None else [f"| claimed | {_percent(self.claimed)} |"]),
            *([] if self.min_accuracy is None else [f"| asked for | {_percent(self.min_accuracy)} |"]),
            f"| **audited** | **{_percent(self.accuracy)}** (95 %: {_percent(low)} to {_percent(high)}) |",
            *([] if self.certified is None else [_certified_line(self.certified)]),
            *(
                []
                if self.missed is None
                else [f"| may be lower by images that attacks missed | {100 * self.missed:.1f} points |"]
            ),
            f"| plain attack alone | {_percent(self.plain_accuracy) if self.stages else 'not made'} |",
            f"| without an attack | {_percent(self.clean_accuracy)} |",
            "",
            f"{self.images} images, {self.norm} ball of radius {self.eps:.6g}, budget {self.budget}, seed {self.seed}."
            f"{draws}",
        ]
        if self.explanation:
            lines += ["", "## What explains the difference", ""]
            lines += [f"- {sentence}" for sentence in self.explanation]
        return "\n".join([*lines, *_stage_lines(self), *_finding_lines(self.findings)]) + "\n"


def _certified_line(certified: Certificate) -> str:
    low, high = certified.interval
    found = f"{_percent(certified.accuracy)} (95 %: {_percent(low)} to {_percent(high)}), by {certified.how}"
    return f"| certified: no attack can leave less | {found} |"


def _stage_lines(audit: Audit) -> list[str]:
    which = "all images" if audit.is_random else "the images that the earlier ones left"
    lines = ["", f"## Attacks, each run on {which}", ""]
    lines += [
        "| attack | made on | broke | accuracy left | passes | gradients |",
        "|---|---|---|---|---|---|",
    ]
    lines.append(f"| none | {audit.images} | | {_percent(audit.clean_accuracy)} | | |")
    lines += [
        f"| {stage.name} | {stage.attacked} | {_count(stage.broken)} | {_percent(stage.accuracy)} "
        + (f"| {stage.forwards:,} | {stage.backwards:,} |" if stage.forwards else "| - | - |")
        for stage in audit.stages
    ]
    return lines


def _finding_lines(findings: tuple[Finding, ...]) -> list[str]:
    lines = []
    titles = {"alarm": "Alarms", "note": "Notes", "ok": "Nothing found"}
    for level, title in titles.items():
        chosen = [finding for finding in findings if finding.level == level]
        if not chosen:
            continue
        lines += ["", f"## {title}", ""]
        for finding in chosen:
            lines.append(f"- **{finding.name}**: {finding.claim}")
            if level == "ok":
                continue
            lines += [f"  - figures: {finding.figures}"] if finding.figures else []
            lines += [f"  - advice: {finding.advice}"] if finding.advice else []
            lines.append(f"  - source: {finding.source}")
    return lines


def _count(images: float) -> str:
    return f"{images:.0f}" if images == int(images) else f"{images:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def find_audit(folder: files.AnyPath, model: nn.Module) -> Audit | None:
    """The audit in a model's run folder; None if there is none, InputError if it is of another model."""
    path = Path(folder) / RESULT
    if not files.exists(path):
        return None
    found = load_audit(path)
    check_is_of(path, found.model, model)
    return found


def load_audit(path: str | os.PathLike[str]) -> Audit:
    """The audit in a file that `Audit.save` wrote, or in the audit.json of a run folder; InputError for any other."""
    source = Path(path)
    if files.is_folder(source):
        source = source / RESULT
    values = files.read_json(source)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise InputError(f"{source} does not hold an audit.")
    if values.get("version") not in (1, VERSION):
        raise InputError(
            f"{source} holds an audit of version {values.get('version')!r}; this ecnn reads up to version {VERSION}."
        )
    if values["version"] == 1:  # which filled in the accuracy under a plain attack where nothing was claimed
        was_given = values.get("claim_source") == "given"
        values = {**values, "min_accuracy": None, "claimed": values.get("claimed") if was_given else None}
    wanted = {field.name for field in dataclasses.fields(Audit)}
    try:
        kept = {name: values[name] for name in wanted - {"audit_version", "certified", "power"}}
        kept["power"] = read_power(values.get("power"))
        kept["certified"] = read_certificate(values.get("certified"))
        kept["audit_version"] = int(values.get("audit_version", 1))  # version 1 was not written down
        kept["stages"] = tuple(Stage(**stage) for stage in values["stages"])
        kept["findings"] = tuple(Finding(**finding) for finding in values["findings"])
        low, high = values["interval"]
        kept["interval"], kept["broken_by"] = (float(low), float(high)), tuple(values["broken_by"])
        return Audit(**kept)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{source} is damaged: {error}") from error
