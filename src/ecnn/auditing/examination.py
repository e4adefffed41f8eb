"""How a model must be asked, found by asking it: does it remember questions, does an answer depend on the batch?"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ecnn.asking import keeping_settings, read_model, settings, undisturbed, without_tf32
from ecnn.attacks.images import at_once
from ecnn.attacks.norms import NORMS, Norm
from ecnn.attacks.randomness import Draws, forked_generators
from ecnn.auditing.deployment import Deployment
from ecnn.auditing.diagnostics.statistics import TOLERANCE, exceeds
from ecnn.auditing.findings import Finding, alarm, note
from ecnn.auditing.subject import Subject
from ecnn.auditing.surroundings import Surroundings
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
_SOURCE = "deployment: a fresh copy, one image at a time"

Late = Literal["stateful", "outside", "batch_dependent"]


def examine(
    taken: Deployment, subject: Subject, patience: float | None = None
) -> tuple[Deployment, list[Finding]]:
    """How the model must be asked, from a few questions to copies of it, and what they found.

    Args:
        taken: of `take_copy`.
        subject: what is audited; its model is not asked.
        patience: seconds after which a slow model gets no more of the many questions that show whether it counts them.
            A change that shows only later shows when the points that attacks found are judged.
    """
    with without_tf32():
        deployment, findings = _Examination(taken, subject, patience).run()
        return deployment.sped_up(subject.images, subject.seed), findings


class FirstContact:
    """Whether a model that cannot be copied answers otherwise once it has met an image.

    The questions of an audit begin with images, so that later nobody can ask about them for the first time. This asks
    before, about images that are not audited if there are some: each once, then about points near it, then twice again.

    Args:
        taken: of `take_copy`, of a model that nobody has asked.
        strangers: (image, channel, height, width) that it is asked about now, and where the model is.
        norm, eps: how far points near them lie.
        seed: of these.
        patience: seconds after which a slow model is asked about no further image.

    Attributes:
        switches: it has changed settings of torch, which were put back.
    """

    def __init__(
        self, taken: Deployment, strangers: Tensor, norm: Norm, eps: float, seed: int, patience: float | None
    ) -> None:
        self.norm, self.eps, self.seed = norm, eps, seed
        self.patience = math.inf if patience is None else patience
        self.now, self.later = strangers[::2], strangers[1::2]
        before = settings()
        with keeping_settings():
            self.differ = self._ask(taken.pristine, self.now) if taken.trouble else 0
            self.switches = settings() != before

    def findings(self, deployment: Deployment, others: Iterable[Finding]) -> list[Finding]:
        """An open alarm if it does, also as it is asked now, unless the others say so."""
        differ, images = self.differ, self.now
        if differ and deployment.puts_back:
            differ, images = self._ask(deployment.fresh(), self.later), self.later
        if not differ or any(other.name == "stateful" and other.is_open for other in others):
            return []
        evidence = {"images": len(images), "differ": differ, "questions": 5}
        return [named(_unforgotten("It cannot be copied", evidence, "remembers"), "stateful")]

    def _ask(self, model: nn.Module, images: Tensor) -> int:
        """How many images are answered otherwise after a few questions, and then always the same."""
        near = NORMS[self.norm].random
        count, end = 0, time.monotonic() + self.patience
        with suppress(Exception), undisturbed(model):  # one that takes no single images is not asked here
            for number, image in enumerate(images):
                if time.monotonic() > end:
                    break
                once = image[None]
                draws = Draws.of(self.seed, torch.tensor([number], device=images.device)).fold(_STREAM)
                first = _ask_as_it_is(model, once, self.seed)
                for fold in range(2):
                    _ask_as_it_is(model, near(once, self.eps, draws.fold(fold)), self.seed)
                again, at_last = (_ask_as_it_is(model, once, self.seed) for _ in range(2))
                changed = find_different(first, again).any() and not find_different(again, at_last).any()
                count += int(changed)
        return count


class _Examination:
    """Questions to fresh copies of a model, under the same seeds of torch, NumPy and Python unless said otherwise."""

    def __init__(self, taken: Deployment, subject: Subject, patience: float | None) -> None:
        self.taken, self.seed = taken, subject.seed
        self.end = math.inf if patience is None else time.monotonic() + patience
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
        if taken.switches:
            claim = "The model changes settings of torch while it answers, which concern everybody's code beside it."
            advice = "Let the model leave them alone, such as the default precision: whoever uses it has them changed."
            self._find(note(claim, {"images": len(self.images)}, advice, kind="switches"), "copies")
        if taken.company is not None:
            claim = "The model takes one image at a time: it is attacked and judged so."
            self._find(note(claim, {"images": len(self.images)}, kind="single"), "batch_dependent")
        if taken.fixed is not None:
            claim = f"The model takes {taken.fixed} images at a time: smaller batches are filled up with copies of one."
            evidence = {"images": len(self.images), "size": taken.fixed}
            self._find(note(claim, evidence, kind="fixed"), "batch_dependent")
        taken = self._look_outside(0)
        first, again = (ask(taken.fresh(), self.images, self.seed) for _ in range(2))
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
        if self._look_outside(_QUESTIONS) is not taken:
            first = ask(self.taken.fresh(), self.images, self.seed)
        taken = self._look_for_state(first)
        remembers_all_the_same = any(finding.is_open for finding in self.findings)
        if taken.company is None and not remembers_all_the_same and not self._is_random(taken):
            taken = self._look_for_company(taken, first)
        return taken, self.findings

    def _is_random(self, taken: Deployment) -> bool:
        one, other = (ask(taken.fresh(), self.images, seed) for seed in (self.seed, self.seed + 1))
        return bool(find_different(one, other).any())

    def _look_outside(self, questions: int) -> Deployment:
        """How the model is asked, with what its code keeps outside of it put back if that decides answers.

        Args:
            questions: to ask before; none if nothing outside has changed so far.
        """
        if questions and (self.taken.puts_back or not self.taken.surroundings.changed()):
            return self.taken
        with suppress(Exception):  # one that refuses is told by what it is like when all is put back
            questions = self._ask_often(ask, self.taken.fresh(), questions)
        found = what_decides(self.taken, (self.images, self.noisy[2]), self.seed)
        if found is not None:
            self.taken = dataclasses.replace(self.taken, surroundings=found, puts_back=True)
            evidence = {"images": len(self.images), "questions": questions + 3, "kept_in": list(found.names)}
            self._find(outside(evidence), "stateful")
        return self.taken

    def _look_for_state(self, first: Tensor) -> Deployment:
        """Whether a copy that was asked many questions answers like a fresh one."""
        taken = self.taken
        evidence: dict[str, Any] = {"images": len(self.images), "questions": _QUESTIONS + 3}
        in_buffers = False
        try:
            differ, questions = self._changed_by_questions(first)
            evidence["questions"] = questions + 3
            if bool(differ.any()):
                in_buffers = not bool(self._changed_by_questions(first, buffers=False)[0].any())
        except Exception as error:  # a model that refuses after some questions has changed, too
            evidence["error"] = (str(error).splitlines() or [type(error).__name__])[0][:200]
            differ = torch.ones(len(first), dtype=torch.bool, device="cpu")
        is_outside = not taken.trouble and bool(
            find_different(ask(taken.fresh(), self.images, self.seed), first).any()
        )
        evidence["differ"] = int(differ.sum())
        if taken.trouble and bool(differ.any()):
            self._find(_unforgotten("It cannot be copied", evidence, "remembers"), "stateful")
        elif is_outside:
            self._find(_unforgotten("Fresh copies remember too", evidence, "outside"), "stateful")
        elif bool(differ.any()):
            taken = dataclasses.replace(taken, forgets=True, in_buffers=in_buffers)
            self._find(own_generator(evidence) if self._is_random(taken) else stateful(evidence), "stateful")
        return taken

    def _changed_by_questions(self, first: Tensor, *, buffers: bool = True) -> tuple[Tensor, int]:
        """(image,) where the image, or a point near it, is answered otherwise after questions, and after how many.

        Args:
            buffers: what the model writes into its buffers stays until the last question.
        """
        used = self.taken.fresh()
        with undisturbed(used) if buffers else nullcontext():
            asking = _ask_as_it_is if buffers else ask
            questions = self._ask_often(asking, used, _QUESTIONS)
            differ = find_different(asking(used, self.images, self.seed), first)
            if not self.taken.trouble:
                wanted = ask(self.taken.fresh(), self.noisy[2], self.seed)
                differ |= find_different(asking(used, self.noisy[2], self.seed), wanted)
        return differ, questions

    def _ask_often(
        self, asking: Callable[[nn.Module, Tensor, int], Tensor], used: nn.Module, number: int
    ) -> int:
        """Asks about images and points near them, and then about single images: so many times, or as time allows.

        Returns:
            how many times.
        """
        for points in (self.images, *self.noisy[:2]):
            asking(used, points, self.seed)
        for count in range(number):
            if time.monotonic() > self.end:
                return count
            same = self.images[count % len(self.images)][None].expand_as(self.images[:2])
            asking(used, same.contiguous(), self.seed)  # as images are otherwise
        return number

    def _look_for_company(self, taken: Deployment, first: Tensor) -> Deployment:
        """Whether the answer for an image is another in another batch."""
        order = torch.randperm(
            len(self.images), generator=torch.Generator().manual_seed(self.seed), device="cpu"
        )
        order = order.to(self.images.device)
        shuffled = ask(taken.fresh(), self.images[order], self.seed)
        differ = torch.zeros(len(first), dtype=torch.bool, device="cpu")
        differ[order.cpu()] = find_different(shuffled, first[order])
        few = slice(min(_ALONE, len(self.images)))
        evidence: dict[str, Any] = {"images": len(self.images), "differ_in_another_order": int(differ.sum())}
        single = taken.alone()
        try:
            lonely = ask(single.fresh(), self.images[few], self.seed)
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

    def _find(self, finding: Finding, name: str) -> None:
        self.findings.append(named(finding, name))


def ask(model: nn.Module, images: Tensor, seed: int) -> Tensor:
    """Scores in eval mode; the model's buffers are restored afterwards."""
    with undisturbed(model):
        return _ask_as_it_is(model, images, seed)


def _ask_as_it_is(model: nn.Module, images: Tensor, seed: int) -> Tensor:
    with forked_generators(images.device, seed):
        return read_model(model, images.clone())  # it may write into them


def what_decides(deployment: Deployment, points: Iterable[Tensor], seed: int) -> Surroundings | None:
    """What the model's code keeps outside of it, if it has changed and the model answers otherwise when it is put back.

    None if it answers the same, or otherwise each time, or if something cannot be put back.
    """
    changed = deployment.surroundings.changed()
    if not changed or deployment.puts_back:
        return None
    with suppress(Exception):  # whatever a model, or what lies beside it, does when it is put back
        return changed if _is_decided_by(changed, deployment, points, seed) else None
    return None


def _is_decided_by(
    changed: Surroundings, deployment: Deployment, points: Iterable[Tensor], seed: int
) -> bool:
    """Whether the model answers otherwise, and always the same, when these are as they were."""

    def ask_before(images: Tensor) -> Tensor:
        with changed.as_they_were():
            return ask(deployment.fresh(), images, seed)

    for some in points:
        try:
            now = ask(deployment.fresh(), some, seed)
        except Exception:  # one that refuses after so many questions
            now = torch.full_like(ask_before(some), torch.nan)
        one, other = ask_before(some), ask_before(some)
        if find_different(one, now).any() and not find_different(one, other).any():
            return True
    return False


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


def outside(evidence: dict[str, Any]) -> Finding:
    """An alarm with its answer: what the model's code keeps outside of it was put back for every question."""
    claim = (
        "The model remembers what it was asked, outside of itself: fresh copies answer otherwise, too. What its code "
        "keeps there is put back for every question."
    )
    advice = "A claim about it holds only until somebody asks: measure in a new process, one question each."
    return alarm(claim, {**evidence, "answered": True}, advice, kind="put_back")


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
