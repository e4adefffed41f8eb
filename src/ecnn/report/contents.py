"""The data of a report: what is read from a run folder, and what is computed on a few images."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ecnn import files, runs
from ecnn.asking import read_model, undisturbed
from ecnn.attacks import APGD, PGD, Attack
from ecnn.attacks.norms import NORMS
from ecnn.attacks.views import has_code
from ecnn.auditing import Audit, load_audit
from ecnn.auditing.report import RESULT as AUDIT_RESULT
from ecnn.checks import check_choice, check_entries, parse_eps
from ecnn.codes import CodeMatrix, load_code
from ecnn.data import Split
from ecnn.evaluation import (
    Evaluation,
    MemberFlips,
    Outcomes,
    TransferMatrix,
    evaluate,
    load_evaluation,
    member_flips,
    member_transfer,
)
from ecnn.evaluation.batch import place
from ecnn.evaluation.records import FOLDER as OUTCOMES
from ecnn.objectives import predicted_classes
from ecnn.progress import Progress
from ecnn.spec import Spec
from ecnn.training.loop import LOG

#: Norm and radius of attacks on a run that names none.
USUAL_RADIUS = ("linf", 8 / 255)
#: Radii of the curve as multiples of the report's radius, images that are shown, members in the transfer matrix.
_MULTIPLES, _SHOWN, _MEMBERS = (0.25, 0.5, 1, 2), 6, 8
#: Steps of the attacks that are made for a report: of APGD, and of PGD on one member.
STEPS, TRANSFER_STEPS = 20, 10
_EPOCH = {"epoch": int, "loss": float, "val_accuracy": float | None, "val_robust_accuracy": float | None}


@dataclass(frozen=True, eq=False)
class RunContents:
    """The contents of a run folder; what it lacks is None or empty.

    Attributes:
        name: of the run in the report.
        source: the folder as it was given, or the name of a shipped model.
        folder: the path of the folder.
        epochs: one entry per line of train.jsonl.
        results: test_accuracy and images (how many), of a finished run.
        evaluation: recorded outcomes of attacks.
        audit: the recorded audit.
        environment: versions and hardware of the training.
    """

    name: str
    source: str
    folder: Path
    spec: Spec
    class_names: tuple[str, ...]
    code: CodeMatrix | None
    epochs: tuple[dict[str, Any], ...]
    results: dict[str, Any] | None
    evaluation: Evaluation | None
    audit: Audit | None
    environment: dict[str, Any]


def read_runs(sources: Sequence[str | os.PathLike[str]]) -> list[RunContents]:
    """The contents of several runs; runs that would share a name are named by their sources instead."""
    found = [read_run(source) for source in sources]
    names = [contents.name for contents in found]
    return [
        dataclasses.replace(contents, name=contents.source) if names.count(contents.name) > 1 else contents
        for contents in found
    ]


def read_run(source: str | os.PathLike[str]) -> RunContents:
    """The contents of a run folder, or of a shipped model given by its name."""
    folder = runs.run_folder(source)
    spec, outcomes = runs.read_spec(source), folder / OUTCOMES
    environment = (
        files.read_json(folder / runs.ENVIRONMENT) if files.exists(folder / runs.ENVIRONMENT) else {}
    )
    return RunContents(
        name=_name(folder) if files.is_folder(source) else str(source),
        source=str(source),
        folder=folder,
        spec=spec,
        class_names=runs.class_names(source),
        code=load_code(folder / runs.CODE) if files.exists(folder / runs.CODE) else None,
        epochs=_read_epochs(folder / LOG),
        results=runs.read_results(folder) if files.exists(folder / runs.RESULTS) else None,
        evaluation=load_evaluation(folder) if files.matching(outcomes, "*.npz") else None,
        audit=load_audit(folder) if files.exists(folder / AUDIT_RESULT) else None,
        environment=environment if isinstance(environment, dict) else {},
    )


def _name(folder: Path) -> str:
    """The folder's name; if that is a number, as of a seed, with the names of the two folders above it."""
    *above, own = folder.resolve().parts[-3:]
    return "/".join([*above, own]) if own.isdecimal() else own


def _read_epochs(path: Path) -> tuple[dict[str, Any], ...]:
    """The entries of train.jsonl, up to the first line that is not JSON because a kill has cut it short."""
    found: list[dict[str, Any]] = []
    if not files.exists(path):
        return ()
    for line in files.read_bytes(path).splitlines():
        try:
            epoch = json.loads(line)
        except ValueError:
            break
        check_entries(f"{path}: a line", epoch, _EPOCH)
        found.append(epoch)
    return tuple(found)


def radius_of(contents: RunContents) -> tuple[str, float]:
    """Norm and radius at which to attack the run: those of its audit, else of its training, else of a recorded attack.

    `USUAL_RADIUS` if it has none of these.
    """
    if contents.audit is not None:
        return contents.audit.norm, contents.audit.eps
    train = contents.spec.train
    recorded = [] if contents.evaluation is None else contents.evaluation.outcomes.values()
    tables = [
        train.get("attack"),
        train.get("val_attack"),
        *(found.about.get("attack") for found in recorded),
    ]
    for table in tables:
        if isinstance(table, dict) and table.get("norm") in NORMS and table.get("eps"):
            return str(table["norm"]), parse_eps(table["eps"])
    return USUAL_RADIUS


@dataclass(frozen=True, eq=False)
class Shown:
    """One test image before and after an attack.

    Attributes:
        clean, attacked: (channel, height, width) in [0, 1].
        label: its true class.
        before, after: the predicted class and its probability, without the attack and with it.
    """

    clean: np.ndarray
    attacked: np.ndarray
    label: int
    before: tuple[int, float]
    after: tuple[int, float]


@dataclass(frozen=True, eq=False)
class Samples:
    """Results of attacks on the first few test images, computed for the report.

    Attributes:
        norm, eps: of the ball.
        images: how many were attacked.
        curves: outcomes of the attacks at several radii.
        attack: name of the attack behind `shown` and `flips`; for images that it did not break, its best attempt is
            used.
        shown: the first images that are classified correctly without an attack.
        flips: how often the attack turns each member from right to wrong; None for a model without a code.
        transfer: between the first members; None for a model without a code.
    """

    norm: str
    eps: float
    images: int
    curves: Evaluation
    attack: str
    shown: tuple[Shown, ...]
    flips: MemberFlips | None
    transfer: TransferMatrix | None


def take_samples(
    model: nn.Module,
    split: Split,
    *,
    norm: str,
    eps: float,
    limit: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> Samples:
    """Attacks the first images at several radii, and returns what the figures of a report need.

    The attacks are APGD on the scores and, for a model with a code, APGD on its members. They are short searches for
    illustration, not an audit.

    Args:
        model: from pixels in [0, 1] to scores.
        split: test images.
        norm, eps: of the ball; the curve has other radii too.
        limit: how many images.
        seed: of all randomness.
    """
    check_choice("norm", norm, NORMS)
    coded = has_code(model)
    options: Any = {"norm": norm, "eps": eps, "steps": STEPS, "loss": "margin"}
    attacks: dict[str, Attack] = {"on the scores": APGD(**options, on="scores")}
    if coded:
        attacks["on the members"] = APGD(**options, on="members")
    strongest = list(attacks)[-1]
    radii = [min(factor * eps, NORMS[norm].longest) for factor in _MULTIPLES]
    kept: dict[str, Tensor] = {}

    def watch(outcomes: Outcomes, attacked: Tensor) -> None:
        if outcomes.about["base"] == strongest and outcomes.about["eps"] == eps:
            kept["images"] = attacked

    found = evaluate(
        model,
        split,
        attacks,
        limit=limit,
        seed=seed,
        eps=sorted(set(radii)),
        watch=watch,
        progress=progress,
    )
    images, labels = split.take(len(found))[:]
    images, labels = images.cpu(), labels.cpu()
    attacked = _with_attempts(model, attacks[strongest], images, kept["images"], labels, seed)
    flips = member_flips(model, images, attacked, labels) if coded else None
    transfer = None
    if coded:
        pgd: Any = {"norm": norm, "eps": eps, "steps": TRANSFER_STEPS, "step_size": eps / 4, "keep": "last"}
        count = flips.share.shape[1] if flips is not None else 0
        transfer = member_transfer(
            model,
            split,
            PGD(**pgd),
            limit=len(found),
            seed=seed,
            members=range(min(_MEMBERS, count)),
            progress=progress,
        )
    shown = _strips(model, images, attacked, labels)
    return Samples(norm, eps, len(found), found, strongest, shown, flips, transfer)


def _with_attempts(
    model: nn.Module, attack: Attack, images: Tensor, attacked: Tensor, labels: Tensor, seed: int
) -> Tensor:
    """The attacked images, where one that the attack returned unchanged is replaced by its point of highest loss."""
    whole = attacked.clone()
    rows = torch.nonzero((attacked == images).flatten(1).all(dim=1)).squeeze(1)
    if len(rows):
        asked = place(model, images[rows])
        last = dataclasses.replace(attack, keep="last")
        whole[rows] = last(model, asked, labels[rows].to(asked.device), seed=seed, index=rows).cpu().to(whole)
    return whole


def _strips(model: nn.Module, images: Tensor, attacked: Tensor, labels: Tensor) -> tuple[Shown, ...]:
    """The first images that the model classifies correctly, with its predictions before and after the attack."""
    before, after = (_answers(model, part) for part in (images, attacked))
    right = [row for row, label in enumerate(labels.tolist()) if before[row][0] == label]
    return tuple(
        Shown(images[row].numpy(), attacked[row].numpy(), int(labels[row]), before[row], after[row])
        for row in right[:_SHOWN]
    )


@torch.no_grad()
def _answers(model: nn.Module, images: Tensor) -> Sequence[tuple[int, float]]:
    """The predicted class of each image and its probability; class -1 if the scores give no answer."""
    with undisturbed(model):
        scores = read_model(model, place(model, images)).double().cpu()
    shares = torch.softmax(scores, dim=1).amax(dim=1)
    return list(zip(predicted_classes(scores).tolist(), shares.tolist(), strict=True))
