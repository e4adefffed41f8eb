"""What is judged: a copy of the model that nobody has asked before, one image at a time.

An attack asks a model thousands of questions, in batches. A deployed model has not been asked them, and answers for one
image. Where both make no difference, the model is attacked as it is. Where it does, every question goes to a fresh copy
(`FreshEachTime`), or every image by itself (`OneAtATime`), so that the model is a function of one image again.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ecnn.asking import (
    Around,
    InFixedBatches,
    Question,
    copy_model,
    find_fixed_batch,
    keeping_settings,
    read_model,
    settings,
    undisturbed,
)
from ecnn.attacks.randomness import forked_generators
from ecnn.auditing.alone import OneAtATime, can_be_vectorised
from ecnn.auditing.surroundings import PutBack, Surroundings

#: Pixel values of a batch that costs little: 256 images of CIFAR's size.
_MANY = 2**20


class FreshEachTime(Around):
    """A model whose every question goes to a new copy, so that nothing it was asked before plays a part.

    A generator of its own would draw the same in each copy: it is seeded anew, from torch's. Copies share the
    parameters, until one changes them while it answers, as models do that learn from what they are asked.

    Args:
        model: the model, never asked itself.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.shares = True

    def ask(self, question: Question, images: Tensor) -> Any:
        with torch._C.DisableTorchFunction():  # copying is no part of what the model does
            shared = list(self.model.parameters()) if self.shares else []
            before = [(parameter.detach().clone(), parameter.grad) for parameter in shared]
            memo: dict[int, Any] = {id(parameter): parameter for parameter in shared}
            fresh = copy_model(self.model, memo)
            for value in list(memo.values())[len(shared) :]:
                _seed_anew(value)
        try:
            return question(fresh, images)
        finally:
            for parameter, (numbers, gradient) in zip(shared, before, strict=True):
                if parameter.grad is not gradient or not torch.equal(parameter, numbers):
                    # Not in place: what was said has a gradient, which needs the numbers that it was made with.
                    parameter.data, parameter.grad = numbers, gradient
                    self.shares = False


class FreshBuffers(Around):
    """A model whose every question finds its buffers as they were: what it writes there is forgotten.

    That is `FreshEachTime` for a model that remembers in its buffers alone, without the copies.
    """

    def ask(self, question: Question, images: Tensor) -> Any:
        # The zero makes each a copy; and one for each image, where torch asks about many as if each were alone.
        buffers = {
            f"model.{name}": value ^ False
            if value.dtype == torch.bool
            else value + images.new_zeros((), dtype=value.dtype)
            for name, value in self.model.named_buffers()
        }
        return torch.func.functional_call(_Asked(self.model, question), buffers, (images,))


class _Asked(nn.Module):
    """A question to a model, as a module."""

    def __init__(self, model: nn.Module, question: Question) -> None:
        super().__init__()
        self.model, self.question = model, question

    def forward(self, images: Tensor) -> Any:
        return self.question(self.model, images)


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
    return int(torch.randint(2**31, (), device="cpu"))


class Isolated(Around):
    """A model that gets a copy of the images, which it may change, and gives a copy of its scores, which it reuses."""

    def ask(self, question: Question, images: Tensor) -> Any:
        said = question(self.model, images.clone())
        return said.clone() if isinstance(said, Tensor) else said


class Settled(Around):
    """A model after whose questions torch's settings are what they were."""

    def ask(self, question: Question, images: Tensor) -> Any:
        with keeping_settings():
            return question(self.model, images)


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
        switches: it changes settings of torch, which are put back after every question.
        is_vectorised: images that are asked about one at a time go through in one pass, each as if it were alone.
        surroundings: what the model's code keeps outside of it, as it was when the copy was made.
        puts_back: that is put back for every question.
        is_swayed: its batch changes its scores a little; it is attacked in batches, and judged one image at a time.
    """

    pristine: nn.Module
    trouble: str = ""
    forgets: bool = False
    in_buffers: bool = False
    company: Tensor | None = None
    isolated: bool = False
    switches: bool = False
    is_vectorised: bool = False
    surroundings: Surroundings = field(default_factory=Surroundings)
    puts_back: bool = False
    is_swayed: bool = False

    @property
    def is_wrapped(self) -> bool:
        """Whether `fresh` gives something else than a copy."""
        is_filtered = self.isolated or self.switches or self.fixed is not None
        return self.forgets or self.puts_back or self.company is not None or is_filtered

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
        model = self._bare()
        if self.company is None or self.trouble:
            return model
        return OneAtATime(model, self.company, is_vectorised=self.is_vectorised)

    def _bare(self) -> nn.Module:
        if self.trouble:
            model = self.pristine
        elif self.forgets and not self.in_buffers:
            model = FreshEachTime(self.pristine)
        else:
            model = copy_model(self.pristine)
            model = FreshBuffers(model) if self.forgets else model
        model = PutBack(model, self.surroundings) if self.puts_back else model
        model = Isolated(model) if self.isolated else model
        return Settled(model) if self.switches else model

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
        return dataclasses.replace(self, company=torch.zeros(0, device="cpu"), is_swayed=False)


def take_copy(model: nn.Module) -> Deployment:
    """The model as it is now; call it before anything is asked."""
    try:
        return Deployment(pristine=copy_model(model), surroundings=Surroundings(model))
    except Exception as error:  # whatever a model holds: locks, handles, tensors with a history
        trouble = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return Deployment(pristine=model, trouble=trouble, surroundings=Surroundings(model, itself=True))


def meet(taken: Deployment, images: Tensor) -> Deployment:
    """How the model can be asked at all, from the first questions to copies of it.

    A model that takes one image but not several is asked about each by itself. Where it takes another number, no more
    and no fewer, batches are filled up. One that writes into the images that it is given, or into scores that it gave
    before, gets copies and is copied from. What it changes of torch's settings is put back.

    Args:
        images: a few, not changed here whatever the model does to what it is given.
    """
    before = settings()
    with keeping_settings():
        met = _meet(taken, images)
        return dataclasses.replace(met, switches=settings() != before)


def _meet(taken: Deployment, images: Tensor) -> Deployment:
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
        versions = [part._version for part in given]
        first = model(given[0])
        kept = first.clone()
        model(given[1])
    # Also what leaves these values as they are, such as a clamp in place: attacks could not follow it.
    is_untouched = [part._version for part in given] == versions
    is_untouched &= torch.equal(given[0], images) and torch.equal(given[1], 1 - images)
    return not (is_untouched and torch.equal(first.nan_to_num(), kept.nan_to_num()))
