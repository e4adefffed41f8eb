"""Small models whose answers are known or that train in seconds, and what tests ask of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ecnn.auditing import BUDGETS, Budget, surrogates
from ecnn.codes import load_code
from ecnn.constructions import random_code
from ecnn.model import ECNN

SMALL: dict[str, Any] = {"depth": 8, "width": 2}
#: Images that a model of three channels refuses, and what it says.
WRONG_IMAGES = [
    (torch.rand(2, 1, 8, 8), r"\(batch, 3, height, width\), not \(2, 1, 8, 8\)"),
    (torch.rand(3, 8, 8), "shape"),
    (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "divide bytes by 255"),
]
#: An audit of seconds.
TINY = Budget(
    name="tiny",
    images=20,
    steps=12,
    restarts=1,
    targets=2,
    autoattack=False,
    probe_images=8,
    probe_steps=10,
    queries=30,
    eot=3,
    answers=150,
    turns=0,
)


def shorten_audits(patch: pytest.MonkeyPatch, **more: Any) -> None:
    """Makes budgets with a name so small that every attack and diagnostic runs in a second: for what comes after.

    Args:
        more: settings of a budget that shall not be so small.
    """
    few: dict[str, Any] = {"images": 8, "steps": 2, "targets": 2, "autoattack": False}
    few |= {"probe_images": 4, "probe_steps": 2, "queries": 8, "eot": 2, "turns": 1, **more}
    for name in ("quick", "standard"):
        patch.setitem(BUDGETS, name, dataclasses.replace(BUDGETS[name], **few))
    shorten_lessons(patch)


def shorten_lessons(patch: pytest.MonkeyPatch) -> None:
    """Makes the students of audits learn for a moment: else most of the time of auditing a small network is theirs."""
    patch.setattr(surrogates, "_STUDENT_STEPS", 5)


#: Sets of specialists for ten classes.
RING = [[index, (index + 1) % 10, (index + 3) % 10] for index in range(10)]


class Linear(nn.Module):
    """Scores linear in the pixels: distances to borders and the worst image in a ball are known.

    Args:
        weight: (class, pixel).
        bias: (class,) zero if not given.
        middle: the pixel value at which all scores are the bias.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, middle: float = 0.0) -> None:
        super().__init__()
        self.weight, self.middle = nn.Parameter(weight), middle
        self.bias = nn.Parameter(torch.zeros_like(weight[:, 0]) if bias is None else bias)

    def forward(self, images: Tensor) -> Tensor:
        return (images.flatten(1) - self.middle) @ self.weight.T + self.bias

    def normal(self) -> Tensor:
        """(pixel,) of the border between the first two classes, towards the second."""
        return (self.weight[1] - self.weight[0]).detach()


def random_linear(num_classes: int, pixels: int, *, seed: int = 1, middle: float = 0.5) -> Linear:
    """A linear model in float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_classes, pixels, generator=generator, dtype=torch.float64)
    return Linear(weight, middle=middle)


def half_spaces(weight: Tensor, middle: float = 0.5) -> Linear:
    """Two classes on either side of a plane through a grey image, of which the first lies where `weight` points."""
    return Linear(torch.stack([weight, -weight]), middle=middle)


class Constant(nn.Module):
    """Says class 0 of three, whatever comes."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.tensor([1.0, 0.0, 0.0], dtype=images.dtype).repeat(len(images), 1)


class Saturated(nn.Module):
    """Members whose logits are huge, read through tanh: gradients of the scores are exactly zero in float32.

    Args:
        symbols: two opposite logits per member instead of one.
    """

    def __init__(self, *, scale: float = 60, symbols: bool = False) -> None:
        super().__init__()
        self.code = load_code("10x30")
        self.code_symbols = torch.from_numpy(self.code.symbols.astype("int64"))
        self.signs = torch.from_numpy(self.code.signed.astype("float32"))
        self.scale, self.symbols = scale, symbols

    def member_logits(self, images: Tensor) -> Tensor:
        """The first ten pixels say how much the image looks like each class."""
        logits = self.scale * (images.flatten(1)[:, :10] @ self.signs)
        return torch.stack([-logits, logits], dim=2) if self.symbols else logits

    def decode(self, member_logits: Tensor) -> Tensor:
        logits = member_logits[..., 1] if self.symbols else member_logits
        return torch.tanh(logits) @ self.signs.T

    def forward(self, images: Tensor) -> Tensor:
        return self.decode(self.member_logits(images))


def images_of_classes(per_class: int) -> tuple[Tensor, Tensor]:
    """Images (4 x 4) that `Saturated` classifies right, and their classes 0..9 in turn."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(10).repeat(per_class)
    images = 0.3 + 0.05 * torch.rand(len(labels), 1, 4, 4, generator=generator)
    images.flatten(1)[torch.arange(len(labels)), labels] += 0.4
    return images, labels


class Undecoded(nn.Module):
    """Members without a `decode`: what the model says of a point takes a pass of its own."""

    def __init__(self, model: ECNN | Saturated) -> None:
        super().__init__()
        self.model, self.code_symbols = model, model.code_symbols

    def member_logits(self, images: Tensor) -> Tensor:
        return self.model.member_logits(images)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.model(images)
        return scores


class Wrapped(nn.Module):
    """A model with something done to its input and to its scores."""

    def __init__(
        self,
        inner: nn.Module,
        before: Callable[[Tensor], Tensor] = lambda images: images,
        after: Callable[[Tensor], Tensor] = lambda scores: scores,
    ) -> None:
        super().__init__()
        self.inner, self.before, self.after = inner, before, after

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.after(self.inner(self.before(images)))
        return scores


class Counted(nn.Module):
    """Another model, and how many images it was shown, in how large portions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.shown, self.largest = model, 0, 0

    def forward(self, images: Tensor) -> Tensor:
        self.shown += len(images)
        self.largest = max(self.largest, len(images))
        return self.model(images)  # type: ignore[no-any-return]


class LabelsOnly(nn.Module):
    """Another model that tells its class and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.model(images)
        return nn.functional.one_hot(scores.argmax(dim=1), scores.shape[1]).to(scores.dtype)


class TanhNet(nn.Module):
    """One hidden layer in float64: a crooked border, and small enough to differentiate by hand."""

    def __init__(self, seed: int, *, pixels: int, hidden: int, spread: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        first = torch.randn(hidden, pixels, generator=generator, dtype=torch.float64)
        self.first = nn.Parameter(spread * first)
        self.last = nn.Parameter(torch.randn(4, hidden, generator=generator, dtype=torch.float64))

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh((images.flatten(1) - 0.5) @ self.first.T) @ self.last.T


def tiny_ecnn(in_channels: int = 3, *, seed: int = 0, **options: Any) -> ECNN:
    """Four classes, six members, untrained."""
    torch.manual_seed(seed)
    return ECNN(random_code(4, 6, seed=0), in_channels, width=4, depth=8, feature_dim=8, **options).eval()


def coded_model() -> ECNN:
    """Five classes, seven members, two channels, in float64; its members are spread so that attacks have work to do."""
    torch.manual_seed(0)
    model = ECNN(random_code(5, 7, seed=0), 2, width=4, depth=8, feature_dim=6, activation="silu")
    head: Any = model.head
    with torch.no_grad():  # untrained members all but agree
        head.weight.mul_(8)
    return model.double().eval()


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that reach the device, and the numbers of the largest tensor that one of them made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.largest = max(self.largest, made.numel())
        return made


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def shake(module: nn.Module) -> None:
    """Moves biases and batch norms away from their start, so that leaving one out shows."""
    with torch.no_grad():
        for name, values in module.state_dict().items():
            if name.endswith(("bias", "running_mean")):
                values.uniform_(-0.3, 0.3)
            elif name.endswith("running_var") or (".norm." in name and name.endswith("weight")):
                values.uniform_(0.5, 2.0)


def distance(points: Tensor, images: Tensor, norm: str) -> Tensor:
    """(batch,) how far the points lie from the images, by the definition of the norm."""
    lengths: Tensor = (points - images).flatten(1).norm({"linf": torch.inf, "l2": 2, "l1": 1}[norm], dim=1)
    return lengths


class LinearOfThree(nn.Module):
    """Three scores, linear in 36 pixels."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(3, 36, generator=generator))

    def forward(self, images: Tensor) -> Tensor:
        return (images.flatten(1) - 0.5) @ self.weight.T
