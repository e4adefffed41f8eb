"""Plans and runs the audit of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ecnn import files, runs
from ecnn.auditing import Audit, Cost, audit, estimate_cost, resolve_budget
from ecnn.auditing.auditor import check_settings
from ecnn.data import Split
from ecnn.evaluation import OwnAttack, read_images
from ecnn.evaluation.batch import BATCH_SIZE, check_request
from ecnn.pipeline.evaluating import own_attacks
from ecnn.pipeline.opening import Opened
from ecnn.pipeline.threads import suitable_threads
from ecnn.pipeline.training import AnyPath
from ecnn.plots import plot_audit
from ecnn.progress import Progress
from ecnn.spec import AuditTable

PICTURE = "audit.png"


@dataclass(frozen=True)
class AuditPlan:
    """An audit whose settings are checked, and the cost of its attacks.

    Attributes:
        table: settings of the audit.
        split: the test images.
        images: how many are audited, the first of the split (of the chosen classes).
        cost: the most passes that the attacks of the suite can take; diagnostics come on top.
        classes: numbers of the classes whose images are used; None for all.
        attacks: the user's own, by name.
    """

    table: AuditTable
    model: nn.Module
    split: Split
    images: int
    cost: Cost
    classes: Sequence[int] | None = None
    attacks: Mapping[str, OwnAttack] = field(default_factory=dict)


def plan_audit(
    table: AuditTable,
    opened: Opened,
    *,
    classes: str | None = None,
    attacks: Sequence[str] = (),
    out: AnyPath | None = None,
    batch_size: int | None = None,
    cluster: str | None = None,
    minutes: float | None = None,
) -> AuditPlan:
    """Checks the settings, tries the model on one image, and estimates the cost of the attacks.

    Args:
        table: settings of the audit; `table.data` is not read here, because `opened` has the images.
        opened: the model and its images, by `open_model`.
        classes: "3,5,7" or names: only images of these.
        attacks: the user's own, each "file.py:function".
        out, batch_size, cluster, minutes: the values that `audit_run` will get.
    """
    asked = asdict(table)
    del asked["data"]
    check_settings(**asked, run_dir=out, batch_size=batch_size, cluster=cluster, minutes=minutes)
    if out is not None:
        files.check_writable(Path(out) / PICTURE)
    chosen, budget = opened.find_classes(classes), resolve_budget(table.budget)
    own = own_attacks(attacks, table.norm, [table.eps], table.seed)
    limit = budget.images if table.limit is None else table.limit
    images = len(check_request(opened.model, read_images(opened.split, classes=chosen), limit, BATCH_SIZE))
    cost = estimate_cost(opened.model, budget, images, opened.num_classes, norm=table.norm)  # type: ignore[arg-type]
    return AuditPlan(table, opened.model, opened.split, images, cost, chosen, own)


def audit_run(
    made: AuditPlan,
    *,
    out: AnyPath | None = None,
    resume: bool = True,
    batch_size: int | None = None,
    cluster: str | None = None,
    minutes: float | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Runs a planned audit.

    Args:
        out: folder for records, audit.json, audit.md and audit.png; None keeps nothing.
        resume: goes on with what an earlier audit left there.
        batch_size, cluster, minutes: as in `ecnn.audit`.
    """
    options: dict[str, Any] = {**asdict(made.table), "limit": made.images, "run_dir": out, "resume": resume}
    del options["data"]  # made.split holds the images
    options |= {"classes": made.classes, "attacks": made.attacks, "batch_size": batch_size}
    options |= {"cluster": cluster, "minutes": minutes}
    if out is not None:
        runs.check_same_model(out, made.model)
    lock = nullcontext() if out is None else files.locked(out, "audit")
    with runs.kept_in(out, resume=resume), lock, suitable_threads(made.model, made.split):
        found = audit(made.model, made.split, progress=progress, **options)
        if out is not None:
            plot_audit(found, Path(out) / PICTURE)
    return found
