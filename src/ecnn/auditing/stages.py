"""The attacks of an audit, each on what the earlier ones left; a random model is judged by the mean over passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecnn.attacks import Attack
from ecnn.attacks.draws import forked_generators
from ecnn.attacks.images import per_image
from ecnn.auditing.report import Stage
from ecnn.auditing.subject import Subject
from ecnn.data import Split
from ecnn.evaluation import Evaluation, Outcomes, evaluate
from ecnn.evaluation.batch import batch_seed, check_ball, place, predict
from ecnn.evaluation.records import FOLDER, Records
from ecnn.evaluation.results import STANDS, WRONG
from ecnn.progress import Progress

_BATCH = {"cpu": 256, "cuda": 1024}
_FINAL = 1_000_003  # a stream of passes that no stage has seen


@dataclass(frozen=True, eq=False, kw_only=True)
class Staged:
    """What the suite left.

    Attributes:
        stages: the attacks that were made.
        broken_by: (image,) position in `stages` of what broke it; -1 if it stands, -2 if it was wrong anyway.
        right: (image,) share of passes that are right at the worst point found; 0 or 1 unless the model is random.
        right_when_clean: (image,) the same of the images as they are.
        right_when_plain: (image,) the same after the first attack alone.
        evaluation: outcomes image by image, and why attacks could not be made.
    """

    stages: tuple[Stage, ...]
    broken_by: np.ndarray
    right: np.ndarray
    right_when_clean: np.ndarray
    right_when_plain: np.ndarray
    evaluation: Evaluation

    @property
    def environment(self) -> str:
        """Where the clean images were classified, in one line."""
        return ", ".join(self.evaluation.clean.about.get("environments", ()))


def run_stages(
    subject: Subject,
    split: Split,
    attacks: Mapping[str, Attack],
    *,
    is_random: bool,
    folder: Path | None,
    resume: bool,
    progress: Progress | None,
) -> Staged:
    """Every attack in its turn, until nothing stands.

    Args:
        subject: what is audited; its images are the first of the split.
        split: where they come from.
        attacks: in their order.
        is_random: whether the passes of the model differ.
        folder: for records, None for none.
        resume: goes on with the records there; False begins anew.
        progress: called as progress(done, total, note).
    """
    if folder is not None and not resume:
        _discard(folder)
    settings: dict[str, Any] = {
        "limit": len(subject.images),
        "seed": subject.seed,
        "keep_going": True,
        "batch_size": _BATCH.get(subject.images.device.type, _BATCH["cpu"]),
        "run_dir": folder,
        "progress": progress,
    }
    if is_random:
        tally = _MeanOverPasses(subject, list(attacks))
        return tally.result(evaluate(subject.model, split, attacks, watch=tally.take, **settings))
    evaluation = evaluate(subject.model, split, attacks, cascade=True, **settings)
    made = {name: found for name, found in evaluation.outcomes.items() if found.attacked.any()}
    return _judge_in_turn(subject, dataclasses.replace(evaluation, outcomes=made), next(iter(attacks)))


def _discard(folder: Path) -> None:
    """Removes the records of an earlier audit."""
    for path in sorted((folder / FOLDER).glob("*")):
        if not path.name.startswith("."):
            Records(folder, path.stem).discard()


def _judge_in_turn(subject: Subject, evaluation: Evaluation, plain: str) -> Staged:
    """What the cascade left of a model that is not random: an image is right or it is not.

    Args:
        plain: name of the first attack; where it could not be made, nothing lies between it and the clean images.
    """
    clean, outcomes = evaluation.clean, evaluation.outcomes
    return Staged(
        stages=tuple(
            _stage(
                subject,
                found,
                int(found.attacked.sum()),
                float(found.broken.sum()),
                evaluation.accuracy[name],
            )
            for name, found in outcomes.items()
        ),
        broken_by=evaluation.broken_by,
        right=evaluation.survivors().astype(float),
        right_when_clean=clean.robust.astype(float),
        right_when_plain=outcomes.get(plain, clean).robust.astype(float),
        evaluation=evaluation,
    )


def _stage(subject: Subject, found: Outcomes, attacked: int, broken: float, accuracy: float) -> Stage:
    """One line of the audit; InputError if the attack left the audited ball, which it need not declare itself."""
    farthest = float(getattr(found, subject.norm).max())
    check_ball(found.name, subject.norm, subject.eps, farthest, subject.images[0].numel())
    return Stage(
        name=found.name,
        attacked=attacked,
        broken=broken,
        accuracy=accuracy,
        forwards=int(found.forwards.sum()),
        backwards=int(found.backwards.sum()),
        seconds=float(found.about.get("seconds", 0.0)),
    )


class _MeanOverPasses:
    """What attacks on all images leave of a random model.

    Of each image the point is kept at which most passes are wrong; new passes judge it in the end.

    Args:
        subject: what is audited.
        names: of the attacks, in their order: each has passes of its own.
    """

    def __init__(self, subject: Subject, names: list[str]) -> None:
        self.subject, self.names = subject, names
        self.worst = subject.images.cpu().float()
        self.clean = self.plain = self.left = self._right_share(self.worst, 0, subject.budget.eot)
        self.broken_by = np.where(self.clean < 0.5, WRONG, STANDS)
        self.stages: list[Stage] = []

    def take(self, found: Outcomes, points: Tensor) -> None:
        """Judges what an attack made of the images (image, channel, height, width), on the CPU."""
        shares = self._right_share(points, 1 + self.names.index(found.name), self.subject.budget.eot)
        self.plain = shares if found.name == self.names[0] else self.plain
        self.worst = torch.where(per_image(torch.from_numpy(shares < self.left), points), points, self.worst)
        before, self.left = self.left, np.minimum(self.left, shares)
        newly = (self.broken_by == STANDS) & (self.left < 0.5)
        self.broken_by = np.where(newly, len(self.stages), self.broken_by)
        lost = float((before - self.left).sum())
        self.stages.append(_stage(self.subject, found, len(points), lost, float(self.left.mean())))

    def result(self, evaluation: Evaluation) -> Staged:
        """What is left in the end, by twice as many new passes."""
        return Staged(
            stages=tuple(self.stages),
            broken_by=self.broken_by,
            right=self._right_share(self.worst, None, 2 * self.subject.budget.eot),
            right_when_clean=self.clean,
            right_when_plain=self.plain,
            evaluation=evaluation,
        )

    def _right_share(self, images: Tensor, stage: int | None, passes: int) -> np.ndarray:
        """(image,) share of passes that give the label, seeded by the stage; None is the last word."""
        subject, counts = self.subject, []
        first = _FINAL if stage is None else 1000 * stage
        for batch, part in enumerate(torch.split(torch.arange(len(images)), _BATCH["cpu"])):
            asked = place(subject.model, images[part])
            wanted = subject.labels[part.to(subject.labels.device)]
            with forked_generators(asked.device, batch_seed(subject.seed + 1, first + batch)):
                right = [predict(subject.model, asked) == wanted for _ in range(passes)]
            counts.append(torch.stack(right).double().mean(dim=0).cpu())
        return torch.cat(counts).numpy()
