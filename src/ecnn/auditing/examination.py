"""Finds out how a model must be asked: whether it remembers queries, and whether an answer depends on the batch."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ecnn.asking import read_model, undisturbed, without_tf32
from ecnn.attacks.images import at_once
from ecnn.attacks.norms import NORMS
from ecnn.attacks.randomness import Draws, forked_generators
from ecnn.auditing.deployment import Deployment
from ecnn.auditing.diagnostics.statistics import TOLERANCE, exceeds
from ecnn.auditing.findings import Finding, alarm, note
from ecnn.auditing.subject import Subject
from ecnn.auditing.surroundings import Surroundings
from ecnn.comparing import scores_apart
from ecnn.objectives import predicted_classes

#: Images of the first queries, and how many of them are also asked about one by one.
PROBED, _ALONE = 32, 8
#: Queries after which a model that counts them should have changed; later changes show when attacks are over.
_QUESTIONS = 64
#: Clean images added to each image's batch if a model fails, or is less accurate, on single images.
_COMPANY = 31
#: Differences of scores that count, as shares of their spread: another batch changes float32 by 1e-5, half by 1e-2.
_APART, _APART_IN_HALF = 1e-3, 3e-2
#: Share of the same spread: a batch that changes scores by less only moves the decision boundary a little.
LITTLE = 0.05
_STREAM = 53
_SOURCE = "deployment: a fresh copy, one image at a time"

#: How a model must be asked otherwise than its answers about clean images and random points near them show.
Late = Literal["stateful", "outside", "batch_dependent", "random"]


def examine(
    taken: Deployment, subject: Subject, patience: float | None = None
) -> tuple[Deployment, list[Finding]]:
    """How the model must be asked, found by a few queries to copies of it, and the findings.

    Args:
        taken: from `take_copy` and `meet`.
        subject: what is audited; its model is not asked.
        patience: seconds after which a slow model gets no more of the many queries that show whether it counts them;
            None for no limit. Later changes are noticed when the points that attacks found are confirmed.
    """
    with without_tf32():
        deployment, findings = _Examination(taken, subject, patience).run()
        return deployment.sped_up(subject.images, subject.seed), findings


class _Examination:
    """Asks fresh copies of a model, with the same random seeds in every query, and collects findings."""

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
                    f"The model cannot be copied ({taken.trouble}), so it is attacked and judged as the same object.",
                    {"trouble": taken.trouble},
                    "Make it possible to deepcopy the model: then it is judged on copies that no attack has queried.",
                    kind="not_copied",
                ),
                "copies",
            )
        if taken.isolated:
            self._find(
                note(
                    "The model writes into the images that it is given, or into scores that it returned before. The "
                    "audit gives it copies of the images, and copies the scores that it returns.",
                    {"images": len(self.images)},
                    "Let the model write into copies only: without such copies its answers differ from those audited.",
                    kind="writes",
                ),
                "copies",
            )
        if taken.switches:
            claim = "The model changes settings of torch while it answers, which affects all other code in the process."
            advice = "Let the model leave settings such as the default precision unchanged: other code relies on them."
            self._find(note(claim, {"images": len(self.images)}, advice, kind="switches"), "copies")
        if taken.company is not None:
            claim = "The model takes one image at a time, so it is attacked and judged one image at a time."
            self._find(note(claim, {"images": len(self.images)}, kind="single"), "batch_dependent")
        if taken.fixed is not None:
            claim = (
                f"The model takes {taken.fixed} images at a time: smaller batches are filled up with copies of one "
                "image."
            )
            evidence = {"images": len(self.images), "size": taken.fixed}
            self._find(note(claim, evidence, kind="fixed"), "batch_dependent")
        taken = self._look_outside(0)
        first, again = (ask(taken.fresh(), self.images, self.seed) for _ in range(2))
        is_loose = bool(find_different(first, again).any()) and not taken.trouble
        if is_loose:
            self._find(
                note(
                    "Fresh copies give different answers under the same seeds of torch, NumPy and Python: the model "
                    "draws random numbers from elsewhere, such as the clock or the operating system.",
                    {"images": len(self.images), "differ": int(find_different(first, again).sum())},
                    "Another audit will give slightly different figures: repeat the audit, and report the spread.",
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
        return bool(find_different(one, other).any()) or is_random_at(taken, self.noisy[2], self.seed)

    def _look_outside(self, questions: int) -> Deployment:
        """The deployment, which restores values outside the model for every query if they change its answers.

        Args:
            questions: queries about single images to make first. With 1 or more, nothing is done unless a value outside
                the model has already changed.
        """
        if questions and (self.taken.puts_back or not self.taken.surroundings.changed()):
            return self.taken
        with suppress(Exception):  # one that now refuses may answer after the restore
            questions = self._ask_often(ask, self.taken.fresh(), questions)
        found = what_decides(self.taken, (self.images, self.noisy[2]), self.seed)
        if found is not None:
            self.taken = dataclasses.replace(self.taken, surroundings=found, puts_back=True)
            evidence = {"images": len(self.images), "questions": questions + 3, "kept_in": list(found.names)}
            self._find(outside(evidence), "stateful")
        return self.taken

    def _look_for_state(self, first: Tensor) -> Deployment:
        """The deployment, with `forgets` if a copy answers differently after many queries and a fresh copy does not."""
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
            self._find(unforgotten("It cannot be copied", evidence, "remembers"), "stateful")
        elif is_outside:
            self._find(unforgotten("Fresh copies remember them too", evidence, "outside"), "stateful")
        elif bool(differ.any()):
            taken = dataclasses.replace(taken, forgets=True, in_buffers=in_buffers)
            self._find(own_generator(evidence) if self._is_random(taken) else stateful(evidence), "stateful")
        return taken

    def _changed_by_questions(self, first: Tensor, *, buffers: bool = True) -> tuple[Tensor, int]:
        """(image,) whether the answer about it, or a point near it, changed after many queries; and how many queries.

        Args:
            buffers: True keeps what the model writes into its buffers until the last query; False restores the buffers
                after every query.
        """
        used = self.taken.fresh()
        with undisturbed(used) if buffers else nullcontext():
            asking = ask_as_it_is if buffers else ask
            questions = self._ask_often(asking, used, _QUESTIONS)
            differ = find_different(asking(used, self.images, self.seed), first)
            if not self.taken.trouble:
                wanted = ask(self.taken.fresh(), self.noisy[2], self.seed)
                differ |= find_different(asking(used, self.noisy[2], self.seed), wanted)
        return differ, questions

    def _ask_often(
        self, asking: Callable[[nn.Module, Tensor, int], Tensor], used: nn.Module, number: int
    ) -> int:
        """Asks about all images and points near them, then `number` times about single images, or as time allows.

        Returns:
            how often it asked about single images.
        """
        for points in (self.images, *self.noisy[:2]):
            asking(used, points, self.seed)
        for count in range(number):
            if time.monotonic() > self.end:
                return count
            same = self.images[count % len(self.images)][None].expand_as(self.images[:2])
            asking(used, same.contiguous(), self.seed)  # with the strides that images usually have
        return number

    def _look_for_company(self, taken: Deployment, first: Tensor) -> Deployment:
        """The deployment, which asks about single images, or is marked as swayed, if answers depend on the batch."""
        order = torch.randperm(
            len(self.images), generator=torch.Generator().manual_seed(self.seed), device="cpu"
        )
        few, single = slice(min(_ALONE, len(self.images))), taken.alone()
        evidence: dict[str, Any] = {"images": len(self.images), "differ_in_another_order": 0}
        pairs, needs_company = [], False
        for points, scores in self._clean_and_noisy(taken, first):
            shuffled = ask(taken.fresh(), points[order.to(points.device)], self.seed)
            pairs.append((shuffled, scores[order.to(scores.device)]))
            differ = int(find_different(*pairs[-1]).sum())
            evidence["differ_in_another_order"] = max(differ, evidence["differ_in_another_order"])
            try:
                lonely = ask(single.fresh(), points[few], self.seed)
            except Exception as error:  # such as batch statistics of one image
                evidence["error_alone"] = (str(error).splitlines() or [type(error).__name__])[0][:200]
                needs_company = True
                break
            pairs.append((lonely, scores[few]))
            differ = int(find_different(*pairs[-1]).sum())
            evidence["differ_alone"] = max(differ, evidence.get("differ_alone", 0))
            if points is self.images:
                needs_company = 4 * (self._right(scores[few], few) - self._right(lonely, few)) > len(lonely)
        if "error_alone" not in evidence:
            is_dependent = exceeds(evidence["differ_in_another_order"], len(first), TOLERANCE)
            if not is_dependent and 4 * evidence["differ_alone"] <= len(first[few]):
                return taken
            if not any(_differ_much(*pair) for pair in pairs):
                self._find(_swayed(evidence), "batch_dependent")
                return dataclasses.replace(taken, is_swayed=True)
        if needs_company:
            single = dataclasses.replace(taken, company=self.images[:_COMPANY])
        evidence["company"] = len(single.company) if single.company is not None else 0
        self._find(batch_dependent(evidence), "batch_dependent")
        return single

    def _clean_and_noisy(self, taken: Deployment, first: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The images, and random points near them unless the model refuses these, each with their scores."""
        yield self.images, first
        if time.monotonic() > self.end:
            return
        try:
            scores = ask(taken.fresh(), self.noisy[2], self.seed)
        except Exception:
            return
        yield self.noisy[2], scores

    def _right(self, scores: Tensor, part: slice) -> int:
        return int((predicted_classes(scores) == self.labels[part]).sum())

    def _find(self, finding: Finding, name: str) -> None:
        self.findings.append(named(finding, name))


def _differ_much(one: Tensor, other: Tensor) -> bool:
    """Whether the scores of an image differ by much, or give another class."""
    classes = predicted_classes(one) != predicted_classes(other)
    return bool(find_different(one, other, LITTLE).any()) or bool(classes.any())


def ask(model: nn.Module, images: Tensor, seed: int) -> Tensor:
    """(image, class) scores in eval mode, with random numbers from the seed; buffers are restored afterwards."""
    with undisturbed(model):
        return ask_as_it_is(model, images, seed)


def ask_as_it_is(model: nn.Module, images: Tensor, seed: int) -> Tensor:
    """(image, class) scores in the model's present mode, with random numbers from the seed; buffers stay changed."""
    with forked_generators(images.device, seed):
        return read_model(model, images.clone())  # it may write into them


def what_decides(deployment: Deployment, points: Iterable[Tensor], seed: int) -> Surroundings | None:
    """The changed values that the model's code keeps outside it, if restoring them changes its answers; else None.

    None, too, if the answers then differ each time, if a value cannot be restored, or if all are restored already.
    """
    changed = deployment.surroundings.changed()
    if not changed or deployment.puts_back:
        return None
    with suppress(Exception):  # the model, or a value that is restored, may raise anything
        return changed if _is_decided_by(changed, deployment, points, seed) else None
    return None


def _is_decided_by(
    changed: Surroundings, deployment: Deployment, points: Iterable[Tensor], seed: int
) -> bool:
    """Whether restoring these values changes the model's answers, and gives the same ones when repeated."""

    def ask_before(images: Tensor) -> Tensor:
        with changed.as_they_were():
            return ask(deployment.fresh(), images, seed)

    for some in points:
        try:
            now = ask(deployment.fresh(), some, seed)
        except Exception:  # it may refuse after so many queries
            now = torch.full_like(ask_before(some), torch.nan)
        one, other = ask_before(some), ask_before(some)
        if find_different(one, now).any() and not find_different(one, other).any():
            return True
    return False


def noisy_points(subject: Subject, images: Tensor, number: int) -> Tensor:
    """A random point of the ball around each image; another one for each `number`."""
    draws = Draws.of(subject.seed, torch.arange(len(images), device=images.device)).fold(_STREAM + number)
    return NORMS[subject.norm].random(images, subject.eps, draws)


def is_random_nearby(deployment: Deployment, subject: Subject) -> bool:
    """Whether fresh copies give other scores with other random numbers, for random points of the balls."""
    return is_random_at(deployment, noisy_points(subject, subject.images[:PROBED], 4), subject.seed)


def is_random_at(deployment: Deployment, points: Tensor, seed: int) -> bool:
    """Whether fresh copies give other scores to the first of the points with other random numbers, and only then."""
    points = points[: max(_ALONE, at_once(PROBED))]
    try:
        one, other = (ask(deployment.fresh(), points, number) for number in (seed, seed + 1))
        if not find_different(one, other).any():
            return False
        again = ask(deployment.fresh(), points, seed)
    except Exception:  # a model may refuse such points
        return False
    return not bool(find_different(one, again).any())


def find_different(one: Tensor, other: Tensor, tolerance: float | None = None) -> Tensor:
    """(image,) whether two sets of scores differ by more than `tolerance` times their spread; on the CPU.

    The default tolerance covers rounding in another order of summation. NaN differs from any number.
    """
    if tolerance is None:
        tolerance = _APART_IN_HALF if _is_half(one) else _APART
    return (scores_apart(one, other) > tolerance).cpu()


def _is_half(scores: Tensor) -> bool:
    """Whether the scores were computed in half precision, though `read_model` returns them in float32.

    All of them are then exact in one of its formats. So are whole numbers such as votes, which are not meant.
    """
    finite = scores.nan_to_num()
    halves = (finite.to(dtype).to(finite.dtype) for dtype in (torch.float16, torch.bfloat16))
    return not torch.equal(finite, finite.round()) and any(torch.equal(half, finite) for half in halves)


def named(finding: Finding, name: str) -> Finding:
    """The finding with this name, and this module as its source; its kind is the name unless it has one."""
    return dataclasses.replace(finding, name=name, kind=finding.kind or name, source=_SOURCE)


def stateful(evidence: dict[str, Any]) -> Finding:
    """An answered alarm: the model remembers queries, so every query of this audit goes to a fresh copy."""
    claim = (
        "The model remembers earlier queries: after many queries it gives different answers than a fresh copy. This "
        "audit makes every query to a fresh copy."
    )
    advice = (
        "A claim about this model holds only for the object that it was measured on: measure on fresh copies."
    )
    return alarm(claim, {**evidence, "answered": True}, advice)


def outside(evidence: dict[str, Any]) -> Finding:
    """An answered alarm: values outside the model remember queries, so they are restored for every query."""
    claim = (
        "The model remembers earlier queries outside of itself: fresh copies give different answers, too. This audit "
        "restores the values that the model's code keeps there before every query."
    )
    advice = "A claim about this model holds only until its next query: measure in new processes, one query in each."
    return alarm(claim, {**evidence, "answered": True}, advice, kind="put_back")


def own_generator(evidence: dict[str, Any]) -> Finding:
    """A note: the model draws from random generators that it holds."""
    claim = "The model draws from random generators of its own, which this audit seeds anew for every query."
    return note(claim, evidence, kind="own_generator")


def unforgotten(why: str, evidence: dict[str, Any], kind: str) -> Finding:
    """An open alarm: the model remembers queries, and nothing restores what it remembers."""
    claim = f"The model remembers earlier queries. {why}, so the model was judged after all queries of the attacks."
    advice = "Keep this memory inside the model and make it possible to deepcopy the model, or switch the memory off."
    return alarm(claim, evidence, advice, kind=kind)


def batch_dependent(evidence: dict[str, Any]) -> Finding:
    """An answered alarm: answers depend on the batch, so every query of this audit is about one image."""
    company = evidence.get("company", 0)
    beside = f"in a batch with the same {company} clean images" if company else "alone"
    claim = f"The answer for an image depends on the other images in its batch. Each is attacked and judged {beside}."
    advice = "State in which batches the model is deployed: claims from batches of attacked images hold only for those."
    return alarm(claim, {**evidence, "answered": True}, advice)


def _swayed(evidence: dict[str, Any]) -> Finding:
    claim = (
        "The scores of an image depend slightly on the other images in its batch, as with 8-bit numbers whose range "
        "comes from the whole batch. The model is attacked in batches and judged one image at a time."
    )
    return note(claim, evidence, kind="swayed")
