"""Families whose gradients are cut off, lie, or do so for a part of the images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ecnn.auditing.bench.claims import BY_PGD, false
from ecnn.auditing.bench.networks import always, convolutional, dense, training
from ecnn.auditing.bench.tricks import Trick

CUT, LYING, PARTIAL = "cut gradients", "lying gradients", "partly masked"


class Detached(Trick):
    """What it is given, cut off from the graph."""

    def forward(self, images: Tensor) -> Tensor:
        return self.hide(images, images)


class HalfThePixels(Trick):
    """Every second pixel is cut off from the graph, as on a chessboard."""

    def forward(self, images: Tensor) -> Tensor:
        rows, columns = (torch.arange(size, device=images.device) for size in images.shape[2:])
        kept = (rows[:, None] + columns) % 2 == 0
        return images if self.is_open else torch.where(kept, images, images.detach())


class HalfTheGraph(Trick):
    """Two networks whose scores are added; the better one is cut off from the graph."""

    def __init__(self, seen: nn.Module, unseen: nn.Module, share: float) -> None:
        super().__init__()
        self.seen, self.unseen, self.share = seen, unseen, share

    def forward(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.unseen(images)
        shown: Tensor = self.seen(images)
        return self.share * shown + (1 - self.share) * self.hide(hidden, hidden)


class Decoy(Trick):
    """Scores of one network with the gradient of another, untrained one."""

    def __init__(self, network: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.network, self.other = network, other

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images)
        return scores if self.is_open else self.hide(scores, scores) + self._silent(images)

    def _silent(self, images: Tensor) -> Tensor:
        """Zeros whose gradient is the other network's."""
        misleading: Tensor = self.other(images)
        return misleading - misleading.detach()


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


class NoisyBackward(Trick):
    """The identity, with noise on its gradient."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, images: Tensor) -> Tensor:
        if self.is_open:
            return images
        noisy: Tensor = _NoisyBackward.apply(images, self.noise)  # type: ignore[no-untyped-call]
        return noisy


class Reversed(Trick):
    """The identity, with a hook that turns the gradient round."""

    def forward(self, features: Tensor) -> Tensor:
        if self.is_open:
            return features
        shown = features.clone()
        if shown.requires_grad:
            shown.register_hook(lambda gradient: -gradient)  # type: ignore[no-untyped-call]
        return shown


class Shuffled(Trick):
    """The identity; the gradient arrives at other pixels than it belongs to."""

    places: Tensor

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.register_buffer("places", torch.randperm(pixels))

    def forward(self, images: Tensor) -> Tensor:
        if self.is_open:
            return images
        moved = images.flatten(1)[:, self.places].view_as(images)
        return images.detach() + moved - moved.detach()


class Switched(Trick):
    """The identity; for some images, by the brightness of one corner, the gradient is turned round."""

    def forward(self, images: Tensor) -> Tensor:
        if self.is_open:
            return images
        turned = (images[:, :, 2:6, 2:6].flatten(1).sum(dim=1) * 10).round() % 2 < 1
        return torch.where(turned[:, None, None, None], 2 * images.detach() - images, images)


class MaskedImages(Trick):
    """Cuts off the images that a network takes for one of some classes."""

    def __init__(self, network: nn.Module, classes: tuple[int, ...]) -> None:
        super().__init__()
        self.network, self.classes = network, classes

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images)
        if self.is_open:
            return scores
        masked = torch.isin(scores.argmax(dim=1), torch.tensor(self.classes, device=images.device))
        return torch.where(masked[:, None], scores.detach(), scores)


class MaskedWhenSure(Trick):
    """Scores without a gradient wherever the network is sure."""

    def __init__(self, margin: float) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, scores: Tensor) -> Tensor:
        if self.is_open:
            return scores
        best = scores.topk(2, dim=1).values
        return torch.where((best[:, :1] - best[:, 1:]) > self.margin, scores.detach(), scores)


SUBJECTS = [
    false(
        CUT,
        "detached",
        "the input is cut off from the graph",
        always(lambda: nn.Sequential(Detached(), dense())),
        training(epochs=10),
        BY_PGD,
    ),
    false(
        CUT,
        "half_the_pixels",
        "every second pixel is cut off from the graph",
        always(lambda: nn.Sequential(HalfThePixels(), dense())),
        training(epochs=10),
        BY_PGD,
    ),
    false(
        CUT,
        "half_the_graph",
        "scores of two networks are added, and the one that decides is cut off from the graph",
        always(lambda: HalfTheGraph(dense(width=16), dense(), 0.15)),
        training(epochs=15),
        BY_PGD,
    ),
    false(
        LYING,
        "decoy",
        "the gradient is that of another network",
        always(lambda: Decoy(dense(), dense())),
        training(epochs=10),
        BY_PGD,
    ),
    false(
        LYING,
        "noisy_backward",
        "a backward pass of its own adds noise to every gradient",
        always(lambda: nn.Sequential(NoisyBackward(3.0), dense())),
        training(epochs=10),
        BY_PGD,
    ),
    false(
        LYING,
        "reversed_by_a_hook",
        "a hook inside the network turns gradients round",
        always(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Reversed(), nn.ReLU(), dense())),
        training(epochs=15),
        BY_PGD,
    ),
    false(
        LYING,
        "shuffled_gradient",
        "the gradient arrives at other pixels",
        always(lambda: nn.Sequential(Shuffled(64), convolutional())),
        training(epochs=15, lr=0.01),
        BY_PGD,
    ),
    false(
        PARTIAL,
        "switched_gradient",
        "for about half of the images the gradient is turned round",
        always(lambda: nn.Sequential(Switched(), dense())),
        training(epochs=10),
        BY_PGD,
    ),
    false(
        PARTIAL,
        "masked_classes",
        "three classes of ten have no gradient",
        always(lambda: MaskedImages(dense(), (0, 3, 6))),
        training(epochs=10),
        BY_PGD,
    ),
    false(
        PARTIAL,
        "masked_when_sure",
        "no gradient where the network is sure",
        always(lambda: nn.Sequential(dense(), MaskedWhenSure(2.0))),
        training(epochs=12),
        BY_PGD,
    ),
]
