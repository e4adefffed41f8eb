"""evaluate(): runs attacks on a model, batch by batch and resumable, and records the outcome of every image."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from ecnn import files
from ecnn.asking import in_usual_state, read_model, undisturbed, without_tf32
from ecnn.attacks import NORMS, Attack
from ecnn.attacks.deadlines import NO_TIME, OutOfTimeError, time_is_over
from ecnn.attacks.images import at_most
from ecnn.attacks.randomness import forked_generators
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation.batch import (
    BATCH_SIZE,
    Crafted,
    ForeignAttack,
    batch_seed,
    check_ball,
    check_request,
    measure_change,
    measure_scores,
    place,
    run_attack,
)
from ecnn.evaluation.cluster import RayTasks
from ecnn.evaluation.inputs import Images, read_images
from ecnn.evaluation.jobs import Job, plan_jobs
from ecnn.evaluation.outcomes import Outcomes, join
from ecnn.evaluation.provenance import Fingerprint, describe, describe_environment, now
from ecnn.evaluation.readings import check_reading
from ecnn.evaluation.records import Records, check_names, prepare_folder, write_summary
from ecnn.evaluation.results import CLEAN, Evaluation
from ecnn.progress import Milestone, Progress

#: An attack is given up if it has failed on this many single images and has succeeded on none.
_HOPELESS = 8
#: Called with the outcomes of a finished attack and the attacked images (image, channel, height, width), on the CPU.
Watcher = Callable[[Outcomes, Tensor], None]


@in_usual_state
def evaluate(
    model: nn.Module,
    split: Images,
    attacks: Mapping[str, Attack | ForeignAttack],
    *,
    limit: int | None,
    classes: Sequence[int] | None = None,
    seed: int = 0,
    eps: Sequence[float | str] | None = None,
    cascade: bool = False,
    keep_going: bool = False,
    batch_size: int = BATCH_SIZE,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = True,
    save_images: bool = False,
    watch: Watcher | None = None,
    after: Evaluation | None = None,
    cluster: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """The outcomes of the first images of a split, clean and under each attack.

    The model runs in eval mode; the mode of each of its modules is restored afterwards. Verdicts come from a separate
    forward pass, in float32 (or float64) without TF32, over the images that the attack returned. These must have the
    shape of the originals and pixels in [0, 1], and lie in the ball of the attack if it is an `Attack`.

    Args:
        model: pixels in [0, 1] to scores (batch, class), on any device.
        split: a Split such as `data.test`; a pair (images, labels) of tensors or arrays, bytes or floats in [0, 1]; a
            torch Dataset of (image, label); or a DataLoader. See `ecnn.evaluation.inputs`.
        attacks: by name, an `Attack`, an `OwnAttack` or any callable (model, images, labels) -> images. The random
            numbers of an `Attack` depend on seed and position only, so batch size, order and resumption do not change
            them. Other attacks, and random models, draw from the generators of torch, NumPy and Python, which are
            seeded for each batch and restored afterwards.
        limit: how many images, counted from the first; None for all. Positions are those in the data.
        classes: only images of these classes, the first `limit` of them; positions are then those among these images.
            The model may still answer with any of its classes.
        seed: random seed of all attacks.
        eps: repeats each attack that has an `eps` at each of these radii, named like "pgd@8/255". Its other settings,
            step sizes too, stay the same.
        cascade: runs each attack only on images that are classified correctly when clean and after all earlier attacks.
            In an attack's outcomes the other images are unchanged, cost nothing and have their clean prediction.
            `Evaluation.accuracy` counts the images that are right after an attack and all before it.
        keep_going: if an attack or the model raises an error, the batch is tried in halves, down to single images, and
            the other attacks go on. `Evaluation.failures` and `undone` name what could not be run; an attack that could
            be run on no image has no outcomes. With False the error is raised.
        batch_size: images attacked at a time; an `Attack` halves a batch that is too large for the GPU's memory.
        run_dir: folder in which outcomes are kept, batch by batch (see `ecnn.evaluation.records`).
        resume: goes on from the outcomes of a killed or shorter evaluation in `run_dir`, which must be of the same
            attack, seed, model (its weights, and its scores of a few fixed images) and images. False discards the
            outcomes of these attacks there and computes them again.
        save_images: also keeps the attacked images in `run_dir`.
        watch: called as watch(outcomes, attacked images) when an attack is finished. With a `run_dir` the attacked
            images are kept there as with `save_images`, in a cascade only those that the attack broke.
        after: an earlier evaluation of the same model and images to go on from. The result includes its outcomes, and a
            cascade begins with the images that its attacks did not break.
        cluster: "ray" computes batches as tasks of the Ray cluster at RAY_ADDRESS, or of a local one (extra `cluster`).
            The batches and the outcomes are the same; smaller batches keep more workers busy.
        progress: called as progress(done, total, note).
    """
    jobs = plan_jobs(attacks, eps, seed)
    if after is not None:
        check_names([*after.outcomes, *(job.name for job in jobs)])
    if cascade and eps is not None:
        raise InputError(
            "cascade=True takes no eps=: what broke at one radius would not be attacked at the others. Evaluate each "
            "radius by itself."
        )
    split = read_images(split, limit, classes=classes, progress=progress)
    chosen = check_request(model, split, limit, batch_size)
    if save_images and run_dir is None:
        raise InputError("save_images=True needs a run_dir to keep them in.")
    fingerprint = _fingerprint(model, split, after)
    evaluator = _Evaluator(
        model=model,
        chosen=chosen,
        fingerprint=fingerprint,
        cascade=cascade,
        keep_going=keep_going,
        batch_size=batch_size,
        run_dir=run_dir,
        kept="all" if save_images or (watch is not None and not cascade) else "broken" if watch else "none",
        watch=watch,
        progress=progress,
        total=(1 + len(jobs)) * len(chosen),
        tasks=None if cluster is None else RayTasks(cluster, place(model, chosen[:1][0]).device),
    )
    with (
        nullcontext() if run_dir is None else files.locked(run_dir, "evaluation"),
        undisturbed(model),
        without_tf32(),
    ):
        if run_dir is not None:
            prepare_folder(run_dir, fingerprint, () if resume else [job.name for job in jobs])
        found = evaluator.run(jobs, after)
    _LAST[found.clean] = fingerprint
    return found


#: Fingerprints of earlier evaluations, by their clean outcomes: `after` need not hash model and images again.
_LAST: WeakKeyDictionary[Outcomes, Fingerprint] = WeakKeyDictionary()


def _fingerprint(model: nn.Module, split: Split, after: Evaluation | None) -> Fingerprint:
    """The fingerprint of the model and the images; that of `after` if it is of the same objects."""
    known = None if after is None else _LAST.get(after.clean)
    return known if known is not None and known.is_of(model, split) else Fingerprint(model, split)


@dataclass(frozen=True)
class _Answer:
    """The result of a cluster task for one batch; `memory`, `undone`, `made` and `reason` are as in `_Evaluator`."""

    parts: list[Outcomes]
    memory: list[tuple[np.ndarray, np.ndarray]]
    undone: list[int]
    made: int
    reason: str


def _attempt_there(
    evaluator: _Evaluator, job: Job, positions: np.ndarray, about: dict[str, Any], made: int
) -> _Answer:
    """Computes a batch in a cluster task, with the evaluator that was sent there."""
    evaluator.environment = describe_environment(place(evaluator.model, evaluator.chosen[:1][0]).device)
    evaluator.memory, evaluator.undone, evaluator.made, evaluator.reason = [], [], made, ""
    with undisturbed(evaluator.model), without_tf32():
        parts = evaluator._attempt(job, positions, about)
    return _Answer(parts, evaluator.memory, evaluator.undone, evaluator.made - made, evaluator.reason)


class _NotMadeError(Exception):
    """An attack could not be run on a batch; the text is the first line of the error."""


@dataclass(kw_only=True)
class _Evaluator:
    """Runs jobs over the chosen images and keeps their outcomes.

    Attributes:
        chosen: the images that are evaluated.
        fingerprint: of the model and of all images of the split.
        kept: which attacked images are kept.
        total, done: images times jobs (the clean ones count as a job), and how many of these are done.
        clean: outcomes of the clean images, once they are known.
        memory: positions and attacked images of the current job, if there is no `run_dir` to keep them in.
        tasks: cluster tasks that compute batches; None computes them in this process.
        sent: the clean outcomes with which the evaluator was last sent to the cluster, and the reference to it.
        undone, made, reason: of the current job: positions on which it could not be run, on how many images it could,
            and the last error.
    """

    model: nn.Module
    chosen: Split
    fingerprint: Fingerprint
    cascade: bool
    keep_going: bool
    batch_size: int
    run_dir: str | os.PathLike[str] | None
    kept: Literal["none", "broken", "all"]
    watch: Watcher | None
    progress: Progress | None
    total: int
    tasks: RayTasks | None = None
    sent: tuple[Outcomes | None, Any] | None = None
    done: int = 0
    clean: Outcomes | None = None
    memory: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    undone: list[int] = field(default_factory=list)
    made: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        self.environment = describe_environment(place(self.model, self.chosen[:1][0]).device)

    def run(self, jobs: Sequence[Job], before: Evaluation | None) -> Evaluation:
        """Evaluates the clean images, then every job; in a cascade each job on the images that are still right.

        Args:
            before: an evaluation to go on from, whose clean outcomes are used; None starts with the clean images.
        """
        everything = np.ones(len(self.chosen), dtype=bool)
        if before is None:
            before = Evaluation(self._finish(Job(CLEAN, None, None, None, 0), everything, ()), {})
            right = before.clean.robust
            check_reading(self.model, self.chosen, batch_size=self.batch_size, right=right)
        self.clean = clean = before.clean
        standing = before.survivors()
        outcomes, failures, undone = dict(before.outcomes), dict(before.failures), dict(before.undone)
        for number, job in enumerate(jobs):
            self.done, self.memory, self.undone, self.made = (1 + number) * len(self.chosen), [], [], 0
            wanted = standing if self.cascade else everything
            try:
                found = self._finish(job, wanted, tuple(outcomes))
            except _NotMadeError:
                failures[job.name], undone[job.name] = self.reason, np.flatnonzero(wanted)
                continue
            outcomes[job.name] = found
            standing = standing & found.robust
            if self.watch is not None:
                self.watch(found, self._attacked_images(job))
        return Evaluation(clean, outcomes, failures, undone)

    def _finish(self, job: Job, wanted: np.ndarray, after: tuple[str, ...]) -> Outcomes:
        """The outcomes of a job: those on the disk, and the rest of the wanted images (image,) computed now.

        Images that are not wanted get their clean outcomes. Raises _NotMadeError if the job could be run on no image.
        """
        about, records = self._describe(job, after), self._records(job)
        found = [] if records is None else records.read(about, self.fingerprint)
        self.made = sum(int(part.attacked.sum()) for part in found)
        missing = self._missing(job, wanted, found)
        self.done += len(self.chosen) - len(missing)
        self._report(job, wanted, found)
        batches = [
            missing[start : start + self.batch_size] for start in range(0, len(missing), self.batch_size)
        ]
        attempts = self._attempt_here if self.tasks is None or len(batches) < 2 else self._attempt_elsewhere
        for positions, parts in zip(batches, attempts(job, batches, about), strict=True):
            # New parts go first: `join` keeps the first of several outcomes of an image.
            found = [*parts, *found]
            self.done += len(positions)
            self._report(job, wanted, found)
        if self.undone and not self.made:
            raise _NotMadeError(self.reason)
        left_alone = self._leave_alone(job, about, found)
        whole = join([*found, *left_alone])
        about = {key: value for key, value in whole.about.items() if key != "undone"}
        if self.undone:
            about["undone"] = {"images": sorted(self.undone), "of": int(wanted.sum()), "reason": self.reason}
        whole = dataclasses.replace(whole, about=about)
        if records is not None and self.run_dir is not None:
            records.finish(whole, is_new=bool(len(missing) or left_alone))
            write_summary(self.run_dir)
        self._report(job, wanted, found, is_end=True, is_known=not len(missing))
        return whole.take(whole.index < len(self.chosen))

    def _records(self, job: Job) -> Records | None:
        return None if self.run_dir is None else Records(self.run_dir, job.name)

    def _describe(self, job: Job, after: tuple[str, ...]) -> dict[str, Any]:
        is_attack = job.attack is not None
        return {
            "attack": describe(job.attack),
            "base": job.base,
            "eps": job.eps,
            "seed": job.seed if is_attack else None,
            "model": self.fingerprint.model,
            **({} if self.run_dir is None else {"answers": self.fingerprint.answers}),
            **({"after": list(after)} if self.cascade and is_attack else {}),
        }

    def _missing(self, job: Job, wanted: np.ndarray, found: Sequence[Outcomes]) -> np.ndarray:
        """(n,) positions of the wanted images without a record of this attack, or without a needed attacked image."""
        known = np.concatenate([np.zeros(0, dtype=int), *(part.index[part.attacked] for part in found)])
        records = self._records(job)
        if self.kept != "none" and job.attack is not None and records is not None:
            every = [part.index if self.kept == "all" else part.index[part.broken] for part in found]
            needed = np.concatenate([np.zeros(0, dtype=int), *every])
            known = np.setdiff1d(known, np.setdiff1d(needed, records.image_positions()))
        return np.setdiff1d(np.flatnonzero(wanted), known)

    def _leave_alone(self, job: Job, about: dict[str, Any], found: Sequence[Outcomes]) -> list[Outcomes]:
        """The clean outcomes, under the attack's name and at cost 0, of images that the attack was not run on."""
        known = np.concatenate([np.zeros(0, dtype=int), *(part.index for part in found)])
        rest = np.setdiff1d(np.arange(len(self.chosen)), known)
        if self.clean is None or not len(rest):
            return []
        part = self.clean.take(rest)
        about = {**about, "started": now(), "finished": now(), "environments": [self.environment]}
        return [dataclasses.replace(part, name=job.name, forwards=0 * part.forwards, about=about)]

    def _attempt_here(
        self, job: Job, batches: Sequence[np.ndarray], about: dict[str, Any]
    ) -> Iterator[list[Outcomes]]:
        for positions in batches:
            yield self._attempt(job, positions, about)

    def _attempt_elsewhere(
        self, job: Job, batches: Sequence[np.ndarray], about: dict[str, Any]
    ) -> Iterator[list[Outcomes]]:
        """Like `_attempt_here`, but all batches run in parallel as cluster tasks. Outcomes are written by this process.

        Whether an attack is given up depends on earlier batches, which a task does not know. So a batch on which a task
        failed is tried again here, unless it is the first.
        """
        assert self.tasks is not None
        if self.sent is None or self.sent[0] is not self.clean:
            blank: dict[str, Any] = {"run_dir": None, "progress": None, "watch": None, "tasks": None}
            mine = dataclasses.replace(self, **blank, sent=None, memory=[], undone=[])
            self.sent = (self.clean, self.tasks.send(mine))
        before = self.made
        given = [(job, positions, about, before) for positions in batches]
        answers: Iterator[_Answer] = self.tasks.call(_attempt_there, self.sent[1], given)
        for positions, answer in zip(batches, answers, strict=True):
            is_first = self.made == before and not self.undone
            is_hopeless = not self.made and len(self.undone) >= _HOPELESS
            if is_hopeless or (answer.undone and not is_first):
                yield self._attempt(job, positions, about)
                continue
            self.made, self.undone = self.made + answer.made, self.undone + answer.undone
            self.reason = answer.reason or self.reason
            self._keep_answer(job, answer)
            yield answer.parts

    def _keep_answer(self, job: Job, answer: _Answer) -> None:
        """Keeps the outcomes and images of a cluster task, as `_keep` does for those of this process."""
        records = self._records(job)
        if records is None:
            self.memory += answer.memory
            return
        whole = join(answer.parts) if answer.parts else None
        for index, points in answer.memory:
            assert whole is not None
            records.add_images(whole.take(np.isin(whole.index, index)), torch.tensor(points))
        for part in answer.parts:
            records.add_part(part)

    def _attempt(self, job: Job, positions: np.ndarray, about: dict[str, Any]) -> list[Outcomes]:
        """The outcomes of a batch, or of its halves if the attack cannot be run on all of it.

        An attack that has failed on several single images and has never succeeded is not tried on further images. With
        `keep_going` none is tried after the deadline.
        """
        if job.attack is not None and self.keep_going and time_is_over():
            self.undone += positions.tolist()
            self.reason = NO_TIME
            return []
        if not self.made and len(self.undone) >= _HOPELESS:
            self.undone += positions.tolist()
            return []
        try:
            part = self._batch(job, positions, about)
        except _NotMadeError as failure:
            self.reason = str(failure)
        else:
            self.made += len(positions)
            return [part]
        if len(positions) == 1:
            self.undone += positions.tolist()
            return []
        halves = np.array_split(positions, 2)
        return [part for half in halves for part in self._attempt(job, half, about)]

    def _craft(self, job: Job, images: Tensor, labels: Tensor, index: Tensor) -> tuple[Crafted, Tensor]:
        """The attacked images of a batch and their scores. If this fails and `keep_going` is set: _NotMadeError."""
        try:
            crafted = run_attack(self.model, job.attack, job.name, images, labels, job.seed, index)
            return crafted, read_model(self.model, crafted.images)
        except (Exception, OutOfTimeError) as error:  # a model may raise anything
            if not self.keep_going or job.attack is None:
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _NotMadeError(reason)  # outside the handler, whose traceback would keep tensors alive

    def _batch(self, job: Job, positions: np.ndarray, about: dict[str, Any]) -> Outcomes:
        started, clock = now(), time.monotonic()
        index = torch.from_numpy(positions)
        images, labels = self.chosen[index]
        images = place(self.model, images)
        labels = labels.to(images.device)
        bound = at_most(self.batch_size if self.batch_size < BATCH_SIZE else None)
        with bound, forked_generators(images.device, batch_seed(job.seed, int(positions[0]))):
            crafted, scores = self._craft(job, images, labels, index)
            columns = {**measure_scores(scores, labels), **measure_change(crafted.images, images)}
        norm = getattr(job.attack, "norm", "")
        if isinstance(job.attack, Attack) and norm in NORMS and job.eps is not None:
            check_ball(job.name, norm, job.eps, float(columns[norm].max()), images[0].numel())
        disagreements = 0
        if crafted.predictions is not None:
            disagreements = int((crafted.predictions.cpu().numpy() != columns["prediction"]).sum())
        if self.clean is not None:
            # An unchanged image keeps its clean outcome: rounding in another batch must not break it.
            alone = columns["l0"] == 0
            for column in ("prediction", "nll", "confidence", "brier"):
                columns[column] = np.where(alone, getattr(self.clean, column)[positions], columns[column])
        part = Outcomes(
            name=job.name,
            index=positions,
            image_hash=self.fingerprint.image_hashes(len(self.chosen))[positions],
            label=labels.cpu().numpy(),
            clean_prediction=columns["prediction"]
            if self.clean is None
            else self.clean.prediction[positions],
            forwards=crafted.forwards,
            backwards=crafted.backwards,
            about={
                **about,
                "disagreements": disagreements,
                "nan_gradients": crafted.nan_gradients,
                **({"outside": crafted.outside} if crafted.outside else {}),
                "started": started,
                "finished": now(),
                "seconds": time.monotonic() - clock,
                "environments": [self.environment],
            },
            **columns,
        )
        self._keep(job, part, crafted.images)
        return part

    def _keep(self, job: Job, part: Outcomes, images: Tensor) -> None:
        """Writes the outcomes of a finished batch, if there is a run_dir; keeps its images there or in memory."""
        records = self._records(job)
        rows = np.flatnonzero(part.broken) if self.kept == "broken" else np.arange(len(part))
        if self.kept != "none" and job.attack is not None and len(rows):
            chosen, points = part.take(rows), images[torch.from_numpy(rows).to(images.device)]
            if records is None:
                self.memory.append((chosen.index, points.cpu().float().numpy()))
            else:
                records.add_images(chosen, points)
        if records is not None:
            records.add_part(part)

    def _attacked_images(self, job: Job) -> Tensor:
        """(image, channel, height, width) float32, on the CPU: all chosen images, those with kept points attacked."""
        images, records = self.chosen[:][0].cpu().clone(), self._records(job)
        for index, part in self.memory if records is None else records.image_batches():
            inside = index < len(images)
            images[torch.from_numpy(index[inside])] = torch.from_numpy(part[inside])
        return images

    def _report(
        self,
        job: Job,
        wanted: np.ndarray,
        found: Sequence[Outcomes],
        *,
        is_end: bool = False,
        is_known: bool = False,
    ) -> None:
        """Reports the robust accuracy so far: under this attack, or in a cascade under it and all before it.

        Args:
            is_end: whether the attack is finished.
            is_known: whether it was already finished before this evaluation.
        """
        if self.progress is None:
            return
        if self.cascade and self.clean is not None:
            stands = wanted.copy()
            for part in found:
                inside = part.index < len(stands)
                stands[part.index[inside]] &= part.robust[inside]
            news = f"{job.name}: {100 * stands.mean():.1f} % left"
        else:
            notes = [] if self.clean is None else [f"{CLEAN} {100 * self.clean.rate().accuracy:.1f} %"]
            robust = [part.robust[part.index < len(self.chosen)] for part in found]
            if sum(map(len, robust)):
                notes.append(f"{job.name} {100 * float(np.concatenate(robust).mean()):.1f} %")
            news = ", ".join(notes)
        if is_end:
            news = Milestone(f"{news}, already finished" if is_known else news)
        self.progress(self.done, self.total, news)
