"""Answers of a model before it is audited, to compare with later ones and with those of its copies."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor, nn

from ecnn.asking import keeping_settings, settings, undisturbed, without_tf32
from ecnn.attacks.images import at_once
from ecnn.attacks.norms import NORMS, Norm
from ecnn.attacks.randomness import Draws
from ecnn.auditing.deployment import Deployment
from ecnn.auditing.diagnostics.statistics import TOLERANCE, exceeds
from ecnn.auditing.examination import (
    PROBED,
    ask,
    ask_as_it_is,
    find_different,
    named,
    noisy_points,
    unforgotten,
)
from ecnn.auditing.findings import Finding
from ecnn.auditing.subject import Subject
from ecnn.auditing.surroundings import PutBack, Surroundings

_STREAM = 53  # of random numbers; that of `noisy_points`, whose images are others


def as_given(taken: Deployment, model: nn.Module, images: Tensor, seed: int) -> Deployment:
    """The deployment, of the model itself if copies of it give other answers, as when it finds its layers by their id.

    The model is asked about each image twice, and what it remembers of that is restored.

    Args:
        taken: from `take_copy(model)`.
        images: a few; a model that cannot answer one alone is left as it was taken.
    """
    if taken.trouble:
        return taken
    with suppress(Exception), keeping_settings(), without_tf32():
        own = PutBack(model, Surroundings(model, itself=True))
        for image in torch.split(images, 1):
            one, other, said, again = (
                ask(asked, image, seed) for asked in (taken.fresh(), taken.fresh(), own, own)
            )
            is_steady = not (find_different(one, other).any() or find_different(said, again).any())
            if is_steady and find_different(one, said).any():
                trouble = "its copies give other answers than the model itself"
                kept = Surroundings(model, itself=True)
                return Deployment(pristine=model, trouble=trouble, surroundings=kept)
    return taken


class FirstContact:
    """Checks whether a model that cannot be copied changes its answer about an image that it has seen before.

    After the first queries of an audit its images are no longer new to the model. So this check comes before, and uses
    images that are not audited if there are some. It asks about each image once, then about two points near it, then
    twice about the image again.

    Args:
        taken: from `take_copy`, of a model that has not been asked anything.
        strangers: (image, channel, height, width) on the model's device. Every second one is used now, and the others
            if `findings` must ask again.
        norm, eps: of the ball from which the points near an image are drawn.
        seed: of these points, and of the model's random numbers.
        patience: seconds after which a slow model is asked about no further image; None for no limit.

    Attributes:
        differ: for how many images the answer changed; 0 if the model can be copied.
        switches: whether the model changed torch's global settings, which were restored.
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
        """An open alarm if answers changed, also when asked as `deployment` says, unless `others` have it already."""
        differ, images = self.differ, self.now
        if differ and deployment.puts_back:
            differ, images = self._ask(deployment.fresh(), self.later), self.later
        if not differ or any(other.name == "stateful" and other.is_open for other in others):
            return []
        evidence = {"images": len(images), "differ": differ, "questions": 5}
        return [named(unforgotten("It cannot be copied", evidence, "remembers"), "stateful")]

    def _ask(self, model: nn.Module, images: Tensor) -> int:
        """For how many images the answer changed after a few queries, and then stayed the same."""
        near = NORMS[self.norm].random
        count, end = 0, time.monotonic() + self.patience
        with suppress(Exception), undisturbed(model):  # a model that fails on single images is not checked
            for number, image in enumerate(images):
                if time.monotonic() > end:
                    break
                once = image[None]
                draws = Draws.of(self.seed, torch.tensor([number], device=images.device)).fold(_STREAM)
                first = ask_as_it_is(model, once, self.seed)
                for fold in range(2):
                    ask_as_it_is(model, near(once, self.eps, draws.fold(fold)), self.seed)
                again, at_last = (ask_as_it_is(model, once, self.seed) for _ in range(2))
                changed = find_different(first, again).any() and not find_different(again, at_last).any()
                count += int(changed)
        return count


class FirstAnswers:
    """Answers at the beginning of an audit, to compare with those at its end.

    A model may count queries where nothing can restore the count, such as in a file, and change after thousands of
    them. All copies change together then, so that no comparison between copies shows it.

    Args:
        taken: from `take_copy` and `meet`.
        subject: what is audited; its model is not asked.
    """

    def __init__(self, taken: Deployment, subject: Subject) -> None:
        images = subject.images[: at_once(PROBED)]
        self.taken, self.seed = taken, subject.seed
        self.points = (images, noisy_points(subject, images, 6))
        self.scores = [self._ask(taken, some) for some in self.points]

    def findings(self, deployment: Deployment, others: Iterable[Finding]) -> list[Finding]:
        """An open alarm if the answers are others now, and stay so, unless `others` have it already.

        Args:
            deployment: how the model was asked in the end; what it restores for every query is restored here, too.
            others: the findings so far.
        """
        if any(other.name == "stateful" and other.is_open for other in others):
            return []
        asked = dataclasses.replace(
            self.taken, surroundings=deployment.surroundings, puts_back=deployment.puts_back
        )
        for points, first in zip(self.points, self.scores, strict=True):
            differ = self._changed(first, *(self._ask(asked, points) for _ in range(2)))
            if exceeds(differ, len(points), TOLERANCE):
                why, kind = "Fresh copies remember them too", "outside"
                if self.taken.trouble:
                    why, kind = "It cannot be copied", "remembers"
                evidence = {"images": len(points), "differ": differ, "shown_by": "answers at the end"}
                return [named(unforgotten(why, evidence, kind), "stateful")]
        return []

    @staticmethod
    def _changed(first: Tensor | None, now: Tensor | None, again: Tensor | None) -> int:
        """For how many images the answer is another one now; 0 if it changes each time, as random ones do.

        None stands for a refusal.
        """
        if first is None or (now is None) != (again is None):
            return 0
        if now is None or again is None:
            return len(first)
        return 0 if find_different(now, again).any() else int(find_different(first, now).sum())

    def _ask(self, deployment: Deployment, points: Tensor) -> Tensor | None:
        """The scores; None from a model that refuses."""
        with suppress(Exception), without_tf32():
            return ask(deployment.fresh(), points, self.seed)
        return None
