"""evaluate(): every image under every attack, batch by batch, resumable."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ecnn.attacks import Attack
from ecnn.backbones import eval_mode, without_tf32
from ecnn.checks import parse_eps
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation.measuring import (
    BATCH_SIZE,
    ForeignAttack,
    check_ball,
    check_request,
    measure_change,
    measure_scores,
    place,
    read_model,
    run_attack,
)
from ecnn.evaluation.outcomes import Outcomes, join
from ecnn.evaluation.provenance import describe, describe_environment, describe_model, hash_images, now
from ecnn.evaluation.records import Records, check_names, prepare_folder, write_summary
from ecnn.evaluation.results import CLEAN, Evaluation
from ecnn.progress import Progress


def evaluate(
    model: nn.Module,
    split: Split,
    attacks: Mapping[str, Attack | ForeignAttack],
    *,
    limit: int | None,
    seed: int = 0,
    eps: Sequence[float | str] | None = None,
    batch_size: int = BATCH_SIZE,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = True,
    save_images: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """What becomes of each of the first images of a split under each attack, and of the same images left alone.

    The model is switched to eval mode and restored, part by part. Every verdict is a pass of our own, in float32
    without TF32, over what the attack returned; that must have the shape it came in and pixels in [0, 1], and lie in
    the ball that the attack declares.

    Args:
        model: pixels in [0, 1] to scores (batch, class), on any device.
        split: usually `data.test`.
        attacks: by name, an `Attack` or any callable (model, images, labels) -> images. Ours draw random numbers by
            seed and position, so that batch size, order and resumption change nothing; others are run with torch's
            generator seeded per batch, and restored after.
        limit: how many images, the first of the split, or all of them for None; positions are those in the split.
        seed: of all randomness.
        eps: repeats each attack that has an `eps` at each of these radii, named like "pgd@8/255"; its other settings,
            step sizes too, stay as they are.
        batch_size: images attacked at a time; a batch too large for the GPU's memory is halved by our attacks.
        run_dir: keeps outcomes there (see `ecnn.evaluation.records`), batch by batch.
        resume: goes on with what a killed, or shorter, evaluation left there, if it is of the same attack, seed, model
            and images; False discards what is there of these attacks and computes them again.
        save_images: keeps the attacked images too, under run_dir.
        progress: called as progress(done, total, note).
    """
    jobs = _plan(attacks, eps, seed)
    chosen = check_request(model, split, limit, batch_size)
    if save_images and run_dir is None:
        raise InputError("save_images=True needs a run_dir to keep them in.")
    about = describe_model(model)
    if run_dir is not None:
        prepare_folder(run_dir, about, split, () if resume else [job.name for job in jobs])
    run = _Run(
        model=model,
        split=split,
        chosen=chosen,
        batch_size=batch_size,
        about=about,
        run_dir=run_dir,
        save_images=save_images,
        progress=progress,
        total=(1 + len(jobs)) * len(chosen),
    )
    with eval_mode(model), without_tf32():
        clean = run.finish(_Job(CLEAN, None, None, None, 0), None)
        return Evaluation(clean, {job.name: run.finish(job, clean) for job in jobs})


@dataclass(frozen=True)
class _Job:
    """One attack at one radius; attack None is the images as they are."""

    name: str
    base: str | None
    eps: float | None
    attack: Attack | ForeignAttack | None
    seed: int


def _plan(
    attacks: Mapping[str, Attack | ForeignAttack], eps: Sequence[float | str] | None, seed: int
) -> list[_Job]:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"seed must be a whole number, not {seed!r}.")
    if isinstance(eps, str) or (eps is not None and not len(eps)):
        raise InputError(f'eps must be None or a list of radii such as ["2/255", "4/255"], not {eps!r}.')
    jobs = []
    for base, attack in attacks.items():
        if not callable(attack):
            raise InputError(f"the attack {base!r} cannot be called with (model, images, labels).")
        own = getattr(attack, "eps", None)
        if eps is None or not _has_eps(attack):
            radius = parse_eps(own) if isinstance(own, float | int | str) and _has_eps(attack) else None
            jobs.append(_Job(base, base, radius, attack, seed))
            continue
        for value in eps:
            label = value.strip() if isinstance(value, str) else f"{value:g}"
            part: Any = dataclasses.replace(attack, eps=value)  # type: ignore[type-var]
            jobs.append(_Job(f"{base}@{label}", base, parse_eps(value), part, seed))
    check_names([job.name for job in jobs])
    return jobs


def _has_eps(attack: Any) -> bool:
    return dataclasses.is_dataclass(attack) and any(
        field.name == "eps" and field.init for field in dataclasses.fields(attack)
    )


@dataclass(kw_only=True)
class _Run:
    """Runs jobs over the chosen images and keeps their outcomes.

    Attributes:
        split: the images there are; `chosen` are the first of them.
        about: the model, described.
        total: images times jobs, of which `done` are done.
    """

    model: nn.Module
    split: Split
    chosen: Split
    batch_size: int
    about: dict[str, Any]
    run_dir: str | os.PathLike[str] | None
    save_images: bool
    progress: Progress | None
    total: int
    done: int = 0

    def __post_init__(self) -> None:
        self.image_hash = hash_images(self.chosen)
        self.environment = describe_environment(place(self.model, self.chosen[:1][0]).device)

    def finish(self, job: _Job, clean: Outcomes | None) -> Outcomes:
        """The outcomes of a job: what is on the disk, and the rest computed now."""
        about = {
            "attack": None if job.attack is None else describe(job.attack),
            "base": job.base,
            "eps": job.eps,
            "seed": None if job.attack is None else job.seed,
            "model": self.about,
        }
        records = None if self.run_dir is None else Records(self.run_dir, job.name)
        found = [] if records is None else records.read(about, self.split)
        missing = self._missing(job, records, found)
        self.done += len(self.chosen) - len(missing)
        self._report(job, clean, found)
        for start in range(0, len(missing), self.batch_size):
            positions = missing[start : start + self.batch_size]
            # Later parts come first: of an image in two parts the first is kept.
            found.insert(0, self._batch(job, clean, positions, about, records))
            self.done += len(positions)
            self._report(job, clean, found)
        whole = join(found)
        if records is not None and self.run_dir is not None:
            records.finish(whole, is_new=bool(len(missing)))
            write_summary(self.run_dir)
        return whole.take(whole.index < len(self.chosen))

    def _missing(self, job: _Job, records: Records | None, found: list[Outcomes]) -> np.ndarray:
        positions = np.arange(len(self.chosen))
        known = np.concatenate([part.index for part in found]) if found else positions[:0]
        if self.save_images and job.attack is not None and records is not None:
            known = np.intersect1d(known, records.image_positions())
        return np.setdiff1d(positions, known)

    def _batch(
        self,
        job: _Job,
        clean: Outcomes | None,
        positions: np.ndarray,
        about: dict[str, Any],
        records: Records | None,
    ) -> Outcomes:
        started, clock = now(), time.monotonic()
        index = torch.from_numpy(positions)
        images, labels = self.chosen[index]
        images = place(self.model, images)
        labels = labels.to(images.device)
        crafted = run_attack(self.model, job.attack, job.name, images, labels, job.seed, index)
        columns = {
            **measure_scores(read_model(self.model, crafted.images), labels),
            **measure_change(crafted.images, images),
        }
        check_ball(job.attack, job.eps, job.name, columns, images[0].numel())
        disagreements = 0
        if crafted.predictions is not None:
            disagreements = int((crafted.predictions.cpu().numpy() != columns["prediction"]).sum())
        if clean is not None:
            # An image that was left alone has the outcome it had: rounding in another batch must not break it.
            alone = columns["l0"] == 0
            for column in ("prediction", "nll", "confidence", "brier"):
                columns[column] = np.where(alone, getattr(clean, column)[positions], columns[column])
        part = Outcomes(
            name=job.name,
            index=positions,
            image_hash=self.image_hash[positions],
            label=labels.cpu().numpy(),
            clean_prediction=columns["prediction"] if clean is None else clean.prediction[positions],
            forwards=crafted.forwards,
            backwards=crafted.backwards,
            about={
                **about,
                "disagreements": disagreements,
                "started": started,
                "finished": now(),
                "seconds": time.monotonic() - clock,
                "environments": [self.environment],
            },
            **columns,
        )
        if records is not None:
            if self.save_images and job.attack is not None:
                records.add_images(part, crafted.images)
            records.add_part(part)
        return part

    def _report(self, job: _Job, clean: Outcomes | None, found: list[Outcomes]) -> None:
        if self.progress is None:
            return
        notes = [] if clean is None else [f"{CLEAN} {100 * clean.rate().accuracy:.1f} %"]
        robust = [part.robust[part.index < len(self.chosen)] for part in found]
        if sum(map(len, robust)):
            notes.append(f"{job.name} {100 * float(np.concatenate(robust).mean()):.1f} %")
        self.progress(self.done, self.total, ", ".join(notes))
