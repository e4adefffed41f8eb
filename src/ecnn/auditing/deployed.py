"""What is judged: a copy of the model that nobody has asked before, one image at a time.

An attack asks a model thousands of questions, in batches. A deployed model has not been asked them, and answers for one
image. Where both make no difference, the model is attacked as it is. Where it does, every question goes to a fresh copy
(`FreshEachTime`), or every image by itself (`OneAtATime`), so that the model is a function of one image again.
"""

from __future__ import annotations

import dataclasses
import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ecnn.asking import (
    InFixedBatches,
    copy_model,
    find_fixed_batch,
    read_model,
    undisturbed,
    without_tf32,
)
from ecnn.attacks.draws import Draws, forked_generators
from ecnn.attacks.images import at_once
from ecnn.attacks.norms import NORMS
from ecnn.auditing.alone import OneAtATime, can_be_vectorised
from ecnn.auditing.diagnostics.statistics import TOLERANCE, exceeds
from ecnn.auditing.findings import Finding, alarm, note
from ecnn.auditing.subject import Subject
from ecnn.objectives import predicted_classes

#: Images that the first questions are about, and how many of them are asked about one by one.
PROBED, _ALONE = 32, 8
#: Questions after which a model that counts them is expected to show it; later changes show when attacks are over.
_QUESTIONS = 64
#: Clean images that stand beside each image where a model cannot answer for one alone.
_COMPANY = 31
#: Of the spread of an image's scores: float32 in another batch changes them by 1e-5, half precision by 1e-2.
_APART, _APART_IN_HALF = 1e-3, 3e-2
#: Of the same spread: a batch that changes scores by less moves the border a little, and is no other model.
_LITTLE = 0.05
_STREAM = 53
#: Pixel values of a batch that costs little: 256 images of CIFAR's size.
_MANY = 2**20
_SOURCE = "deployment: a fresh copy, one image at a time"

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


class _Around(nn.Module):
    """A model that is asked otherwise than as it is.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class FreshBuffers(_Around):
    """A model whose every question finds its buffers as they were: what it writes there is forgotten.

    That is `FreshEachTime` for a model that remembers in its buffers alone, without the copies.
    """

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


class Isolated(_Around):
    """A model that gets a copy of the images, which it may change, and gives a copy of its scores, which it reuses."""

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
        return self.forgets or self.company is not None or self.isolated or self.fixed is not None

    @property
    def fixed(self) -> int | None:
        """How many images the model takes, no more and no fewer; None if it takes any number."""
        return self.pristine.size if isinstance(self.pristine, InFixedBatches) else None

    @property
    def given(self) -> nn.Module:
        """The model as it was given, or its copy, without what fills up batches."""
        return self.pristine.model if isinstance(self.pristine, InFixedBatches) else self.pristine

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

    A model that takes one image but not several is asked about each by itself. Where it takes another number, no more
    and no fewer, batches are filled up. One that writes into the images that it is given, or into scores that it gave
    before, gets copies and is copied from.

    Args:
        images: a few, not changed here whatever the model does to what it is given.
    """
    for asked in (taken, taken.alone()):
        try:
            return dataclasses.replace(asked, isolated=_writes(asked.fresh(), images))
        except Exception:  # noqa: S112 one that cannot answer at all says so when it is asked in earnest
            continue
    size = find_fixed_batch(taken.fresh(), images)
    if size is None:
        return taken
    filled = dataclasses.replace(taken, pristine=InFixedBatches(taken.pristine, size))
    return dataclasses.replace(filled, isolated=_writes(filled.fresh(), images))


def largest_batch(model: nn.Module, images: Tensor, *, least: int) -> int | None:
    """How many of the images a model takes at once, found by halving.

    None where that is all of them, and where it takes not even the least: then their number is not what it minds.
    """
    size = len(images)
    while size >= least:
        try:
            with undisturbed(model), forked_generators(images.device, 0):
                read_model(model, images[:size])
        except torch.cuda.OutOfMemoryError:  # attacks take smaller batches by themselves
            return None
        except Exception:  # whatever a model throws that is made for fewer
            size //= 2
        else:
            return None if size == len(images) else size
    return None


def filled_up(images: Tensor, size: int) -> Tensor:
    """The images, again and again until they are so many, but no more pixel values than a small network takes at once.

    Attacks ask about several points of an image together, so that few images do not mean small batches.
    """
    size = max(len(images), min(size, _MANY // images[0].numel()))
    return images[torch.arange(size, device=images.device) % len(images)]


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
        some = max(_ALONE, at_once(PROBED))
        self.images, self.labels = subject.images[:some], subject.labels[:some]
        self.noisy = [noisy_points(subject, self.images, number) for number in range(3)]
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
        if taken.fixed is not None:
            claim = f"The model takes {taken.fixed} images at a time: smaller batches are filled up with copies of one."
            evidence = {"images": len(self.images), "size": taken.fixed}
            self._find(note(claim, evidence, kind="fixed"), "batch_dependent")
        first, again = (self.ask(taken.fresh(), self.images, self.seed) for _ in range(2))
        is_loose = bool(find_different(first, again).any()) and not taken.trouble
        if is_loose:
            self._find(
                note(
                    "Fresh copies answer otherwise under the same seeds of torch, NumPy and Python: the model draws "
                    "random numbers from elsewhere, such as the clock or the system.",
                    {"images": len(self.images), "differ": int(find_different(first, again).sum())},
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
        return bool(find_different(one, other).any())

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
            find_different(self.ask(taken.fresh(), self.images, self.seed), first).any()
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
                same = self.images[number % len(self.images)][None].expand_as(self.images[:2])
                ask(used, same.contiguous(), self.seed)  # as images are otherwise
            differ = find_different(ask(used, self.images, self.seed), first)
            if not self.taken.trouble:
                wanted = self.ask(self.taken.fresh(), self.noisy[2], self.seed)
                differ |= find_different(ask(used, self.noisy[2], self.seed), wanted)
        return differ

    def _look_for_company(self, taken: Deployment, first: Tensor) -> Deployment:
        """Whether the answer for an image is another in another batch."""
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(self.seed))
        order = order.to(self.images.device)
        shuffled = self.ask(taken.fresh(), self.images[order], self.seed)
        differ = torch.zeros(len(first), dtype=torch.bool)
        differ[order.cpu()] = find_different(shuffled, first[order])
        few = slice(min(_ALONE, len(self.images)))
        evidence: dict[str, Any] = {"images": len(self.images), "differ_in_another_order": int(differ.sum())}
        single = taken.alone()
        try:
            lonely = self.ask(single.fresh(), self.images[few], self.seed)
            evidence["differ_alone"] = int(find_different(lonely, first[few]).sum())
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
            not find_different(one, other, _LITTLE).any()
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


def noisy_points(subject: Subject, images: Tensor, number: int) -> Tensor:
    """Random points of the balls around images, others for each number."""
    draws = Draws.of(subject.seed, torch.arange(len(images), device=images.device)).fold(_STREAM + number)
    return NORMS[subject.norm].random(images, subject.eps, draws)


def find_different(one: Tensor, other: Tensor, tolerance: float | None = None) -> Tensor:
    """(image,) where two answers differ by more than the order of summation explains, or that share; on the CPU."""
    if tolerance is None:
        tolerance = _APART if one.dtype in (torch.float32, torch.float64) else _APART_IN_HALF
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, 0.0, one - other).abs().nan_to_num(nan=torch.inf).amax(dim=1)
    return (apart > tolerance * spread_of(one)).cpu()


def spread_of(scores: Tensor) -> Tensor:
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
