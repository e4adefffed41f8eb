"""The suite, attack by attack: each on what the earlier ones left, resumable, judged by fresh passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ecnn.attacks import Attack, Attacked
from ecnn.attacks.images import per_image
from ecnn.attacks.norms import Norm
from ecnn.auditing.report import Stage
from ecnn.data import Split
from ecnn.evaluation import Evaluation, Outcomes, evaluate, load_images
from ecnn.evaluation.measuring import place, predict
from ecnn.evaluation.records import FOLDER, Records
from ecnn.evaluation.results import CLEAN
from ecnn.progress import Progress

STANDS, WRONG = -1, -2
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
        evaluation: outcomes image by image; those that a stage was not made on have cost 0 and count as right there.
        failures: by name, why an attack could not be made.
    """

    stages: tuple[Stage, ...]
    broken_by: np.ndarray
    right: np.ndarray
    right_when_clean: np.ndarray
    right_when_plain: np.ndarray
    evaluation: Evaluation
    failures: dict[str, str]

    @property
    def environment(self) -> str:
        """Where the clean images were classified, in one line."""
        return ", ".join(self.evaluation.clean.about.get("environments", ()))


@dataclass(frozen=True, kw_only=True)
class OnSurvivors(Attack):
    """Another attack, on some of the images; the others come back as they are and cost nothing.

    Which images are left follows from the attacks before it, so these are what tells one such attack from another.

    Attributes:
        norm, eps: of the attack's ball.
        attack: what is made.
        after: names of the attacks before it.
        standing: (image,) whether the image at each position of the split is left.
    """

    norm: Norm
    eps: float
    attack: Attack
    after: tuple[str, ...]
    standing: Survivors

    def run(
        self, model: nn.Module, images: Tensor, labels: Tensor, *, seed: int = 0, index: Tensor | None = None
    ) -> Attacked:
        index = torch.arange(len(images)) if index is None else index.cpu()
        rows = torch.nonzero(self.standing.mask[index]).squeeze(1)
        nothing = torch.zeros(len(images), dtype=torch.int64)
        result = Attacked(
            images.clone(), labels.clone(), torch.zeros_like(labels).bool(), nothing, nothing.clone()
        )
        if len(rows):
            places = rows.to(images.device)
            found = self.attack.run(model, images[places], labels[places], seed=seed, index=index[rows])
            for name in ("images", "predictions", "success"):
                getattr(result, name)[places] = getattr(found, name)
            for name in ("forwards", "backwards"):
                getattr(result, name)[rows] = getattr(found, name)
        return result


class Survivors:
    """A mask that is no setting: records do not describe it.

    Attributes:
        mask: (image,) bool, on the CPU.
    """

    def __init__(self, mask: np.ndarray) -> None:
        self._mask = torch.from_numpy(mask.copy())

    @property
    def mask(self) -> Tensor:
        return self._mask


@dataclass(frozen=True, kw_only=True)
class Remembered(Attack):
    """Another attack, with torch's generator seeded for each batch, whose results stay in memory.

    A random model asks torch for its randomness; seeded, a resumed audit finds what it would have found.

    Attributes:
        norm, eps: of the attack's ball.
        attack: what is made.
        memory: what it returned.
    """

    norm: Norm
    eps: float
    attack: Attack
    memory: Memory

    def run(
        self, model: nn.Module, images: Tensor, labels: Tensor, *, seed: int = 0, index: Tensor | None = None
    ) -> Attacked:
        index = torch.arange(len(images)) if index is None else index.cpu()
        with _seeded(images.device, seed, int(index[0])):
            found = self.attack.run(model, images, labels, seed=seed, index=index)
        self.memory.keep(index, found.images)
        return found


class Memory:
    """Images by position; no setting either."""

    def __init__(self) -> None:
        self._images: dict[int, Tensor] = {}

    def keep(self, index: Tensor, images: Tensor) -> None:
        self._images.update(zip(index.tolist(), images.cpu(), strict=True))

    def read(self, folder: Path | None, name: str, count: int) -> Tensor:
        """(image, channel, height, width) all of them, those of an earlier run from its folder."""
        if len(self._images) < count and folder is not None:
            index, images = load_images(folder, name)
            self._images = {**dict(zip(index.tolist(), images, strict=True)), **self._images}
        return torch.stack([self._images[position] for position in range(count)])


@contextmanager
def _seeded(device: torch.device, seed: int, number: int) -> Iterator[None]:
    """Torch's generators, seeded by two numbers as long as this lasts."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed((seed * 1_000_003 + number) % 2**63)
        yield


@dataclass(frozen=True, kw_only=True)
class Course:
    """Everything a run of the suite needs.

    Attributes:
        split: of which the first `count` images are audited.
        attacks: in their order.
        passes: over which a random model is judged; 0 for one that is not random.
        folder: for records, None for none.
    """

    model: nn.Module
    split: Split
    count: int
    attacks: Mapping[str, Attack]
    norm: Norm
    eps: float
    seed: int
    passes: int
    folder: Path | None
    resume: bool
    progress: Progress | None = field(default=None)

    def run(self) -> Staged:
        """Every attack in its turn, until nothing stands."""
        if self.folder is not None and not self.resume:
            _discard(self.folder)
        return _run_random(self) if self.passes else _run_in_turn(self)

    def try_stage(
        self, name: str, attack: Attack, position: int, left: float, failures: dict[str, str]
    ) -> Evaluation | None:
        """One stage; None, and a sentence among the failures, for an attack that the model does not bear."""
        try:
            return self.evaluate(name, attack, position, left)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, IndexError) as error:
            failures[name] = (str(error).splitlines() or [type(error).__name__])[0]
            return None

    def evaluate(self, name: str, attack: Attack | None, position: int, left: float) -> Evaluation:
        """One stage, through `ecnn.evaluate`; without an attack the images as they are."""
        device = place(self.model, self.split[:1][0]).device.type
        return evaluate(
            self.model,
            self.split,
            {} if attack is None else {name: attack},
            limit=self.count,
            seed=self.seed,
            batch_size=_BATCH.get(device, _BATCH["cpu"]),
            run_dir=self.folder,
            save_images=bool(self.passes) and self.folder is not None,
            progress=self._report(name, position, left),
        )

    def _report(self, name: str, position: int, left: float) -> Progress | None:
        """Tells what stands before this stage: the stage's own figure counts images that it was not made on."""
        if self.progress is None:
            return None
        tell, stages = self.progress, len(self.attacks)

        def report(done: int, total: int, news: str) -> None:
            tell(position * total + done, stages * total, f"{name}, on {100 * left:.1f} % that stand")

        return report


def _discard(folder: Path) -> None:
    """Removes the records of an earlier audit."""
    for path in sorted((folder / FOLDER).glob("*")):
        if not path.name.startswith("."):
            Records(folder, path.stem).discard()


def _run_in_turn(course: Course) -> Staged:
    clean = course.evaluate(CLEAN, None, 0, 1.0).clean
    alive = clean.robust
    broken_by = np.where(alive, STANDS, WRONG)
    stages: list[Stage] = []
    outcomes: dict[str, Outcomes] = {}
    failures: dict[str, str] = {}
    for position, (name, attack) in enumerate(course.attacks.items()):
        if not alive.any():
            break
        staged = OnSurvivors(
            norm=course.norm, eps=course.eps, attack=attack, after=tuple(outcomes), standing=Survivors(alive)
        )
        result = course.try_stage(name, staged, position, float(alive.mean()), failures)
        if result is None:
            continue
        outcomes[name] = found = _align(result.outcomes[name], clean)
        broken = alive & ~found.robust
        broken_by[broken] = len(stages)
        attacked, alive = int(alive.sum()), alive & ~broken
        stages.append(_stage(found, attacked, float(broken.sum()), float(alive.mean())))
    plain = next(iter(outcomes.values()), clean).robust
    return Staged(
        stages=tuple(stages),
        broken_by=broken_by,
        right=alive.astype(float),
        right_when_clean=clean.robust.astype(float),
        right_when_plain=plain.astype(float),
        evaluation=Evaluation(clean, outcomes),
        failures=failures,
    )


def _align(found: Outcomes, clean: Outcomes) -> Outcomes:
    """The outcomes against the first clean pass, and with the attack's own settings in place of the wrapper's.

    On a GPU a second clean pass may round otherwise.
    """
    alone = found.l0 == 0
    prediction = np.where(alone, clean.prediction, found.prediction)
    settings = found.about["attack"]["attack"]
    if "place" in settings:
        settings = {**settings, "on": settings["place"]}
    about = {**found.about, "attack": settings}
    return dataclasses.replace(found, clean_prediction=clean.prediction, prediction=prediction, about=about)


def _stage(found: Outcomes, attacked: int, broken: float, accuracy: float) -> Stage:
    return Stage(
        name=found.name,
        attacked=attacked,
        broken=broken,
        accuracy=accuracy,
        forwards=int(found.forwards.sum()),
        backwards=int(found.backwards.sum()),
        seconds=float(found.about.get("seconds", 0.0)),
    )


def _run_random(course: Course) -> Staged:
    """Each attack on all images; of each image the point at which most passes are wrong is judged by new passes."""
    clean = course.evaluate(CLEAN, None, 0, 1.0).clean
    images, labels = (part.cpu() for part in course.split[: course.count])
    worst = images
    left = clean_shares = plain_shares = _right_share(course, images, labels, CLEAN)
    broken_by = np.where(clean_shares < 0.5, WRONG, STANDS)
    stages: list[Stage] = []
    outcomes: dict[str, Outcomes] = {}
    failures: dict[str, str] = {}
    for position, (name, attack) in enumerate(course.attacks.items()):
        memory = Memory()
        staged = Remembered(norm=course.norm, eps=course.eps, attack=attack, memory=memory)
        result = course.try_stage(name, staged, position, float(left.mean()), failures)
        if result is None:
            continue
        outcomes[name] = _align(result.outcomes[name], clean)
        points = memory.read(course.folder, name, course.count).to(images)
        shares = _right_share(course, points, labels, name)
        plain_shares = shares if not stages else plain_shares
        worst = torch.where(per_image(torch.from_numpy(shares < left), images), points, worst)
        before, left = left, np.minimum(left, shares)
        broken_by = np.where((broken_by == STANDS) & (left < 0.5), len(stages), broken_by)
        stages.append(_stage(outcomes[name], course.count, float((before - left).sum()), float(left.mean())))
    return Staged(
        stages=tuple(stages),
        broken_by=broken_by,
        right=_right_share(course, worst, labels, None),
        right_when_clean=clean_shares,
        right_when_plain=plain_shares,
        evaluation=Evaluation(clean, outcomes),
        failures=failures,
    )


def _right_share(course: Course, images: Tensor, labels: Tensor, name: str | None) -> np.ndarray:
    """(image,) share of passes that give the label, twice as many for the last word; seeded by the stage."""
    names = [CLEAN, *course.attacks]
    number = _FINAL if name is None else 1000 * names.index(name)
    passes = course.passes * (2 if name is None else 1)
    counts = []
    for batch, part in enumerate(torch.split(torch.arange(len(images)), _BATCH["cpu"])):
        asked = place(course.model, images[part])
        wanted = labels[part].to(asked.device)
        with _seeded(asked.device, course.seed + 1, number + batch):
            right = [predict(course.model, asked) == wanted for _ in range(passes)]
        counts.append(torch.stack(right).double().mean(dim=0).cpu())
    return torch.cat(counts).numpy()
