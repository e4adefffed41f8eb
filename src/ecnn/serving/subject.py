"""The model that is served: a classifier with its name, its training data and its audit."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ecnn import runs
from ecnn.attacks.views import has_code, members_of
from ecnn.auditing.report import Audit, AuditSummary, find_audit
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.predicting import Classifier, Reading, ask_model, load_classifier


@dataclass(frozen=True, kw_only=True)
class AuditFacts(AuditSummary):
    """The results of an audit of the model."""

    headline: str
    alarms: list[str]
    certified: float | None
    certified_by: str | None


@dataclass(frozen=True, eq=False)
class Subject:
    """A classifier with its name and, if there is one, its audit.

    Attributes:
        name: shown to users: the run folder as it was given, or the name of a shipped model.
        kind: of the model, such as "ecnn" or "resnet".
        data: name of the dataset that it was trained on.
    """

    classifier: Classifier
    name: str
    kind: str = "model"
    data: str = ""
    audit: Audit | None = None

    def __post_init__(self) -> None:
        """Raises InputError unless the model classifies a blank picture of its image size, with a score per class."""
        scores, names = len(self._try().scores[0]), len(self.classifier.class_names)
        if scores < names:
            raise InputError(f"{self.name} gives {scores} scores for {names} classes that have names.")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as `GET /v1/model` returns them for this model."""
        ours, model = self.classifier, self.classifier.model
        found, code = self._try(), None
        if has_code(model):
            with torch.no_grad():
                code = members_of(model, self.blank()[:][0])[1].tolist()
        return {
            "name": self.name,
            "kind": self.kind,
            "data": self.data,
            "classes": [ours.class_name(label) for label in range(len(found.scores[0]))],
            "num_classes": len(ours.class_names),
            "in_channels": ours.in_channels,
            "height": ours.image_size[0],
            "width": ours.image_size[1],
            "code": code,
            "audit": None if self.audit is None else asdict(_audit_facts(self.audit)),
        }

    def blank(self) -> Split:
        """One black picture with the channels and size that the model takes, on the model's device."""
        device = next(self.classifier.model.parameters(), torch.zeros(0)).device
        shape = (1, self.classifier.in_channels, *self.classifier.image_size)
        label = torch.zeros(1, dtype=torch.int64, device=device)
        return Split(torch.zeros(shape, dtype=torch.uint8, device=device), label)

    def _try(self) -> Reading:
        return ask_model(self.classifier.model, self.blank()[:][0])

    def check_reads_as(self, other: Subject) -> None:
        """Raises InputError unless both take images of the same form and have the same classes."""
        for what in ("in_channels", "image_size", "class_names"):
            ours, theirs = getattr(self.classifier, what), getattr(other.classifier, what)
            if ours != theirs:
                raise InputError(
                    f"{other.name} cannot be compared with {self.name}: its {what} are {theirs} and not {ours}."
                )


def load_subject(source: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Subject:
    """The model of a run folder, or of a shipped model by its name, with the audit in the folder if there is one."""
    folder, spec = runs.run_folder(source), runs.read_spec(source)
    classifier = load_classifier(source, device=device)
    audit = find_audit(folder, classifier.model)
    return Subject(classifier, str(source), str(spec.model.get("kind", "ecnn")), spec.data.name, audit)


def _audit_facts(audit: Audit) -> AuditFacts:
    proven = audit.certified
    return AuditFacts(
        **{field.name: getattr(audit, field.name) for field in fields(AuditSummary)},
        headline=audit.headline,
        alarms=[finding.claim for finding in audit.findings if finding.level == "alarm"],
        certified=None if proven is None else proven.accuracy,
        certified_by=None if proven is None else proven.how,
    )
