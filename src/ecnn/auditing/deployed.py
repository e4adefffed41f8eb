"""What is judged: a copy of the model that nobody has asked before, one image at a time.

An attack asks a model thousands of questions, in batches. A deployed model has not been asked them, and answers for one
image. Where both make no difference, the model is attacked as it is. Where it does, every question goes to a fresh copy
(`FreshEachTime`), or every image by itself (`OneAtATime`), so that the model is a function of one image again.
"""

from __future__ import annotations

import dataclasses
import random
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ecnn.attacks.base import Attacked, read_model
from ecnn.attacks.draws import Draws, forked_generators
from ecnn.attacks.images import at_once
from ecnn.attacks.norms import NORMS
from ecnn.attacks.rays import Neighbours, RaySearch
from ecnn.auditing.alone import OneAtATime, can_be_vectorised
from ecnn.auditing.diagnostics.statistics import TOLERANCE, exceeds
from ecnn.auditing.findings import Finding, alarm, note
from ecnn.auditing.subject import Subject
from ecnn.backbones import copy_model, undisturbed, without_tf32
from ecnn.objectives import predicted_classes, score_margin

#: Images that the first questions are about, and how many of them are asked about one by one.
_PROBED, _ALONE = 32, 8
#: Questions after which a model that counts them is expected to show it; later changes show when attacks are over.
_QUESTIONS = 64
#: Clean images that stand beside each image where a model cannot answer for one alone.
_COMPANY = 31
#: Of the spread of an image's scores: float32 in another batch changes them by 1e-5, half precision by 1e-2.
_APART, _APART_IN_HALF = 1e-3, 3e-2
#: A margin within this share of the spread of the scores is a tie, decided by the order of summation.
_TIE = 1e-5
#: Of the same spread: a batch that changes scores by less moves the border a little, and is no other model.
_LITTLE = 0.05
#: Questions about an image for which no point holds alone, of a model that its batch sways.
_SEARCHED = 1000
#: How much farther a point is taken that rounding takes back.
_REACHES = (1.0, 1.05, 1.2, 1.5, 2.0, 4.0)
_STREAM = 53
_SOURCE = "deployment: a fresh copy, one image at a time"
_FULL = 256  # images of a full batch

Late = Literal["stateful", "batch_dependent"]


class FreshEachTime(nn.Module):
    """A model whose every question goes to a new copy, so that nothing it was asked before plays a part.

    A generator of its own would draw the same in each copy: it is seeded anew, from torch's.

    Args:
        pristine: the model, never asked itself; copies share its parameters.
    """

    def __init__(self, pristine: nn.Module) -> None:
        super().__init__()
        self.pristine = pristine

    def forward(self, images: Tensor) -> Any:
        memo: dict[int, Any] = {id(parameter): parameter for parameter in self.pristine.parameters()}
        shared = len(memo)
        fresh = copy_model(self.pristine, memo)
        for value in list(memo.values())[shared:]:
            _seed_anew(value)
        return fresh(images)


class FreshBuffers(nn.Module):
    """A model whose every question finds its buffers as they were: what it writes there is forgotten.

    That is `FreshEachTime` for a model that remembers in its buffers alone, without the copies.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        # The zero makes each a copy; and one for each image, where torch asks about many as if each were alone.
        buffers = {
            name: value ^ False
            if value.dtype == torch.bool
            else value + images.new_zeros((), dtype=value.dtype)
            for name, value in self.model.named_buffers()
        }
        return torch.func.functional_call(self.model, buffers, (images,))


def _seed_anew(value: Any) -> None:
    """Seeds a generator of torch, NumPy or Python from torch's own; anything else stays as it is."""
    if isinstance(value, torch.Generator):
        value.manual_seed(_draw_seed())
    elif isinstance(value, random.Random | np.random.RandomState):
        value.seed(_draw_seed())
    elif isinstance(value, np.random.Generator):
        kind = type(value.bit_generator)
        value.bit_generator.state = kind(_draw_seed()).state


def _draw_seed() -> int:
    return int(torch.randint(2**31, ()))


class Isolated(nn.Module):
    """A model that gets a copy of the images and gives a copy of its scores: it may change the one and reuse the other.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        said = self.model(images.clone())
        return said.clone() if isinstance(said, Tensor) else said


@dataclass(frozen=True, eq=False, kw_only=True)
class Deployment:
    """A model as its users have it, and how it must be asked for that.

    Attributes:
        pristine: a copy that is never asked; the model itself where it cannot be copied.
        trouble: why it cannot be copied; empty if it can.
        forgets: every question goes to a fresh copy.
        in_buffers: of what it forgets: it remembers in its buffers alone.
        company: not None if every image is asked about by itself, beside these clean ones, which may be none.
        isolated: it gets copies of images, and its scores are copied.
        is_vectorised: images that are asked about one at a time go through in one pass, each as if it were alone.
        is_swayed: its batch changes its scores a little; it is attacked in batches, and judged one image at a time.
    """

    pristine: nn.Module
    trouble: str = ""
    forgets: bool = False
    in_buffers: bool = False
    company: Tensor | None = None
    isolated: bool = False
    is_vectorised: bool = False
    is_swayed: bool = False

    @property
    def is_wrapped(self) -> bool:
        """Whether `fresh` gives something else than a copy."""
        return self.forgets or self.company is not None or self.isolated

    def fresh(self) -> nn.Module:
        """A copy that nobody has asked, or the model itself where there is no copy."""
        if self.trouble:
            return Isolated(self.pristine) if self.isolated else self.pristine
        model = self._bare()
        if self.company is None:
            return model
        return OneAtATime(model, self.company, is_vectorised=self.is_vectorised)

    def _bare(self) -> nn.Module:
        if self.forgets and not self.in_buffers:
            model: nn.Module = FreshEachTime(self.pristine)
        else:
            model = copy_model(self.pristine)
            model = FreshBuffers(model) if self.forgets else model
        return Isolated(model) if self.isolated else model

    def sped_up(self, images: Tensor, seed: int) -> Deployment:
        """The same; in one pass over many images, if each must be asked about by itself and that is the same."""
        if self.company is None or self.trouble or len(images) < 2:
            return self
        company = self.company.to(images)
        return dataclasses.replace(self, is_vectorised=can_be_vectorised(self._bare(), company, images, seed))

    def alone(self) -> Deployment:
        """The same, asked about each image by itself."""
        if self.company is not None:
            return self
        return dataclasses.replace(self, company=torch.zeros(0), is_swayed=False)


def take_copy(model: nn.Module) -> Deployment:
    """The model as it is now; call it before anything is asked."""
    try:
        return Deployment(pristine=copy_model(model))
    except Exception as error:  # whatever a model holds: locks, handles, tensors with a history
        trouble = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return Deployment(pristine=model, trouble=trouble)


def meet(taken: Deployment, images: Tensor) -> Deployment:
    """How the model can be asked at all, from the first questions to copies of it.

    A model that takes one image but not several is asked about each by itself. One that writes into the images that it
    is given, or into scores that it gave before, gets copies and is copied from.

    Args:
        images: a few, not changed here whatever the model does to what it is given.
    """
    for asked in (taken, taken.alone()):
        try:
            return dataclasses.replace(asked, isolated=_writes(asked.fresh(), images))
        except Exception:  # noqa: S112 one that cannot answer at all says so when it is asked in earnest
            continue
    return taken


def _writes(model: nn.Module, images: Tensor) -> bool:
    """Whether a model changes what it is given, or what it has answered."""
    with undisturbed(model), torch.no_grad():
        given = [images.clone(), 1 - images]
        first = model(given[0])
        kept = first.clone()
        model(given[1])
    is_untouched = torch.equal(given[0], images) and torch.equal(given[1], 1 - images)
    return not (is_untouched and torch.equal(first.nan_to_num(), kept.nan_to_num()))


def examine(taken: Deployment, subject: Subject) -> tuple[Deployment, list[Finding]]:
    """How the model must be asked, from a few questions to copies of it, and what they found.

    Args:
        taken: of `take_copy`.
        subject: what is audited; its model is not asked.
    """
    with without_tf32():
        deployment, findings = _Examination(taken, subject).run()
        return deployment.sped_up(subject.images, subject.seed), findings


class _Examination:
    """Questions to fresh copies of a model, under the same seeds of torch, NumPy and Python unless said otherwise."""

    def __init__(self, taken: Deployment, subject: Subject) -> None:
        self.taken, self.seed = taken, subject.seed
        some = max(_ALONE, at_once(_PROBED))
        self.images, self.labels = subject.images[:some], subject.labels[:some]
        self.noisy = [_noisy(subject, self.images, number) for number in range(3)]
        self.findings: list[Finding] = []

    def run(self) -> tuple[Deployment, list[Finding]]:
        taken = self.taken
        if taken.trouble:
            self._find(
                note(
                    f"The model cannot be copied ({taken.trouble}): what attacks ask and what judges are one object.",
                    {"trouble": taken.trouble},
                    "Make it possible to deepcopy the model: then it is judged by copies that no attack has asked.",
                    kind="not_copied",
                ),
                "copies",
            )
        if taken.isolated:
            self._find(
                note(
                    "The model writes into the images that it is given, or into scores that it gave before: it gets "
                    "copies of the ones, and copies are taken of the others.",
                    {"images": len(self.images)},
                    "Let the model work on copies: whoever asks it otherwise measures something else.",
                    kind="writes",
                ),
                "copies",
            )
        if taken.company is not None:
            claim = "The model takes one image at a time: it is attacked and judged so."
            self._find(note(claim, {"images": len(self.images)}, kind="single"), "batch_dependent")
        first, again = (self.ask(taken.fresh(), self.images, self.seed) for _ in range(2))
        is_loose = bool(_differ(first, again).any()) and not taken.trouble
        if is_loose:
            self._find(
                note(
                    "Fresh copies answer otherwise under the same seeds of torch, NumPy and Python: the model draws "
                    "random numbers from elsewhere, such as the clock or the system.",
                    {"images": len(self.images), "differ": int(_differ(first, again).sum())},
                    "Another audit of it will find slightly other figures: repeat it, and give the spread.",
                    kind="unseeded",
                ),
                "seeds",
            )
            return taken, self.findings
        taken = self._look_for_state(first)
        remembers_all_the_same = any(finding.is_open for finding in self.findings)
        if taken.company is None and not remembers_all_the_same and not self._is_random(taken):
            taken = self._look_for_company(taken, first)
        return taken, self.findings

    def _is_random(self, taken: Deployment) -> bool:
        one, other = (self.ask(taken.fresh(), self.images, seed) for seed in (self.seed, self.seed + 1))
        return bool(_differ(one, other).any())

    def _look_for_state(self, first: Tensor) -> Deployment:
        """Whether a copy that was asked many questions answers like a fresh one."""
        taken = self.taken
        evidence: dict[str, Any] = {"images": len(self.images), "questions": _QUESTIONS + 3}
        in_buffers = False
        try:
            differ = self._changed_by_questions(first)
            if bool(differ.any()):
                in_buffers = not bool(self._changed_by_questions(first, buffers=False).any())
        except Exception as error:  # a model that refuses after some questions has changed, too
            evidence["error"] = (str(error).splitlines() or [type(error).__name__])[0][:200]
            differ = torch.ones(len(first), dtype=torch.bool)
        outside = not taken.trouble and bool(
            _differ(self.ask(taken.fresh(), self.images, self.seed), first).any()
        )
        evidence["differ"] = int(differ.sum())
        if taken.trouble and bool(differ.any()):
            self._find(_unforgotten("It cannot be copied", evidence, "remembers"), "stateful")
        elif outside:
            self._find(_unforgotten("Fresh copies remember too", evidence, "outside"), "stateful")
        elif bool(differ.any()):
            taken = dataclasses.replace(taken, forgets=True, in_buffers=in_buffers)
            self._find(own_generator(evidence) if self._is_random(taken) else stateful(evidence), "stateful")
        return taken

    def _changed_by_questions(self, first: Tensor, *, buffers: bool = True) -> Tensor:
        """(image,) where the image, or a point near it, is answered otherwise after questions about such points.

        Args:
            buffers: what the model writes into its buffers stays until the last question.
        """
        used = self.taken.fresh()
        with undisturbed(used) if buffers else nullcontext():
            ask = self._ask_as_it_is if buffers else self.ask
            for points in (self.images, *self.noisy[:2]):
                ask(used, points, self.seed)
            for number in range(_QUESTIONS):
                ask(used, self.images[number % len(self.images)][None].expand_as(self.images[:2]), self.seed)
            differ = _differ(ask(used, self.images, self.seed), first)
            if not self.taken.trouble:
                wanted = self.ask(self.taken.fresh(), self.noisy[2], self.seed)
                differ |= _differ(ask(used, self.noisy[2], self.seed), wanted)
        return differ

    def _look_for_company(self, taken: Deployment, first: Tensor) -> Deployment:
        """Whether the answer for an image is another in another batch."""
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(self.seed))
        order = order.to(self.images.device)
        shuffled = self.ask(taken.fresh(), self.images[order], self.seed)
        differ = torch.zeros(len(first), dtype=torch.bool)
        differ[order.cpu()] = _differ(shuffled, first[order])
        few = slice(min(_ALONE, len(self.images)))
        evidence: dict[str, Any] = {"images": len(self.images), "differ_in_another_order": int(differ.sum())}
        single = taken.alone()
        try:
            lonely = self.ask(single.fresh(), self.images[few], self.seed)
            evidence["differ_alone"] = int(_differ(lonely, first[few]).sum())
            lost = self._right(first[few], few) - self._right(lonely, few)
            needs_company = 4 * lost > len(lonely)
        except Exception as error:  # batch statistics of one image
            evidence["error_alone"] = (str(error).splitlines() or [type(error).__name__])[0][:200]
            needs_company = True
        is_dependent = exceeds(evidence["differ_in_another_order"], len(first), TOLERANCE)
        if "error_alone" not in evidence and not is_dependent:
            is_dependent = 4 * evidence["differ_alone"] > len(first[few])
        if "error_alone" not in evidence and not is_dependent:
            return taken
        if "error_alone" not in evidence and self._is_little(shuffled, first[order], lonely, first[few]):
            self._find(_swayed(evidence), "batch_dependent")
            return dataclasses.replace(taken, is_swayed=True)
        if needs_company:
            single = dataclasses.replace(taken, company=self.images[:_COMPANY])
        evidence["company"] = len(single.company) if single.company is not None else 0
        self._find(batch_dependent(evidence), "batch_dependent")
        return single

    def _is_little(self, *pairs: Tensor) -> bool:
        """Whether answers, given two and two, differ by little and name the same classes."""
        return all(
            not _differ(one, other, _LITTLE).any()
            and bool((predicted_classes(one) == predicted_classes(other)).all())
            for one, other in zip(pairs[::2], pairs[1::2], strict=True)
        )

    def _right(self, scores: Tensor, part: slice) -> int:
        return int((predicted_classes(scores) == self.labels[part]).sum())

    def ask(self, model: nn.Module, images: Tensor, seed: int) -> Tensor:
        """Scores in eval mode; the model's buffers are restored afterwards."""
        with undisturbed(model):
            return self._ask_as_it_is(model, images, seed)

    def _ask_as_it_is(self, model: nn.Module, images: Tensor, seed: int) -> Tensor:
        with forked_generators(images.device, seed):
            return read_model(model, images)

    def _find(self, finding: Finding, name: str) -> None:
        self.findings.append(named(finding, name))


def _noisy(subject: Subject, images: Tensor, number: int) -> Tensor:
    draws = Draws.of(subject.seed, torch.arange(len(images), device=images.device)).fold(_STREAM + number)
    return NORMS[subject.norm].random(images, subject.eps, draws)


def _differ(one: Tensor, other: Tensor, tolerance: float | None = None) -> Tensor:
    """(image,) where two answers differ by more than the order of summation explains, or that share; on the CPU."""
    if tolerance is None:
        tolerance = _APART if one.dtype in (torch.float32, torch.float64) else _APART_IN_HALF
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, 0.0, one - other).abs().nan_to_num(nan=torch.inf).amax(dim=1)
    return (apart > tolerance * _scale(one)).cpu()


def _scale(scores: Tensor) -> Tensor:
    """(image,) the spread of an image's scores, or a hundredth of the largest where they hardly differ."""
    finite = torch.where(scores.isfinite(), scores, 0.0)
    return torch.maximum(finite.amax(dim=1) - finite.amin(dim=1), 0.01 * finite.abs().amax(dim=1))


def named(finding: Finding, name: str) -> Finding:
    """The finding with its name; its kind is that name unless it has one."""
    return dataclasses.replace(finding, name=name, kind=finding.kind or name, source=_SOURCE)


def stateful(evidence: dict[str, Any]) -> Finding:
    """An alarm with its answer: every question of this audit went to a fresh copy."""
    claim = (
        "The model remembers what it was asked: after many questions it answers otherwise than a fresh copy. It is "
        "judged by fresh copies, one for each question."
    )
    advice = "A claim about it holds only for the object that it was measured on: measure on fresh copies."
    return alarm(claim, {**evidence, "answered": True}, advice)


def own_generator(evidence: dict[str, Any]) -> Finding:
    """A note: it is random, from generators that it brings."""
    claim = "The model draws from random generators of its own, which are seeded anew for every question."
    return note(claim, evidence, kind="own_generator")


def _unforgotten(why: str, evidence: dict[str, Any], kind: str) -> Finding:
    claim = f"The model remembers what it was asked. {why}, so that it was judged after all that attacks have asked it."
    advice = (
        "Keep what the model remembers in the model, and make it possible to deepcopy it; or switch it off."
    )
    return alarm(claim, evidence, advice, kind=kind)


def batch_dependent(evidence: dict[str, Any]) -> Finding:
    """An alarm with its answer: every question of this audit was about one image."""
    company = evidence.get("company", 0)
    beside = f"beside the same {company} clean images" if company else "alone"
    claim = f"The answer for an image depends on the others in its batch. Every image is attacked and judged {beside}."
    advice = "Say in which batches the model is deployed; a claim measured in batches of attacked images is another."
    return alarm(claim, {**evidence, "answered": True}, advice)


def _swayed(evidence: dict[str, Any]) -> Finding:
    claim = (
        "The scores of an image depend a little on the others in its batch, as with 8-bit numbers whose range is that "
        "of a batch. It is attacked in batches and judged one image at a time."
    )
    return note(claim, evidence, kind="swayed")


@dataclass(frozen=True, eq=False, kw_only=True)
class Confirmation:
    """What deployed copies say of points that broke images.

    Attributes:
        holds: (point,) whether it is misclassified there too.
        full: (point,) the same in full, shuffled batches.
        rounded: (point,) the same when the point, or one farther on, is rounded to 8 bits; None where the images are no
            bytes.
        late: what an attack has changed since the examination, or what only its points show; None if nothing.
    """

    holds: np.ndarray
    full: np.ndarray
    rounded: np.ndarray | None
    late: Late | None


def confirm(
    deployment: Deployment, subject: Subject, points: Tensor, rows: Tensor, *, are_bytes: bool
) -> Confirmation:
    """Judges points that broke images: by copies that no attack has asked, each by itself, and in shuffled batches.

    A point holds if it is misclassified alone, or so near to the border that the order of summation decides. Of a model
    that its batch sways a little, another point, mostly farther on, may hold in its place.

    Args:
        deployment: how the model is asked.
        subject: what is audited; its model is the object that the attacks asked.
        points: (point, channel, height, width), on the CPU.
        rows: (point,) positions of their images.
        are_bytes: the images have 8 bits, so that points are also asked about as bytes.
    """
    labels = subject.labels[rows.to(subject.labels.device)]
    points = points.to(subject.images)
    with without_tf32():
        holds = _is_broken(_alone_scores(deployment, subject, points), labels)
        if deployment.is_swayed:
            points, holds = _taken_farther(deployment, subject, points, rows, labels, holds)
        order = torch.randperm(len(points), generator=torch.Generator().manual_seed(subject.seed))
        full = np.zeros(len(points), dtype=bool)
        full[order.numpy()] = _is_broken(_scores(deployment, subject, points[order]), labels[order])
        rounded = _broken_when_rounded(deployment, subject, points, rows, labels) if are_bytes else None
        late = None if deployment.trouble else _what_came_late(deployment, subject, holds, full)
    return Confirmation(holds=holds, full=full, rounded=rounded, late=late)


def _taken_farther(
    deployment: Deployment, subject: Subject, points: Tensor, rows: Tensor, labels: Tensor, holds: np.ndarray
) -> tuple[Tensor, np.ndarray]:
    """The points, with another for each that does not hold, where that one does; and which of them hold.

    The other is farther on in the same direction, or found by a short search.
    """
    images = subject.images[rows.to(subject.images.device)]
    points, holds = points.clone(), holds.copy()
    for reach in _REACHES[1:]:
        left = torch.from_numpy(np.flatnonzero(~holds)).to(points.device)
        if not len(left):
            break
        farther = _farther(subject, points[left], images[left], reach)
        broken = _is_broken(_alone_scores(deployment, subject, farther), labels[left])
        found = left[torch.from_numpy(broken).to(left.device)]
        points[found] = farther[torch.from_numpy(broken).to(left.device)]
        holds[found.cpu().numpy()] = True
    left = torch.from_numpy(np.flatnonzero(~holds)).to(points.device)
    if len(left):
        with suppress(Exception):  # whatever a model throws: then nothing was found
            made = _searched_alone(deployment, subject, points[left], images[left], labels[left])
            points[left] = made.images
            holds[left.cpu().numpy()] = made.success.cpu().numpy()
    return points, holds


def _searched_alone(
    deployment: Deployment, subject: Subject, points: Tensor, images: Tensor, labels: Tensor
) -> Attacked:
    """A search by answers, each image alone, that begins in the directions of these points."""
    known = Neighbours(images=images, labels=labels, moves=points - images)
    attack = RaySearch(norm=subject.norm, eps=subject.eps, queries=_SEARCHED, neighbours=known)
    single = deployment.alone().sped_up(images, subject.seed).fresh()
    return attack.run(single, images, labels, seed=subject.seed)


def _farther(subject: Subject, points: Tensor, images: Tensor, reach: float) -> Tensor:
    """The points, that many times as far from their images as far as the ball allows."""
    return NORMS[subject.norm].project(images + reach * (points - images), images, subject.eps)


def _broken_when_rounded(
    deployment: Deployment, subject: Subject, points: Tensor, rows: Tensor, labels: Tensor
) -> np.ndarray:
    """(point,) whether it, or one farther on in the same direction, is misclassified when rounded to 8 bits.

    Attacks stop as soon as an image falls, so near to the border that rounding alone can take most points back.
    """
    images = subject.images[rows.to(subject.images.device)]
    broken = np.zeros(len(points), dtype=bool)
    for reach in _REACHES:
        left = torch.from_numpy(np.flatnonzero(~broken)).to(points.device)
        if not len(left):
            break
        here = images[left]
        farther = _farther(subject, points[left], here, reach)
        scores = _scores(deployment, subject, round_points(subject, farther, here))
        broken[left.cpu().numpy()] = _is_broken(scores, labels[left])
    return broken


def _what_came_late(
    deployment: Deployment, subject: Subject, holds: np.ndarray, full: np.ndarray
) -> Late | None:
    if not deployment.forgets or deployment.in_buffers:
        images = subject.images[:_PROBED]
        for points in (images, _noisy(subject, images, 3)):
            used, fresh = (
                _scores_of(model, subject, points) for model in (subject.model, deployment.fresh())
            )
            if exceeds(int(_differ(used, fresh).sum()), len(points), TOLERANCE):
                return "stateful"
        if exceeds(int((~holds & ~full).sum()), len(holds), TOLERANCE):
            return "stateful"
    if deployment.company is None and exceeds(int((holds != full).sum()), len(holds), TOLERANCE):
        return "batch_dependent"
    return None


def _is_broken(scores: Tensor, labels: Tensor) -> np.ndarray:
    """(image,) misclassified, or a tie."""
    margins = score_margin(scores.double(), labels.to(scores.device))
    tie = margins <= _TIE * _scale(scores.double())
    return ((predicted_classes(scores) != labels.to(scores.device)) | tie).cpu().numpy()


def _scores_of(model: nn.Module, subject: Subject, points: Tensor) -> Tensor:
    with undisturbed(model), forked_generators(points.device, subject.seed):
        return torch.cat([read_model(model, part) for part in torch.split(points, at_once(_FULL))])


def _scores(deployment: Deployment, subject: Subject, points: Tensor) -> Tensor:
    return _scores_of(deployment.fresh(), subject, points)


def _alone_scores(deployment: Deployment, subject: Subject, points: Tensor) -> Tensor:
    """(point, class) each asked about by itself; beside others if the deployment says so."""
    try:
        lonely = dataclasses.replace(deployment.alone(), is_vectorised=False)
        return _scores(lonely, subject, points)
    except Exception:  # a batch of one that only these points spoil
        return _scores(deployment, subject, points)


def round_points(subject: Subject, points: Tensor, images: Tensor) -> Tensor:
    """The points as 8-bit images would hold them, still in the ball: what rounding takes out of it is cut off."""
    norm = NORMS[subject.norm]
    levels, origin = points * 255, images * 255
    nearest = levels.round()
    inward = torch.where(levels > origin, levels.floor(), levels.ceil())
    limit = subject.eps + norm.rounding(images[0].numel())
    if norm.is_box:
        leaves = (nearest / 255 - images).abs() > limit
    else:
        leaves = (norm.length((nearest / 255 - images).flatten(1)) > limit)[:, None, None, None]
    return torch.where(leaves, inward, nearest).clamp(0, 255) / 255
