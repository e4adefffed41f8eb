"""How an audit asks a model: as a fresh copy, or one image at a time, where that changes its answers.

An attack sends a model thousands of queries, in batches. A deployed model has not received these, and classifies one
image at a time. If both make no difference, the model is attacked as it is. Otherwise every query goes to a fresh copy
(`FreshEachTime`), or every image is asked about alone (`OneAtATime`), so that the model is again a function of one
image.
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

#: Most pixel values of a batch that costs little: room for 256 images of CIFAR's size.
_MANY = 2**20


class FreshEachTime(Around):
    """A model whose every query goes to a new copy, so that earlier queries have no effect.

    A random generator that the model holds would draw the same numbers in each copy, so each copy's is seeded anew from
    torch's generator. Copies share the parameters, until one changes them while it answers, as models do that learn
    from queries; from then on parameters are copied too.

    Args:
        model: the model; only copies of it are asked.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.shares = True

    def ask(self, question: Question, images: Tensor) -> Any:
        with torch._C.DisableTorchFunction():  # function modes must not see the copying
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
                    # Not in place: the graph of the answer still needs the numbers that it was computed with.
                    parameter.data, parameter.grad = numbers, gradient
                    self.shares = False


class FreshBuffers(Around):
    """A model whose every query starts from the same buffers: what it writes into them is forgotten.

    Gives what `FreshEachTime` gives for a model whose memory is in its buffers alone, without copying the model.
    """

    def ask(self, question: Question, images: Tensor) -> Any:
        # Adding zero copies a buffer. Inside vmap it makes a copy for each image, since the zero comes from `images`.
        buffers = {
            f"model.{name}": value ^ False
            if value.dtype == torch.bool
            else value + images.new_zeros((), dtype=value.dtype)
            for name, value in self.model.named_buffers()
        }
        return torch.func.functional_call(_Asked(self.model, question), buffers, (images,))


class _Asked(nn.Module):
    """A query to a model as the forward pass of a module, which `functional_call` needs."""

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
    """A model that gets a copy of the images and returns a copy of its scores, in case it writes into either."""

    def ask(self, question: Question, images: Tensor) -> Any:
        said = question(self.model, images.clone())
        return said.clone() if isinstance(said, Tensor) else said


class Settled(Around):
    """A model with torch's global settings (`ecnn.asking.settings`) restored after every query."""

    def ask(self, question: Question, images: Tensor) -> Any:
        with keeping_settings():
            return question(self.model, images)


@dataclass(frozen=True, eq=False, kw_only=True)
class Deployment:
    """A model as its users have it, and how it must be asked to answer as it does for them.

    Attributes:
        pristine: a copy that is never asked; the model itself if it cannot be copied.
        trouble: why it cannot be copied; empty if it can.
        forgets: whether every query goes to a fresh copy.
        in_buffers: with `forgets`, whether the model remembers in its buffers alone: fresh buffers are then enough.
        company: clean images that are added to each image's batch, perhaps none, if the model is asked about one image
            at a time; None if it is asked about batches.
        isolated: whether images and scores are copied, since the model writes into them.
        switches: whether the model changes torch's global settings, which are restored after every query.
        is_vectorised: with `company`, whether many images go through in one pass, each as if alone.
        surroundings: what the model's code keeps outside the model, as it was when the copy was made.
        puts_back: whether `surroundings` are restored for every query.
        is_swayed: whether the batch changes the scores a little: it is attacked in batches, and judged one image at a
            time.
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
        """Whether `fresh` gives a wrapped model instead of a plain copy."""
        is_filtered = self.isolated or self.switches or self.fixed is not None
        return self.forgets or self.puts_back or self.company is not None or is_filtered

    @property
    def fixed(self) -> int | None:
        """The only batch size that the model takes; None if it takes any."""
        return self.pristine.size if isinstance(self.pristine, InFixedBatches) else None

    @property
    def given(self) -> nn.Module:
        """The model or its copy, without the wrapper that fills up batches."""
        return self.pristine.model if isinstance(self.pristine, InFixedBatches) else self.pristine

    def fresh(self) -> nn.Module:
        """A copy that has not been asked before, wrapped as needed.

        A model that cannot be copied is used itself: `forgets` then has no effect.
        """
        model = self._bare()
        if self.company is None:
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
        """The same; if it asks about one image at a time, in vectorised passes where these give the same answers."""
        if self.company is None or self.trouble or len(images) < 2:
            return self
        company = self.company.to(images)
        return dataclasses.replace(self, is_vectorised=can_be_vectorised(self._bare(), company, images, seed))

    def alone(self) -> Deployment:
        """The same, asked about one image at a time; unchanged if it is already."""
        if self.company is not None:
            return self
        return dataclasses.replace(self, company=torch.zeros(0, device="cpu"), is_swayed=False)


def take_copy(model: nn.Module) -> Deployment:
    """A deployment of the model as it is now; call it before the model is asked anything."""
    try:
        pristine = copy_model(model)
        copy_model(pristine)  # every fresh copy is a copy of this one
        return Deployment(pristine=pristine, surroundings=Surroundings(model))
    except Exception as error:  # a model may hold locks, handles and the like
        trouble = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return Deployment(pristine=model, trouble=trouble, surroundings=Surroundings(model, itself=True))


def meet(taken: Deployment, images: Tensor) -> Deployment:
    """The deployment with what the first queries to copies of the model show to be needed.

    A model that takes single images but no batches is asked about one image at a time. If it takes batches of one size
    only, batches are filled up. If it writes into its images, or into scores that it returned before, these are copied.
    If it changes torch's global settings, they are restored.

    Args:
        images: a few images; they stay as they are, even if the model writes into its input.
    """
    before = settings()
    with keeping_settings():
        met = _meet(taken, images)
        return dataclasses.replace(met, switches=settings() != before)


def _meet(taken: Deployment, images: Tensor) -> Deployment:
    for asked in (taken, taken.alone()):
        try:
            return dataclasses.replace(asked, isolated=_writes(asked.fresh(), images))
        except Exception:  # noqa: S112 a model that never answers raises its error later
            continue
    size = find_fixed_batch(taken.fresh(), images)
    if size is None:
        return taken
    filled = dataclasses.replace(taken, pristine=InFixedBatches(taken.pristine, size))
    return dataclasses.replace(filled, isolated=_writes(filled.fresh(), images))


def largest_batch(model: nn.Module, images: Tensor, *, least: int) -> int | None:
    """The size of the largest batch that a model takes, found by halving; None if no limit is found.

    None also if the model fails even on fewer than twice `least` images, since then their number is not the reason.
    """
    size = len(images)
    while size >= least:
        try:
            with undisturbed(model), forked_generators(images.device, 0):
                read_model(model, images[:size])
        except torch.cuda.OutOfMemoryError:  # attacks take smaller batches by themselves
            return None
        except Exception:  # a model made for fewer images may raise anything
            size //= 2
        else:
            return None if size == len(images) else size
    return None


def filled_up(images: Tensor, size: int) -> Tensor:
    """The images, repeated until there are `size`, or as many as make up `_MANY` pixel values; none is left out.

    Attacks ask about several points of an image in one pass, so few images do not mean small batches.
    """
    size = max(len(images), min(size, _MANY // images[0].numel()))
    return images[torch.arange(size, device=images.device) % len(images)]


def _writes(model: nn.Module, images: Tensor) -> bool:
    """Whether a model writes into its input images, or into scores that it returned before."""
    with undisturbed(model), torch.no_grad():
        given = [images.clone(), 1 - images]
        versions = [part._version for part in given]
        first = model(given[0])
        kept = first.clone()
        model(given[1])
    # A write that changes no value, such as a clamp in place, counts too: attacks could not follow it.
    is_untouched = [part._version for part in given] == versions
    is_untouched &= torch.equal(given[0], images) and torch.equal(given[1], 1 - images)
    return not (is_untouched and torch.equal(first.nan_to_num(), kept.nan_to_num()))
