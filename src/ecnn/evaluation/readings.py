"""A check for models that expect other inputs than pixels in [0, 1], such as normalised ones or 0..255."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ecnn.asking import read_model, undisturbed, without_tf32
from ecnn.attacks.randomness import forked_generators
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation.batch import place
from ecnn.evaluation.intervals import wilson_interval
from ecnn.objectives import predicted_classes

_ASKED = 128  # images on which each reading is tried
_ACCURATE = 0.5  # a reading is accepted from this share of the way between chance and accuracy 1
#: Usual mean and standard deviation for normalising the images of these datasets.
STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "CIFAR-10": ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)),
    "CIFAR-100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "MNIST": ((0.1307,), (0.3081,)),
}
_CAFFE = (103.939, 116.779, 123.68)


@dataclass(frozen=True)
class Reading:
    """Another input convention of a model.

    Attributes:
        words: the input in words, for the error message.
        wrap: how to wrap the model so that it takes pixels in [0, 1], for the error message.
        change: turns pixels in [0, 1] into that input.
    """

    words: str
    wrap: str
    change: Callable[[Tensor], Tensor]


def other_readings(channels: int) -> Iterator[Reading]:
    """Yields the usual input conventions for images of this many channels; for three channels also in BGR order."""
    scaled = [
        _normalised("pixels of 0..255", (0.0,), (1 / 255,), "mean=0.0, std=1 / 255"),
        _normalised("pixels of -1..1", (0.5,), (0.5,), "mean=0.5, std=0.5"),
    ]
    for name, (mean, std) in STATISTICS.items():
        if len(mean) in (1, channels):
            values = (
                f"mean={list(mean)}, std={list(std)}" if len(mean) > 1 else f"mean={mean[0]}, std={std[0]}"
            )
            scaled.append(_normalised(f"pixels normalised as {name}'s", mean, std, values))
    yield from scaled
    if channels != 3:
        return
    flip = "a module that calls model({}images.flip(1){})"
    yield Reading(
        "the channels in the order blue, green, red", flip.format("", ""), lambda images: images.flip(1)
    )
    yield Reading(
        "pixels of 0..255 less Caffe's means, in the order blue, green, red",
        flip.format("255 * ", f" - torch.tensor({list(_CAFFE)})[:, None, None]"),
        lambda images: 255 * images.flip(1) - torch.tensor(_CAFFE).to(images)[:, None, None],
    )
    for one in scaled:
        yield Reading(
            f"{one.words}, in the order blue, green, red",
            f"{one.wrap}, in a module that calls it with images.flip(1)",
            lambda images, one=one: one.change(images.flip(1)),  # type: ignore[misc]
        )


def _normalised(words: str, mean: Sequence[float], std: Sequence[float], values: str) -> Reading:
    def change(images: Tensor) -> Tensor:
        middle, spread = (torch.tensor(part).to(images)[:, None, None] for part in (mean, std))
        return (images - middle) / spread

    return Reading(words, f"ecnn.Normalized(model, {values})", change)


def check_reading(
    model: nn.Module, split: Split, *, batch_size: int, right: np.ndarray | None = None
) -> None:
    """Raises InputError if a model is no better than chance on pixels in [0, 1] but accurate on other inputs.

    The other inputs are those of `other_readings`. The message says how to wrap the model, which is not changed. Models
    of this package are not checked: they take pixels in [0, 1].

    Args:
        split: images and labels, of which the first 128 are used.
        batch_size: images per forward pass.
        right: (image,) whether the model classifies each image of the split correctly; None computes it.
    """
    if type(model).__module__.startswith("ecnn."):
        return
    some, labels = split[: min(_ASKED, len(split))]
    images = place(model, some)
    labels = labels.to(images.device)
    with undisturbed(model), without_tf32(), forked_generators(images.device, 0):
        count = (
            _count_right(model, images, labels, batch_size) if right is None else int(right[:_ASKED].sum())
        )
        num_classes = read_model(model, images[:8]).shape[1]
        chance = max(1 / num_classes, float(torch.bincount(labels).max()) / len(labels))
        low, high = wilson_interval(count, len(images))
        if low > chance:
            return
        found = [
            (_try_reading(model, reading, images, labels, batch_size), reading)
            for reading in other_readings(images.shape[1])
        ]
    best, reading = max(found, key=lambda pair: pair[0])
    if wilson_interval(best, len(images))[0] <= max(high, chance):
        return
    if best / len(images) < chance + _ACCURATE * (1 - chance):
        return
    raise InputError(
        f"the model classifies {_percent(count, len(images))} of {len(images)} images right when given pixels in "
        f"[0, 1], and {_percent(best, len(images))} when given {reading.words}: wrap it: {reading.wrap}."
    )


def _count_right(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int) -> int:
    parts = zip(torch.split(images, batch_size), torch.split(labels, batch_size), strict=True)
    return sum(int((predicted_classes(read_model(model, part)) == truth).sum()) for part, truth in parts)


def _try_reading(model: nn.Module, reading: Reading, images: Tensor, labels: Tensor, batch_size: int) -> int:
    try:
        return _count_right(model, reading.change(images), labels, batch_size)
    except Exception:  # a model may raise anything for such pixels
        return 0


def _percent(count: int, total: int) -> str:
    return f"{100 * count / total:.0f} %"
