"""Images asked about one at a time; of many in one pass, where torch can do so and the answers are the same.

A pass over one small image costs ten times what an image costs in a batch. `torch.func.vmap` runs a model on many
images at once as if each were alone: statistics of a batch, ranges of 8-bit numbers and draws are those of one image.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ecnn.asking import Around, Question, copy_model, full_precision, undisturbed, without_tf32
from ecnn.attacks.base import raw_gradient
from ecnn.attacks.images import at_once
from ecnn.attacks.randomness import forked_generators
from ecnn.attacks.views import score_loss

_PASS = 256  # images of one pass, company included
_ALIKE, _ALIKE_SLOPES = 1e-4, 1e-2  # differences of scores and of slopes, relative to the largest
_TRIED = 4


class OneAtATime(Around):
    """A model that is asked about each image by itself, or beside the same clean images every time.

    Args:
        model: the model.
        company: (image, channel, height, width) clean images that stand beside each; none where it can answer for one.
        is_vectorised: many images go through in one pass, each as if it were alone; see `can_be_vectorised`.
    """

    def __init__(self, model: nn.Module, company: Tensor, *, is_vectorised: bool = False) -> None:
        super().__init__(model)
        self.company = company  # no buffer: its precision says nothing of the model's
        self.is_vectorised = is_vectorised

    def ask(self, question: Question, images: Tensor) -> Any:
        if not len(images):
            return question(self.model, images)
        company = self.company.to(images)
        # What listens to torch's calls, or changes them, was made for tensors as they are.
        if self.is_vectorised and len(images) > 1 and not torch._C._len_torch_function_stack():
            with suppress(RuntimeError):
                return self.ask_at_once(question, images, company)
        return torch.cat([question(self.model, torch.cat([image[None], company]))[:1] for image in images])

    def ask_at_once(self, question: Question, images: Tensor, company: Tensor) -> Tensor:
        """The same in one pass, or a RuntimeError."""

        def answer(image: Tensor) -> Any:
            return question(self.model, torch.cat([image[None], company]))[0]

        chunk = max(1, at_once(_PASS) // (1 + len(company)))
        scores: Tensor = torch.func.vmap(answer, randomness="same", chunk_size=chunk)(images)
        return scores


def can_be_vectorised(model: nn.Module, company: Tensor, images: Tensor, seed: int) -> bool:
    """Whether scores and slopes of some images are the same when torch runs the model on all of them in one pass.

    Args:
        model: that nobody needs any more; copies of it are asked.
        company: as `OneAtATime` takes it.
        images: (image, channel, height, width) two at least.
        seed: of what it draws.
    """
    torch_itself: Any = torch._C._functorch
    with suppress(AttributeError):  # what torch cannot vectorise it runs one by one, and warns on every call
        torch_itself._set_vmap_fallback_warning_enabled(False)
    images = images[:_TRIED]
    try:
        one_by_one, all_at_once = (
            _ask(copy_model(model), company, images, seed, way) for way in (False, True)
        )
    except Exception:  # whatever torch cannot vectorise, and whatever a model throws
        return False
    limits = (_ALIKE, _ALIKE_SLOPES)
    return all(
        bool(((one - other).abs().amax() <= limit * one.abs().amax()).all())
        for one, other, limit in zip(one_by_one, all_at_once, limits, strict=True)
    )


def _ask(
    model: nn.Module, company: Tensor, images: Tensor, seed: int, is_vectorised: bool
) -> tuple[Tensor, Tensor]:
    """Scores of the images, and the slopes of their margins; without a fall back to the other way."""
    asked = OneAtATime(model, company)
    points = images.detach().clone().requires_grad_(True)
    with undisturbed(model), without_tf32(), torch.enable_grad(), forked_generators(images.device, seed):
        said = (
            asked.ask_at_once(nn.Module.__call__, points, company.to(points))
            if is_vectorised
            else asked(points)
        )
        scores = full_precision(said)
        slopes = raw_gradient(score_loss(scores, scores.detach().argmax(dim=1), "margin"), points)
    return scores.detach(), slopes
