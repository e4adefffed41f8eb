"""What every attack shares: the call, the counted passes through the model, and the final check of its points."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from ecnn.asking import full_precision, in_usual_state, read_model, undisturbed, without_tf32
from ecnn.attacks.deadlines import check_time
from ecnn.attacks.images import at_once, check_pixels, per_image
from ecnn.attacks.norms import NORMS, Norm
from ecnn.attacks.randomness import Draws, forked_generators
from ecnn.attacks.speed.quick_copy import prepare, quick_copy
from ecnn.attacks.speed.replay import Recorder, Values, run_in_pieces
from ecnn.attacks.views import Aim, Look, View
from ecnn.checks import check_choice, check_kind, kind_of, parse_eps
from ecnn.errors import InputError
from ecnn.objectives import largest_score, predicted_classes

_STEEP = 1e15  # replaces an infinite gradient entry: its square still fits into float32


@dataclass(frozen=True)
class Attacked:
    """The attacked images of a batch, the model's predictions for them, and the cost.

    Attributes:
        images: (batch, channel, height, width).
        predictions: (batch,) the model's class for each, from a fresh pass in full precision; -1 if it gives no answer.
            If a search with keep="best" fails, the attacked label.
        success: (batch,) whether the attack's point is classified otherwise than the attacked label.
        forwards: (batch,) forward passes spent on each image, the final check included.
        backwards: (batch,) gradients computed for each image.
        nan_gradients: how many of these gradients had NaN entries; such entries counted as zero.
    """

    images: Tensor
    predictions: Tensor
    success: Tensor
    forwards: Tensor
    backwards: Tensor
    nan_gradients: int = 0


@dataclass(frozen=True)
class Cost:
    """How many images go through the model if none breaks early. An image that breaks early costs less.

    Attributes:
        forwards: images in forward passes.
        backwards: images in backward passes.
    """

    forwards: int
    backwards: int

    def __str__(self) -> str:
        return f"{self.forwards:,} images forward and {self.backwards:,} backward"

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.forwards + other.forwards, self.backwards + other.backwards)

    def __mul__(self, count: int) -> Cost:
        return Cost(self.forwards * count, self.backwards * count)


class Target:
    """The attacked model. It counts the forward passes and gradients that a search spends on each image.

    Attributes:
        model: the network that the search uses; with `quick=True` a faster copy of the attacked one.
        judge: the attacked model itself, which alone gives verdicts.
        precision: "bfloat16" computes the search's passes (not the verdicts) under autocast.
        run: runs a computation on rows, as `run(name, compute, *inputs)`; None calls compute(*inputs) directly.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: int,
        device: torch.device,
        precision: str = "float32",
        run: Callable[..., Values] | None = None,
        judge: nn.Module | None = None,
    ) -> None:
        if precision == "bfloat16" and device.type != "cuda":
            raise InputError(f'precision="bfloat16" needs a CUDA device, but the images are on {device}.')
        self.model, self.precision, self.device, self.run = model, precision, device, run
        self.judge = model if judge is None else judge
        self._rows: Tensor | None = None
        self._counts = torch.zeros(2, batch, dtype=torch.int64, device="cpu")
        self._all_counts = [0, 0]  # passes over every row, kept as plain numbers: no tensor work for each
        self._nan_gradients = torch.zeros((), dtype=torch.int64, device=device)
        self._root = self

    def narrow(self, rows: Tensor) -> Self:
        """The same target for the images at these positions (n,). Give it batches of exactly those images, in order."""
        part = copy(self)
        part._rows = rows.cpu() if self._rows is None else self._rows[rows.cpu()]
        return part

    @property
    def forwards(self) -> Tensor:
        """(batch,) forward passes spent on each image so far, on the CPU."""
        return self._root._counts[0] + self._root._all_counts[0]

    @property
    def backwards(self) -> Tensor:
        """(batch,) gradients computed for each image so far, on the CPU."""
        return self._root._counts[1] + self._root._all_counts[1]

    @property
    def nan_gradients(self) -> int:
        """How many of the gradients so far had NaN entries."""
        return int(self._root._nan_gradients)

    def count(self, forwards: int | Tensor, backwards: int | Tensor = 0) -> None:
        """Adds passes that an attack made without this class: one number for all images, or (n,) one per image."""
        check_time()
        self._book(forwards, backwards)

    def _book(self, forwards: int | Tensor, backwards: int | Tensor = 0) -> None:
        for kind, number in enumerate((forwards, backwards)):
            if isinstance(number, int):
                if self._rows is None:
                    self._root._all_counts[kind] += number
                    continue
                if not number:
                    continue
                number = torch.full_like(self._rows, number)
            if self._rows is None:
                self._root._counts[kind] += number.cpu()
            else:  # an image may occupy several rows
                self._root._counts[kind].index_add_(0, self._rows, number.cpu())

    def ascend(self, view: View, points: Tensor, aim: Aim) -> tuple[Look, Tensor]:
        """The view's losses and scores at the points, and the gradient of each row's loss in its own pixels.

        NaN entries of the gradient become 0 and infinite ones +-1e15, so that all can be squared and summed.
        """

        def compute(points: Tensor, labels: Tensor, goals: Tensor | None) -> Values:
            points = points.detach().requires_grad_(True)
            with torch.enable_grad(), self.autocast():
                look = view.look(self.model, points, Aim(labels, goals, aim.loss, aim.slack))
                gradient = raw_gradient(look.losses, points)
            if _all_finite(gradient):
                spoiled = torch.zeros_like(labels, dtype=torch.bool)
            else:
                spoiled, gradient = gradient.flatten(1).amax(dim=1).isnan(), _usable(gradient)
            return _rank(look).detach(), look.scores, gradient, spoiled

        name = ("ascend", view, aim.loss, aim.slack)
        values = self._compute(name, compute, points, aim.labels, aim.goals)
        self.count(view.passes_per_look, view.passes_per_look)
        losses, scores, gradient, spoiled = values
        assert losses is not None
        assert gradient is not None
        assert spoiled is not None
        self._root._nan_gradients = self._root._nan_gradients + spoiled.sum()
        return Look(losses, scores), gradient

    def look(self, view: View, points: Tensor, aim: Aim) -> Look:
        """The view's losses and scores at the points, without a gradient."""
        seen = self._look(view, points, aim)
        self.count(view.passes_per_look)
        return seen

    def _look(self, view: View, points: Tensor, aim: Aim) -> Look:
        def compute(points: Tensor, labels: Tensor, goals: Tensor | None) -> Values:
            with torch.no_grad(), self.autocast():
                look = view.look(self.model, points, Aim(labels, goals, aim.loss, aim.slack))
            return _rank(look), look.scores

        name = ("look", view, aim.loss, aim.slack)
        losses, scores = self._compute(name, compute, points, aim.labels, aim.goals)
        assert losses is not None
        return Look(losses, scores)

    def scores(self, points: Tensor) -> Tensor:
        """(batch, class) the model's scores, without a gradient."""

        def compute(points: Tensor) -> Values:
            with torch.no_grad(), self.autocast():
                return (full_precision(self.model(points)),)

        (scores,) = self._compute("scores", compute, points)
        self.count(1)
        assert scores is not None
        return scores

    def _compute(self, name: Hashable, compute: Callable[..., Values], *inputs: Tensor | None) -> Values:
        check_time()
        return compute(*inputs) if self.run is None else self.run(name, compute, *inputs)

    def verdict(self, points: Tensor) -> Tensor:
        """(batch,) the attacked model's own classes, in full precision. Only they decide whether an image is broken."""
        return self.verdict_and_classes(points)[0]

    def verdict_and_classes(self, points: Tensor) -> tuple[Tensor, int]:
        """The verdict (batch,), and the number of classes."""
        scores = read_model(self.judge, points)
        self._book(1)  # without `check_time`: what was found in time is judged even after the deadline
        return predicted_classes(scores), scores.shape[1]

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for the search's passes: bfloat16, or nothing, which leaves a caller's own autocast on."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def _rank(look: Look) -> Tensor:
    """(batch,) the losses, all finite: infinite ones are clamped, NaN is replaced.

    NaN becomes the lowest value if the scores still give an answer, so that a search prefers any other point. It
    becomes the highest if they give none, which counts as misclassified, or if the view returns no scores.
    """
    losses = full_precision(look.losses)
    if _all_finite(losses):
        return losses
    limit = largest_score(losses.dtype)
    if look.scores is None:
        return losses.nan_to_num(nan=limit, posinf=limit, neginf=-limit)
    answered = (predicted_classes(look.scores) >= 0).to(losses.dtype)
    return torch.where(losses.isnan(), (1 - 2 * answered) * limit, losses.clamp(-limit, limit))


def gradient_of(losses: Tensor, points: Tensor, *, again: bool = False) -> Tensor:
    """Gradient of the summed losses in the points. NaN becomes 0, infinite entries become +-1e15.

    It is zero if the losses do not depend on the points.

    Args:
        again: keeps the autograd graph, for another gradient of the same losses.
    """
    return _usable(raw_gradient(losses, points, again=again))


def _all_finite(values: Tensor) -> bool:
    """Whether all values are finite. Always False on CUDA, where the check would make the CPU wait for the GPU."""
    return not values.is_cuda and math.isfinite(float(values.detach().sum()))


def _usable(gradient: Tensor) -> Tensor:
    """The gradient with NaN as 0 and infinite entries as +-1e15, so that it can be squared and summed."""
    return gradient.nan_to_num(nan=0.0, posinf=_STEEP, neginf=-_STEEP)


def raw_gradient(losses: Tensor, points: Tensor, *, again: bool = False) -> Tensor:
    """Like `gradient_of`, but NaN and infinite entries stay."""
    if not losses.requires_grad:
        if torch.is_inference_mode_enabled():
            raise InputError("attacks need gradients: leave torch.inference_mode, in which there are none.")
        return torch.zeros_like(points)
    (gradient,) = torch.autograd.grad(losses.sum(), points, retain_graph=again, allow_unused=True)
    return torch.zeros_like(points) if gradient is None else gradient


@dataclass(frozen=True, kw_only=True)
class Attack:
    """An immutable attack, called as attack(model, images, labels) -> images of the same shape, still in [0, 1].

    A subclass defines `search`. The rest is the same for all: rows are independent, random numbers belong to images
    (`Draws`), the model's mode and gradients stay as they are, and a fresh pass in full precision decides success.

    Attributes:
        labels: attack the "true" labels that are given, or the model's own "predicted" ones.
        keep: "best" returns a misclassified image if one was found and the clean image otherwise; "last" returns the
            last iterate, misclassified or not.
        early_exit: no further passes for images that are broken or were misclassified from the start; no effect with
            keep="last".
        precision: of the search, "float32" or "bfloat16" (CUDA only); verdicts are always in full precision.
        quick: the search uses a copy of the model that is prepared for speed (`quick_copy`); on CUDA its passes are
            also recorded once and replayed. Only for models that do the same in every pass: not for those that draw
            random numbers in Python, branch on their input or count their calls.
    """

    #: Whether the attack supports keep="last".
    has_last_iterate: ClassVar[bool] = True

    labels: Literal["true", "predicted"] = "true"
    keep: Literal["best", "last"] = "best"
    early_exit: bool = True
    precision: Literal["float32", "bfloat16"] = "float32"
    quick: bool = False

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, np.integer):  # would overflow
                object.__setattr__(self, entry.name, int(value))
        check_choice("labels", self.labels, ("true", "predicted"))
        check_choice("keep", self.keep, ("best", "last"))
        check_choice("precision", self.precision, ("float32", "bfloat16"))

    @property
    def _drops_rows(self) -> bool:
        """Whether a search is over for an image once it is broken."""
        return self.early_exit and self.keep == "best"

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        """The attack's final points: the shape of the images, within the attack's bounds, misclassified or not.

        With keep="best" and early_exit all given images are classified as their labels. Rows must not influence each
        other; passes go through `target`, or are counted there, and random numbers come from `draws`.
        """
        raise NotImplementedError

    def cost(self, num_classes: int) -> Cost:
        """Approximate cost of one image that is classified correctly and never breaks, the two verdicts included.

        The default counts the two verdicts only; subclasses add the cost of their search.
        """
        return Cost(2, 0)

    def __call__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        *,
        seed: int = 0,
        index: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """(batch, channel, height, width) the attacked images.

        Args:
            images: (batch, channel, height, width) in [0, 1], float32 or float64.
            labels: (batch,) the classes to move away from.
            seed: random seed. Every image's random numbers depend on it and on the image's index.
            index: (batch,) each image's position in its dataset; the position in the batch if not given.
            generator: for training, where the whole step may be recorded in a CUDA graph. Random numbers come from it
                instead of seed and index; `early_exit` is off, and `quick` has no effect.
        """
        if generator is None:
            return self.run(model, images, labels, seed=seed, index=index).images
        check_batch(model, images, labels)
        images = images.detach()
        target = Target(model, len(images), images.device, self.precision)
        whole = replace(self, early_exit=False)
        is_training = any(module.training for module in model.modules())
        with undisturbed(model) if is_training else nullcontext():
            if self.labels == "predicted":
                with torch.no_grad():
                    labels = predicted_classes(target.scores(images)).clamp_min(0)
            points = whole.search(target, images, labels, Draws.from_generator(generator, len(images)))
            if self.keep == "best":
                broken = predicted_classes(target.scores(points)) != labels
                points = torch.where(per_image(broken, images), points, images)
        return points

    @in_usual_state
    def run(
        self, model: nn.Module, images: Tensor, labels: Tensor, *, seed: int = 0, index: Tensor | None = None
    ) -> Attacked:
        """The attacked images with predictions and cost. A batch too large for GPU memory is halved.

        The model runs in eval mode. Its state and the global random generators are restored afterwards, also when it
        raises an error.
        """
        check_batch(model, images, labels, index)
        with undisturbed(model), forked_generators(images.device):
            return self._run_in_memory(model, images, labels, seed, index)

    def _run_in_memory(
        self, model: nn.Module, images: Tensor, labels: Tensor, seed: int, index: Tensor | None
    ) -> Attacked:
        images = images.detach()
        index = torch.arange(len(images), device=images.device) if index is None else index.to(images.device)
        most = at_once(len(images))
        if len(images) <= most:
            try:
                with without_tf32():
                    return self._run(model, images, labels, Draws.of(seed, index))
            except torch.cuda.OutOfMemoryError:
                if len(images) == 1:
                    raise
            torch.cuda.empty_cache()
            most = (len(images) + 1) // 2
        pieces = zip(*(torch.split(values, most) for values in (images, labels, index)), strict=True)
        parts = [self._run_in_memory(model, some, own, seed, here) for some, own, here in pieces]
        names = [name for name in Attacked.__annotations__ if name != "nan_gradients"]
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return Attacked(**joined, nan_gradients=sum(part.nan_gradients for part in parts))

    def _target(self, model: nn.Module, images: Tensor) -> Target:
        if not self.quick:
            return Target(model, len(images), images.device, self.precision)
        faster, run = quick_copy(model, self.precision), Recorder() if images.is_cuda else run_in_pieces
        prepare(faster, images)
        return Target(faster, len(images), images.device, self.precision, run, judge=model)

    def _run(self, model: nn.Module, images: Tensor, labels: Tensor, draws: Draws) -> Attacked:
        target = self._target(model, images)
        clean, num_classes = target.verdict_and_classes(images)
        if self.labels == "predicted":
            labels = clean.clamp_min(0)  # an image without an answer has no class to move away from
        check_labels(labels, num_classes)
        if self.keep == "last":
            points = self.search(target, images, labels, draws)
        else:
            points = images.clone()
            rows = torch.arange(len(images), device=images.device)
            if self.early_exit:
                rows = rows[clean == labels]
            if len(rows):
                points[rows] = self.search(target.narrow(rows), images[rows], labels[rows], draws.take(rows))
        predictions = target.verdict(points)
        if self.keep == "best":  # the clean image is returned where the attack failed
            broken = predictions != labels
            points = torch.where(per_image(broken, images), points, images)
            predictions = torch.where(broken, predictions, clean)
        asked = target.forwards, target.backwards
        return Attacked(
            points, predictions, predictions != labels, *asked, nan_gradients=target.nan_gradients
        )


@dataclass(frozen=True, kw_only=True)
class BallAttack(Attack):
    """An attack whose points stay within a ball around each image and within [0, 1].

    Attributes:
        norm: of the ball, a name of `NORMS`.
        eps: radius of the ball on the [0, 1] scale, or a fraction such as "8/255".
    """

    norm: Norm
    eps: float | str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("norm", self.norm, NORMS)
        parse_eps(self.eps, most=NORMS[self.norm].longest)

    @property
    def radius(self) -> float:
        """`eps` as a number."""
        return parse_eps(self.eps)


def check_batch(model: nn.Module, images: Tensor, labels: Tensor, index: Tensor | None = None) -> None:
    """Raises InputError unless these are a torch module, pixels in [0, 1], and an int64 label (and index) per image."""
    check_kind("model", model, nn.Module, "a torch module")
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise InputError(
            "the model's weights were made inside torch.inference_mode, and let no gradient pass: build the model "
            "outside of it, or give copy.deepcopy(model)."
        )
    check_pixels(images)
    check_tensor("labels", labels, len(images))
    if index is not None:
        check_tensor("index", index, len(images))


def check_tensor(name: str, values: Any, count: int) -> None:
    """Raises InputError unless the values are an int64 tensor of shape (count,)."""
    if not isinstance(values, Tensor) or values.shape != (count,) or values.dtype != torch.int64:
        came = f"{values.dtype} of {tuple(values.shape)}" if isinstance(values, Tensor) else kind_of(values)
        raise InputError(f"{name} must be int64 of shape ({count},), one per image, not {came}.")


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Raises InputError unless all labels lie in 0 to num_classes - 1."""
    if not len(labels):
        return
    low, high = (int(bound) for bound in labels.aminmax())
    if low < 0 or high >= num_classes:
        raise InputError(
            f"labels must be classes of the model, 0 to {num_classes - 1}, but one is {low if low < 0 else high}: an "
            "image with any other label would count as broken."
        )
