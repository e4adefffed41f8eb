"""Families whose gradients are cut off, lie, or do so for a part of the images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ecnn.auditing.bench.claims import BY_PGD, Subjects
from ecnn.auditing.bench.networks import convolutional, dense, training
from ecnn.auditing.bench.tricks import Disguised, Removable, Trick, with_fields

CUT, LYING, PARTIAL = "cut gradients", "lying gradients", "partly masked"


class Detached(Trick):
    """What it is given, cut off from the graph."""

    def forward(self, images: Tensor) -> Tensor:
        return self.hide(images, images)


class HalfThePixels(Removable):
    """Every second pixel is cut off from the graph, as on a chessboard."""

    def change(self, images: Tensor) -> Tensor:
        rows, columns = (torch.arange(size, device=images.device) for size in images.shape[2:])
        kept = (rows[:, None] + columns) % 2 == 0
        return torch.where(kept, images, images.detach())


@with_fields
class HalfTheGraph(Trick):
    """Two networks whose scores are added; the better one is cut off from the graph."""

    seen: nn.Module
    unseen: nn.Module
    share: float

    def forward(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.unseen(images)
        shown: Tensor = self.seen(images)
        return self.share * shown + (1 - self.share) * self.hide(hidden, hidden)


@with_fields
class Decoy(Disguised):
    """Scores of one network with the gradient of another, untrained one."""

    other: nn.Module

    def show(self, images: Tensor, scores: Tensor) -> Tensor:
        misleading: Tensor = self.other(images)
        return scores.detach() + (misleading - misleading.detach())


class _NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, noise: float) -> Tensor:
        ctx.noise = noise
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        size = gradient.abs().amax(dim=tuple(range(1, gradient.ndim)), keepdim=True)
        return gradient + ctx.noise * size * torch.randn_like(gradient), None


@with_fields
class NoisyBackward(Removable):
    """The identity, with noise on its gradient."""

    noise: float

    def change(self, images: Tensor) -> Tensor:
        noisy: Tensor = _NoisyBackward.apply(images, self.noise)  # type: ignore[no-untyped-call]
        return noisy


class Reversed(Removable):
    """The identity, with a hook that turns the gradient round."""

    def change(self, features: Tensor) -> Tensor:
        shown = features.clone()
        if shown.requires_grad:
            shown.register_hook(lambda gradient: -gradient)  # type: ignore[no-untyped-call]
        return shown


class Shuffled(Removable):
    """The identity; the gradient arrives at other pixels than it belongs to."""

    places: Tensor

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.register_buffer("places", torch.randperm(pixels))

    def change(self, images: Tensor) -> Tensor:
        moved = images.flatten(1)[:, self.places].view_as(images)
        return images.detach() + moved - moved.detach()


class Switched(Removable):
    """The identity; for some images, by the brightness of one corner, the gradient is turned round."""

    def change(self, images: Tensor) -> Tensor:
        turned = (images[:, :, 2:6, 2:6].flatten(1).sum(dim=1) * 10).round() % 2 < 1
        return torch.where(turned[:, None, None, None], 2 * images.detach() - images, images)


@with_fields
class MaskedImages(Disguised):
    """Cuts off the images that a network takes for one of some classes."""

    classes: tuple[int, ...]

    def show(self, images: Tensor, scores: Tensor) -> Tensor:
        masked = torch.isin(scores.argmax(dim=1), torch.tensor(self.classes, device=images.device))
        return torch.where(masked[:, None], scores.detach(), scores)


@with_fields
class MaskedWhenSure(Removable):
    """Scores without a gradient wherever the network is sure."""

    margin: float

    def change(self, scores: Tensor) -> Tensor:
        best = scores.topk(2, dim=1).values
        return torch.where((best[:, :1] - best[:, 1:]) > self.margin, scores.detach(), scores)


SUBJECTS = Subjects()


@SUBJECTS.false(CUT, training(epochs=10), BY_PGD)
def detached() -> nn.Module:
    """The input is cut off from the graph."""
    return nn.Sequential(Detached(), dense())


@SUBJECTS.false(CUT, training(epochs=10), BY_PGD)
def half_the_pixels() -> nn.Module:
    """Every second pixel is cut off from the graph."""
    return nn.Sequential(HalfThePixels(), dense())


@SUBJECTS.false(CUT, training(epochs=15), BY_PGD)
def half_the_graph() -> nn.Module:
    """Scores of two networks are added, and the one that decides is cut off from the graph."""
    return HalfTheGraph(dense(width=16), dense(), 0.15)


@SUBJECTS.false(LYING, training(epochs=10), BY_PGD)
def decoy() -> nn.Module:
    """The gradient is that of another network."""
    return Decoy(dense(), dense())


@SUBJECTS.false(LYING, training(epochs=10), BY_PGD)
def noisy_backward() -> nn.Module:
    """A backward pass of its own adds noise to every gradient."""
    return nn.Sequential(NoisyBackward(3.0), dense())


@SUBJECTS.false(LYING, training(epochs=15), BY_PGD)
def reversed_by_a_hook() -> nn.Module:
    """A hook inside the network turns gradients round."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Reversed(), nn.ReLU(), dense())


@SUBJECTS.false(LYING, training(epochs=15, lr=0.01), BY_PGD)
def shuffled_gradient() -> nn.Module:
    """The gradient arrives at other pixels."""
    return nn.Sequential(Shuffled(64), convolutional())


@SUBJECTS.false(PARTIAL, training(epochs=10), BY_PGD)
def switched_gradient() -> nn.Module:
    """For about half of the images the gradient is turned round."""
    return nn.Sequential(Switched(), dense())


@SUBJECTS.false(PARTIAL, training(epochs=10), BY_PGD)
def masked_classes() -> nn.Module:
    """Three classes of ten have no gradient."""
    return MaskedImages(dense(), (0, 3, 6))


@SUBJECTS.false(PARTIAL, training(epochs=12), BY_PGD)
def masked_when_sure() -> nn.Module:
    """No gradient where the network is sure."""
    return nn.Sequential(dense(), MaskedWhenSure(2.0))
