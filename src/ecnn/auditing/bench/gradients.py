"""Families whose gradients are cut off or wrong, for all images or for a part of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ecnn.auditing.bench.claims import BY_PGD, Subjects
from ecnn.auditing.bench.networks import convolutional, dense, training
from ecnn.auditing.bench.tricks import Disguised, Removable, Trick, with_fields

CUT, LYING, PARTIAL = "cut gradients", "lying gradients", "partly masked"

SUBJECTS = Subjects()


@SUBJECTS.false(CUT, training(epochs=10), BY_PGD, before=dense)
class Detached(Trick):
    """The input is cut off from the graph."""

    def forward(self, images: Tensor) -> Tensor:
        return self.hide(images, images)


@SUBJECTS.false(CUT, training(epochs=10), BY_PGD, before=dense)
class HalfThePixels(Removable):
    """Every second pixel is cut off from the graph.

    These are the pixels of one colour of a chessboard.
    """

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


@SUBJECTS.false(CUT, training(epochs=15), BY_PGD)
def half_the_graph() -> nn.Module:
    """Scores of two networks are added, and the one that decides is cut off from the graph."""
    return HalfTheGraph(dense(width=16), dense(), 0.15)


@with_fields
class Decoy(Disguised):
    """Scores of one network with the gradient of another, untrained one."""

    other: nn.Module

    def show(self, images: Tensor, scores: Tensor) -> Tensor:
        misleading: Tensor = self.other(images)
        return scores.detach() + (misleading - misleading.detach())


@SUBJECTS.false(LYING, training(epochs=10), BY_PGD)
def decoy() -> nn.Module:
    """The gradient is that of another network."""
    return Decoy(dense(), dense())


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


@SUBJECTS.false(LYING, training(epochs=10), BY_PGD, before=dense)
@with_fields
class NoisyBackward(Removable):
    """A backward pass of its own adds noise to every gradient.

    The forward pass changes nothing.
    """

    noise: float = 3.0

    def change(self, images: Tensor) -> Tensor:
        noisy: Tensor = _NoisyBackward.apply(images, self.noise)  # type: ignore[no-untyped-call]
        return noisy


class Reversed(Removable):
    """The identity, with a hook that flips the sign of the gradient."""

    def change(self, features: Tensor) -> Tensor:
        shown = features.clone()
        if shown.requires_grad:
            shown.register_hook(lambda gradient: -gradient)  # type: ignore[no-untyped-call]
        return shown


@SUBJECTS.false(LYING, training(epochs=15), BY_PGD)
def reversed_by_a_hook() -> nn.Module:
    """A hook inside the network flips the sign of gradients."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Reversed(), nn.ReLU(), dense())


@SUBJECTS.false(LYING, training(epochs=15, lr=0.01), BY_PGD, before=convolutional)
class ShuffledGradient(Removable):
    """The gradient of each pixel arrives at another pixel.

    The forward pass changes nothing.
    """

    places: Tensor

    def __init__(self, pixels: int = 64) -> None:
        super().__init__()
        self.register_buffer("places", torch.randperm(pixels))

    def change(self, images: Tensor) -> Tensor:
        moved = images.flatten(1)[:, self.places].view_as(images)
        return images.detach() + moved - moved.detach()


@SUBJECTS.false(PARTIAL, training(epochs=10), BY_PGD, before=dense)
class SwitchedGradient(Removable):
    """For about half of the images the gradient has the wrong sign.

    The brightness of the middle 4x4 pixels decides for which ones.
    """

    def change(self, images: Tensor) -> Tensor:
        turned = (images[:, :, 2:6, 2:6].flatten(1).sum(dim=1) * 10).round() % 2 < 1
        return torch.where(turned[:, None, None, None], 2 * images.detach() - images, images)


@with_fields
class MaskedImages(Disguised):
    """Returns scores without gradient for images that the network assigns to one of some classes."""

    classes: tuple[int, ...]

    def show(self, images: Tensor, scores: Tensor) -> Tensor:
        masked = torch.isin(scores.argmax(dim=1), torch.tensor(self.classes, device=images.device))
        return torch.where(masked[:, None], scores.detach(), scores)


@SUBJECTS.false(PARTIAL, training(epochs=10), BY_PGD)
def masked_classes() -> nn.Module:
    """Three classes of ten have no gradient."""
    return MaskedImages(dense(), (0, 3, 6))


@SUBJECTS.false(PARTIAL, training(epochs=12), BY_PGD, after=dense)
@with_fields
class MaskedWhenSure(Removable):
    """No gradient where the network is sure."""

    margin: float = 2.0

    def change(self, scores: Tensor) -> Tensor:
        best = scores.topk(2, dim=1).values
        return torch.where((best[:, :1] - best[:, 1:]) > self.margin, scores.detach(), scores)
