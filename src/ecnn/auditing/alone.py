"""Classifies images one at a time, or many in one vectorised pass where that gives the same answers.

A pass over one small image costs ten times what an image costs within a batch. `torch.func.vmap` runs a model on many
images in one pass as if each were alone: batch statistics, ranges of 8-bit numbers and random numbers are those of a
batch of one.
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

_PASS = 256  # images in one vectorised pass, company included
# Largest differences of scores and of gradients that count as the same, relative to the largest value.
_ALIKE, _ALIKE_SLOPES = 1e-4, 1e-2
_TRIED = 4


class OneAtATime(Around):
    """A model that gets each image in a batch of its own, or in a batch with the same clean images every time.

    Args:
        model: the model.
        company: (image, channel, height, width) clean images added to each batch; empty if one image alone will do.
        is_vectorised: whether many images go through in one pass, each as if alone; see `can_be_vectorised`.
    """

    def __init__(self, model: nn.Module, company: Tensor, *, is_vectorised: bool = False) -> None:
        super().__init__(model)
        self.company = company  # not a buffer, so that its dtype is not taken for the model's
        self.is_vectorised = is_vectorised

    def ask(self, question: Question, images: Tensor) -> Any:
        if not len(images):
            return question(self.model, images)
        company = self.company.to(images)
        # Torch function modes, such as `StraightThrough`, were not made for the tensors inside vmap.
        if self.is_vectorised and len(images) > 1 and not torch._C._len_torch_function_stack():
            with suppress(RuntimeError):
                return self.ask_at_once(question, images, company)
        return torch.cat([question(self.model, torch.cat([image[None], company]))[:1] for image in images])

    def ask_at_once(self, question: Question, images: Tensor, company: Tensor) -> Tensor:
        """`ask` in vectorised passes; raises RuntimeError if vmap cannot run the model."""

        def answer(image: Tensor) -> Any:
            return question(self.model, torch.cat([image[None], company]))[0]

        chunk = max(1, at_once(_PASS) // (1 + len(company)))
        scores: Tensor = torch.func.vmap(answer, randomness="same", chunk_size=chunk)(images)
        return scores


def can_be_vectorised(model: nn.Module, company: Tensor, images: Tensor, seed: int) -> bool:
    """Whether a vectorised pass gives the same scores and gradients as one pass per image, tried on four images.

    Args:
        model: the model; only copies of it are run.
        company: as `OneAtATime` takes it.
        images: (image, channel, height, width) at least two; the first four are used.
        seed: of the model's random numbers.
    """
    torch_itself: Any = torch._C._functorch
    with suppress(AttributeError):  # what vmap cannot vectorise runs image by image, with a warning per call
        torch_itself._set_vmap_fallback_warning_enabled(False)
    images = images[:_TRIED]
    try:
        one_by_one, all_at_once = (
            _ask(copy_model(model), company, images, seed, way) for way in (False, True)
        )
    except Exception:  # vmap may not support the model, and a model may raise anything
        return False
    limits = (_ALIKE, _ALIKE_SLOPES)
    return all(
        bool(((one - other).abs().amax() <= limit * one.abs().amax()).all())
        for one, other, limit in zip(one_by_one, all_at_once, limits, strict=True)
    )


def _ask(
    model: nn.Module, company: Tensor, images: Tensor, seed: int, is_vectorised: bool
) -> tuple[Tensor, Tensor]:
    """(image, class) scores and the gradients of their margins, in exactly the given way: no fallback to the other."""
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
