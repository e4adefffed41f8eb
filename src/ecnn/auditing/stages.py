"""Makes the attacks of an audit on the images that earlier ones left; judges random models by the mean over passes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecnn import files
from ecnn.asking import undisturbed
from ecnn.attacks import Attack
from ecnn.attacks.deadlines import OutOfTimeError, time_is_over
from ecnn.attacks.images import at_once, per_image
from ecnn.attacks.randomness import forked_generators
from ecnn.auditing.confirming import compare_ends, compare_means, confirm
from ecnn.auditing.deployment import Deployment
from ecnn.auditing.diagnostics.evidence import asks_answers_alone
from ecnn.auditing.diagnostics.statistics import TOLERANCE, exceeds
from ecnn.auditing.examination import Late, named
from ecnn.auditing.findings import Finding, note, ok
from ecnn.auditing.power import Power, Turns
from ecnn.auditing.report import Stage
from ecnn.auditing.subject import Subject
from ecnn.data import Split
from ecnn.evaluation import Evaluation, Outcomes, evaluate
from ecnn.evaluation.batch import batch_seed, check_ball, place, predict
from ecnn.evaluation.records import FOLDER, Records
from ecnn.evaluation.results import STANDS, WRONG
from ecnn.progress import Progress

_BATCH = {"cpu": 256, "cuda": 1024}
_RETRIED = 48  # most images broken by gradient attacks on which query attacks are tried
#: How many passes judge a point of a random model, as a multiple of those that an attack averages over.
JUDGED_PASSES = 4
_FINAL = 1_000_003  # random stream of the final passes, which no stage uses


_EFFORT = re.compile(r"-x\d+$")


def base_name(name: str) -> str:
    """The name of an attack without the suffix of its effort: rays-long for rays-long-x4."""
    return _EFFORT.sub("", name)


@dataclass(frozen=True, eq=False, kw_only=True)
class Staged:
    """The outcome of the attacks, image by image.

    Attributes:
        stages: the attacks that were made.
        broken_by: (image,) position in `stages` of the attack that broke it; -1 if none did, -2 if the clean image was
            misclassified.
        right: (image,) share of passes that are right at the worst point found; 0 or 1 unless the model is random.
        right_when_clean: (image,) the same share for the clean images.
        right_when_plain: (image,) the same share after the first attack alone.
        evaluation: outcomes of each attack, and why attacks could not be made.
        findings: whether broken images stay broken if their points are rounded to 8 bits; empty if not tested.
        late: that the model depends on earlier questions or on its batch, if only the attacks revealed it; else None.
    """

    stages: tuple[Stage, ...]
    broken_by: np.ndarray
    right: np.ndarray
    right_when_clean: np.ndarray
    right_when_plain: np.ndarray
    evaluation: Evaluation
    findings: tuple[Finding, ...] = ()
    late: Late | None = None

    @property
    def environment(self) -> str:
        """Where the clean images were classified, in one line."""
        return ", ".join(self.evaluation.clean.about.get("environments", ()))


class Stages:
    """Makes attacks one after the other and keeps their outcomes, so that more attacks can follow.

    Args:
        subject: what is audited; its images are the first of the split.
        split: the data they come from.
        deployment: judges the points that attacks find.
        folder: where records are kept; None for nowhere.
        resume: goes on with the records there; False begins anew.
        progress: called as progress(done, total, note).
        batch_size: images attacked at a time; None for a number that suits the device.
        cluster: where batches are attacked, as `evaluate` takes it.
    """

    def __init__(
        self,
        subject: Subject,
        split: Split,
        deployment: Deployment,
        *,
        folder: Path | None,
        resume: bool,
        progress: Progress | None,
        batch_size: int | None = None,
        cluster: str | None = None,
    ) -> None:
        self.subject, self.split, self.deployment = subject, split, deployment
        self.evaluation: Evaluation | None = None
        # `whole` includes attacks that had no image left, because the records of later attacks refer to them.
        self.whole: Evaluation | None = None
        self.attacks: dict[str, Attack] = {}
        self.late: Late | None = None
        if folder is not None and not resume:
            _discard(folder)
        self.settings: dict[str, Any] = {
            "limit": len(subject.images),
            "seed": subject.seed,
            "keep_going": True,
            "batch_size": batch_size or _BATCH.get(subject.images.device.type, _BATCH["cpu"]),
            "run_dir": folder,
            "progress": progress,
            "cluster": cluster,
        }

    def make(self, attacks: Mapping[str, Attack], *, seed: int | None = None) -> float:
        """Makes the attacks in their order, each on the images left, and returns how many they broke.

        For a random model that is the fall of the accuracy, in images: a fraction, which chance can make negative.

        Args:
            seed: of their randomness; the subject's if not given.
        """
        raise NotImplementedError

    def make_parts(self, parts: Iterable[Mapping[str, Attack]]) -> None:
        """Makes one part after the other, until no image or no time is left.

        A part is taken from `parts`, and thereby prepared, only when it is needed. Clean images are classified in any
        case.
        """
        with suppress(OutOfTimeError):
            for part in parts:
                if part or self.evaluation is None:
                    self._make(part)
                if time_is_over() or not self.standing() or self.late is not None:
                    break
        if self.evaluation is None:
            self._make({})

    def _make(self, attacks: Mapping[str, Attack], seed: int | None = None) -> None:
        """Makes the attacks without counting what they broke."""
        raise NotImplementedError

    def compare(self, *, attacked: bool) -> None:
        """Sets `late` if the model must be asked otherwise: by queries, or after attacks by the images left."""
        if self.late is not None or time_is_over():
            return
        with suppress(Exception):  # a model may refuse these points or gradients, and the time may be over
            if not attacked:
                self.late = compare_means(self.deployment, self.subject) if self.subject.is_random else None
            else:
                left = torch.from_numpy(np.flatnonzero(self._is_left()))
                self.late = compare_ends(self.deployment, self.subject, left)

    def _is_left(self) -> np.ndarray:
        """(image,) whether no attack has broken it."""
        raise NotImplementedError

    def standing(self) -> float:
        """How many images are left, a fraction for a random model."""
        raise NotImplementedError

    def proven(self) -> dict[str, float]:
        """By name, how many images each successful attack broke (a fraction for a random model), the best first."""
        made = [stage for stage in self.result().stages if stage.broken > 0]
        return {stage.name: stage.broken for stage in sorted(made, key=lambda stage: -stage.broken)}

    def useful(self, attacks: Iterable[str]) -> set[str]:
        """Which of these attacks have broken images; all of them for a random model, where that may be chance."""
        return set(attacks) & set(self.proven())

    def power(self, turns: Turns) -> Power:
        """How many images the attacks so far may have missed; it may make more attacks to find out."""
        raise NotImplementedError

    def _evaluate(self, attacks: Mapping[str, Attack], seed: int | None, **settings: Any) -> Evaluation:
        self.attacks |= attacks
        settings = {**self.settings, **({} if seed is None else {"seed": seed}), **settings}
        return evaluate(self.subject.model, self.split, attacks, after=self.whole, **settings)

    def result(self) -> Staged:
        """The outcome of the attacks so far."""
        raise NotImplementedError


def make_stages(
    subject: Subject, split: Split, deployment: Deployment, *, is_random: bool, **settings: Any
) -> Stages:
    """`Stages` for a deterministic model, or for one whose passes differ (`is_random`)."""
    return (_MeanOverPasses if is_random else _Cascade)(subject, split, deployment, **settings)


def _discard(folder: Path) -> None:
    """Removes the records of an earlier audit."""
    for path in files.matching(folder / FOLDER, "[!.]*"):
        Records(folder, path.stem).discard()


class _Cascade(Stages):
    """Attacks on a deterministic model, each on the images that are still classified correctly.

    A point that an attack found is classified once more by a fresh copy of the model, in a batch of one. It breaks the
    image only if it is misclassified there.
    """

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.points = self.subject.images.cpu().float().clone()
        self.asked = np.zeros(len(self.points), dtype=bool)
        self.full, self.rounded = np.zeros((2, len(self.points)), dtype=bool)

    def make(self, attacks: Mapping[str, Attack], *, seed: int | None = None) -> float:
        before = None if self.evaluation is None else self.evaluation.survivors()
        self._make(attacks, seed)
        assert self.evaluation is not None
        before = self.evaluation.clean.robust if before is None else before
        return float((before & ~self.evaluation.survivors()).sum())

    def _make(self, attacks: Mapping[str, Attack], seed: int | None = None) -> None:
        self.whole = self._confirm(self._evaluate(attacks, seed, cascade=True, watch=self._remember))
        made = {name: outcomes for name, outcomes in self.whole.outcomes.items() if outcomes.attacked.any()}
        self.evaluation = dataclasses.replace(self.whole, outcomes=made)

    def _is_left(self) -> np.ndarray:
        assert self.evaluation is not None
        return self.evaluation.survivors()

    def standing(self) -> float:
        assert self.evaluation is not None
        return float(self.evaluation.survivors().sum())

    def power(self, turns: Turns) -> Power:
        """Estimated by trying query attacks on some of the images that gradient attacks broke."""
        evaluation = self.evaluation
        assert evaluation is not None
        blind = {name for name, found in evaluation.outcomes.items() if asks_answers_alone(found)}
        broken_by = np.array([*evaluation.outcomes, ""], dtype=object)[evaluation.broken_by.clip(min=STANDS)]
        alone = np.isin(broken_by, sorted(blind))
        fell, proven = evaluation.broken_by >= 0, self.proven()
        shuffled = np.random.default_rng(self.subject.seed).permutation(np.flatnonzero(fell & ~alone))
        rows = torch.from_numpy(np.sort(shuffled[:_RETRIED]))
        # Attacks that were repeated with more effort and broke nothing would not break these either.
        tried = [
            name
            for name in evaluation.outcomes
            if name in blind and (name in proven or base_name(name) == name)
        ]
        try:
            found_again = self._retry([self.attacks[name] for name in tried], rows)
        except OutOfTimeError:
            rows, found_again = rows[:0], 0
        return Power(
            images=len(fell),
            standing=self.standing(),
            broken=int(fell.sum()),
            retried=len(rows) if blind else 0,
            found_again=found_again,
            alone=int(alone.sum()),
            effort=turns.effort,
            doubling=turns.doubling,
        )

    def _retry(self, attacks: list[Attack], rows: Tensor) -> int:
        """How many of the images at least one of the attacks breaks; the cheapest attacks are tried first."""
        subject, left = self.subject, rows

        def questions(attack: Any) -> float:
            return attack.cost(2).forwards if isinstance(attack, Attack) else math.inf

        for attack in sorted(attacks, key=questions):
            if not len(left):
                break
            here = left.to(subject.images.device)
            settings: dict[str, Any] = {"seed": subject.seed, "index": left}
            try:
                found = attack.run(subject.model, subject.images[here], subject.labels[here], **settings)
            except Exception:  # noqa: S112 a model may raise anything: then this attack breaks none of them
                continue
            left = left[~found.success.cpu()]
        return len(rows) - len(left)

    def _remember(self, found: Outcomes, points: Tensor) -> None:
        broken = torch.from_numpy(found.broken)
        self.points[broken] = points[broken]

    def _confirm(self, evaluation: Evaluation) -> Evaluation:
        """The outcomes, in which points that do not break the deployed model no longer break their images."""
        broken = evaluation.clean.robust & ~evaluation.survivors()
        rows = np.flatnonzero(broken & ~self.asked)
        if not len(rows):
            return evaluation
        are_bytes = self.split.images.dtype == torch.uint8
        there = torch.from_numpy(rows)
        found = confirm(self.deployment, self.subject, self.points[there], there, are_bytes=are_bytes)
        self.late = self.late or found.late
        holds = np.zeros_like(broken)
        holds[rows] = found.holds
        self.asked |= holds
        self.full[rows] = found.full
        self.rounded[rows] = found.full if found.rounded is None else found.rounded
        outcomes = {}
        for name, part in evaluation.outcomes.items():
            healed = part.broken & ~holds & ~self.asked
            prediction = np.where(healed, part.clean_prediction, part.prediction)
            outcomes[name] = dataclasses.replace(part, prediction=prediction) if healed.any() else part
        return dataclasses.replace(evaluation, outcomes=outcomes)

    def result(self) -> Staged:
        evaluation = self.evaluation
        assert evaluation is not None
        clean, outcomes = evaluation.clean, evaluation.outcomes
        return Staged(
            stages=tuple(
                _stage(
                    self.subject,
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
            # If the first attack could not be made, the clean images take its place.
            right_when_plain=outcomes.get(next(iter(self.attacks), ""), clean).robust.astype(float),
            evaluation=evaluation,
            findings=self._findings(evaluation),
            late=self.late,
        )

    def _findings(self, evaluation: Evaluation) -> tuple[Finding, ...]:
        broken = evaluation.clean.robust & ~evaluation.survivors()
        n, left = len(broken), int(evaluation.survivors().sum())
        if not broken.any() or self.split.images.dtype != torch.uint8:
            return ()
        healed = int((broken & ~self.rounded).sum())
        evidence = {
            "broken": int(broken.sum()),
            "right_when_rounded": healed,
            "accuracy_when_rounded": (left + healed) / n,
        }
        claim = (
            f"Of {int(broken.sum())} broken images, {healed} are right again when the point that broke them, and the "
            "points beyond it, are rounded to 8 bits."
        )
        advice = "The accuracy counts points before rounding. An attack on 8-bit files has to search rounded points."
        found = (
            note(claim, evidence, advice)
            if exceeds(healed, int(broken.sum()), TOLERANCE)
            else ok(claim, evidence)
        )
        return (named(found, "rounding"),)


def _stage(subject: Subject, found: Outcomes, attacked: int, broken: float, accuracy: float) -> Stage:
    """The `Stage` of an attack; InputError if its points leave the audited ball, which it may not even know."""
    farthest = float(getattr(found, subject.norm).max())
    check_ball(found.name, subject.norm, subject.eps, farthest, subject.images[0].numel())
    return Stage(
        name=found.name,
        attacked=attacked,
        broken=broken,
        accuracy=accuracy,
        forwards=int(found.forwards.clip(min=0).sum()),  # -1: a user's attack does not count them
        backwards=int(found.backwards.clip(min=0).sum()),
        seconds=float(found.about.get("seconds", 0.0)),
    )


class _MeanOverPasses(Stages):
    """Attacks on a random model, each on all images.

    Of each image the point with the most wrong passes is kept. New passes judge it in the end, because the passes that
    chose it are biased towards wrong answers.
    """

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.names: list[str] = []  # of the attacks; the order decides the random numbers of their passes
        self.worst = self.subject.images.cpu().float()
        self.clean = self.after_plain = self.left = self._right_share(self.worst, 0, self._passes)
        self.broken_by = np.where(self.clean < 0.5, WRONG, STANDS)
        self.fell: dict[str, np.ndarray] = {}
        self.stages: list[Stage] = []

    def make(self, attacks: Mapping[str, Attack], *, seed: int | None = None) -> float:
        is_first = self.evaluation is None
        before = 0.0 if is_first else float(self._final().sum())
        self._make(attacks, seed)
        return float(self.clean.sum() - self.left.sum()) if is_first else before - float(self._final().sum())

    def _make(self, attacks: Mapping[str, Attack], seed: int | None = None) -> None:
        self.names += attacks
        self.evaluation = self.whole = self._evaluate(attacks, seed, watch=self._take)

    def _is_left(self) -> np.ndarray:
        return self.left >= 0.5

    def standing(self) -> float:
        return float(self.left.sum())

    def useful(self, attacks: Iterable[str]) -> set[str]:
        return set(attacks)

    def power(self, turns: Turns) -> Power:
        """Counted from the outcomes: all attacks were made on all images, so that none has to be tried again."""
        assert self.evaluation is not None
        right, either = self.clean >= 0.5, np.zeros((2, len(self.clean)), dtype=bool)
        for name, fell in self.fell.items():
            either[int(asks_answers_alone(self.evaluation.outcomes[name]))] |= fell & right
        gradients, answers = either
        return Power(
            images=len(right),
            standing=float(self._final().sum()),
            broken=int((gradients | answers).sum()),
            retried=int(gradients.sum()),
            found_again=int((gradients & answers).sum()),
            alone=int((answers & ~gradients).sum()),
            effort=turns.effort,
            doubling=turns.doubling,
        )

    @property
    def _passes(self) -> int:
        """How many passes judge a point. With too few, chance would decide which of two points is the worse one."""
        return JUDGED_PASSES * self.subject.budget.eot

    def _final(self) -> np.ndarray:
        """(image,) share of new passes that are right at the worst point so far."""
        return self._right_share(self.worst, None, self._passes)

    def _take(self, found: Outcomes, points: Tensor) -> None:
        """Judges the points of an attack, (image, channel, height, width) on the CPU, and keeps the worst ones."""
        shares = self._right_share(points, 1 + self.names.index(found.name), self._passes)
        self.after_plain = shares if found.name == self.names[0] else self.after_plain
        self.fell[found.name] = shares < 0.5
        self.worst = torch.where(per_image(torch.from_numpy(shares < self.left), points), points, self.worst)
        before, self.left = self.left, np.minimum(self.left, shares)
        newly = (self.broken_by == STANDS) & (self.left < 0.5)
        self.broken_by = np.where(newly, len(self.stages), self.broken_by)
        lost = float((before - self.left).sum())
        self.stages.append(_stage(self.subject, found, len(points), lost, float(self.left.mean())))

    def result(self) -> Staged:
        """The outcome of the attacks so far, judged by new passes at the worst points."""
        assert self.evaluation is not None
        return Staged(
            stages=tuple(self.stages),
            broken_by=self.broken_by,
            right=self._final(),
            right_when_clean=self.clean,
            right_when_plain=self.after_plain,
            evaluation=self.evaluation,
            late=self.late,
        )

    def _right_share(self, images: Tensor, stage: int | None, passes: int) -> np.ndarray:
        """(image,) share of passes that give the label; their seed follows from the stage, None for the last passes."""
        subject, judge, counts = self.subject, self.deployment.fresh(), []
        first = _FINAL if stage is None else 1000 * stage
        for batch, part in enumerate(
            torch.split(torch.arange(len(images), device="cpu"), at_once(_BATCH["cpu"]))
        ):
            asked = place(subject.model, images[part])
            wanted = subject.labels[part.to(subject.labels.device)]
            with (
                undisturbed(judge),
                forked_generators(asked.device, batch_seed(subject.seed + 1, first + batch)),
            ):
                right = [predict(judge, asked) == wanted for _ in range(passes)]
            counts.append(torch.stack(right).double().mean(dim=0).cpu())
        return torch.cat(counts).numpy()
