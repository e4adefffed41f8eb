"""Loaded data (`Split`, `Dataset`, `AdversarialSigns`), and the choice of images that are held out."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ecnn.checks import check_array, check_count
from ecnn.errors import InputError

_PIXEL_TYPES = ("torch.uint8", "torch.float32")
# Images summed at a time: a sum over a whole split would first copy it as 64-bit numbers.
_CHUNK = 4096


def check_dense(name: str, values: object) -> None:
    """Raises InputError for a tensor that is nested, sparse, quantised or on the device meta."""
    if not isinstance(values, Tensor):
        return
    if values.is_nested:
        came, advice = "a nested one", "resize what differs in shape, and stack it with torch.stack"
    elif values.is_meta:
        came, advice = "one on the device meta, which holds no numbers", "make it on a device that does"
    elif values.layout != torch.strided:
        came, advice = f"one of the layout {values.layout}", "give to_dense() of it"
    elif values.is_quantized:
        came, advice = "a quantised one", "give dequantize() of it"
    else:
        return
    raise InputError(f"{name} must be an ordinary tensor of numbers, not {came}: {advice}.")


def check_range(pixels: Tensor, rounding: float = 0.0) -> None:
    """Raises InputError unless floating-point pixels lie in [0, 1]; the message guesses how they were scaled.

    Args:
        rounding: by how much they may lie outside of it.
    """
    if not pixels.numel():
        return
    low, high = (float(bound) for bound in pixels.aminmax())
    if low >= -rounding and high <= 1 + rounding:  # false for nan
        return
    if not (math.isfinite(low) and math.isfinite(high)):
        advice = "some are not finite numbers"
    elif low < 0:
        advice = (
            "give the images as they were before they were normalised, and the normalisation to the model: "
            "ecnn.Normalized(model, mean, std)"
        )
    else:
        advice = f"divide them by {255 if high > 16 else 'the value of white'}"
        advice += ", and let a model that wants other pixels rescale them itself"
    raise InputError(f"pixels must lie in [0, 1], but they reach from {low:.4g} to {high:.4g}: {advice}.")


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """Images and their classes, kept as bytes so that a whole dataset fits on the device that trains on it.

    Attributes:
        images: (image, channel, height, width) uint8. Float32 in [0, 1] is for evaluation only, where rounding to bytes
            would remove a perturbation.
        labels: (image,) int64 class numbers from 0 up.
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        for name, values in (("images", images), ("labels", labels)):
            check_dense(name, values)
        check_array("images", images, "image", "channel", "height", "width", dtype=_PIXEL_TYPES)
        check_array("labels", labels, len(images), dtype="torch.int64")
        if 0 in images.shape[1:]:
            raise InputError(
                f"images need at least one channel, row and column, not shape {tuple(images.shape)}."
            )
        if images.dtype == torch.float32:
            check_range(images)
        if images.device != labels.device:
            raise InputError(
                f"images are on {images.device} but labels on {labels.device}: move one of them."
            )
        if len(labels) and int(labels.min()) < 0:
            raise InputError(f"labels must be 0 or more, not {int(labels.min())}.")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int | slice | Tensor) -> tuple[Tensor, Tensor]:
        """Images as float32 in [0, 1] and their labels; one number gives a batch of one image."""
        if isinstance(index, int):
            if not -len(self) <= index < len(self):  # IndexError also ends `for images, labels in split`
                raise IndexError(f"image {index} of a split of {len(self)} images")
            index = slice(index % len(self), index % len(self) + 1)
        elif isinstance(index, Tensor):
            index = index.to(self.images.device)
        images = self.images[index]
        return (images if self.is_float else images.to(torch.float32).div_(255)), self.labels[index]

    def __repr__(self) -> str:
        return f"Split({len(self)} images of {'x'.join(map(str, self.images.shape[1:]))})"

    @property
    def is_float(self) -> bool:
        """Whether the images are kept as float32, not as bytes."""
        return self.images.dtype == torch.float32

    def to(self, device: torch.device | str) -> Split:
        """The same split on another device."""
        return Split(self.images.to(device), self.labels.to(device))

    def take(self, limit: int | None) -> Split:
        """The first `limit` images, or all of them when there are fewer or the limit is None."""
        if limit is None:
            return self
        check_count("limit", limit, least=0)
        return Split(self.images[:limit], self.labels[:limit])

    def select(self, indices: Tensor | np.ndarray) -> Split:
        """The images with these indices, in this order; a boolean mask selects too."""
        chosen = torch.as_tensor(indices, device=self.images.device)
        if chosen.ndim != 1 or (len(chosen) and chosen.dtype not in (torch.int64, torch.int32, torch.bool)):
            raise InputError(
                f"indices must be one axis of whole numbers, not {chosen.dtype} of shape {tuple(chosen.shape)}."
            )
        if not len(chosen):
            return self.take(0)
        low, high = int(chosen.min()), int(chosen.max())
        if chosen.dtype != torch.bool and not -len(self) <= low <= high < len(self):
            raise InputError(f"indices must lie in 0..{len(self) - 1}, not {low}..{high}.")
        return Split(self.images[chosen], self.labels[chosen])


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images to train on, to choose the best epoch by (`val`) and to report on (`test`), and the names of the classes.

    Attributes:
        may_be_mirrored: whether a mirrored image still belongs to its class; digits and road signs may not.
        folder: absolute path of the images if they come from a folder; None for a named dataset.
    """

    name: str
    train: Split
    val: Split
    test: Split
    class_names: tuple[str, ...]
    may_be_mirrored: bool = True
    folder: str | None = None

    def __post_init__(self) -> None:
        check_count(f"{self.name}: num_classes", self.num_classes, least=2)
        shape = self.train.images.shape[1:]
        for part, split in self._splits():
            if split.is_float:
                raise InputError(f"{self.name}: the {part} images must be bytes (torch.uint8), not float32.")
            if split.images.shape[1:] != shape:
                raise InputError(
                    f"{self.name}: the {part} images have shape {tuple(split.images.shape[1:])} but the train "
                    f"images {tuple(shape)}."
                )
            if len(split) and int(split.labels.max()) >= self.num_classes:
                raise InputError(
                    f"{self.name}: the {part} split has a label {int(split.labels.max())}, but the "
                    f"{self.num_classes} classes are 0..{self.num_classes - 1}."
                )
        counts = torch.bincount(self.train.labels, minlength=self.num_classes).tolist()
        if 0 in counts:
            empty = counts.index(0)
            raise InputError(
                f"{self.name}: class {empty} ({self.class_names[empty]}) has no training image: add some or "
                "remove the class."
            )

    def _splits(self) -> tuple[tuple[str, Split], ...]:
        return (("train", self.train), ("val", self.val), ("test", self.test))

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def in_channels(self) -> int:
        return int(self.train.images.shape[1])

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return int(self.train.images.shape[2]), int(self.train.images.shape[3])

    @cached_property
    def mean_image(self) -> Tensor:
        """(channel, height, width) float32 mean of the training images alone, in [0, 1]."""
        images = self.train.images
        # Whole numbers add up to the same sum in any order, so every device computes the same mean.
        total = torch.zeros(images.shape[1:], dtype=torch.int64, device=images.device)
        for chunk in torch.split(images, _CHUNK):
            total += chunk.sum(dim=0, dtype=torch.int64)
        mean = total.cpu().to(torch.float64) / (255 * len(images))
        return mean.to(torch.float32).to(images.device)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the images and labels of all three splits, so that a run can say what it was trained on."""
        digest = hashlib.sha256()
        for part, split in self._splits():
            digest.update(f"{part} {tuple(split.images.shape)}\n".encode())
            digest.update(split.images.cpu().numpy().tobytes())
            digest.update(split.labels.cpu().numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def to(self, device: torch.device | str) -> Dataset:
        """The same dataset on another device."""
        return replace(self, train=self.train.to(device), val=self.val.to(device), test=self.test.to(device))


@dataclass(frozen=True, eq=False)
class AdversarialSigns:
    """Adversarial traffic signs that others made against a network of theirs (OptProjTran).

    The images are float32 because a small perturbation can be lost by rounding to bytes.

    Attributes:
        images: (image, 3, 32, 32) float32 in [0, 1], the adversarial signs.
        labels: (image,) the true GTSRB class of the sign.
        targets: (image,) the class that the attack aimed at.
        victims: (image,) index of the clean image that each one was made from.
        clean_images: (victim, 3, 32, 32) float32 in [0, 1].
        clean_labels: (victim,) GTSRB classes.
    """

    images: Tensor
    labels: Tensor
    targets: Tensor
    victims: Tensor
    clean_images: Tensor
    clean_labels: Tensor

    def __post_init__(self) -> None:
        for name, images, owned in (
            ("images", self.images, ("labels", "targets", "victims")),
            ("clean_images", self.clean_images, ("clean_labels",)),
        ):
            check_array(name, images, "image", 3, "height", "width", dtype="torch.float32")
            if not bool(((images >= 0) & (images <= 1)).all()):  # also false for nan
                raise InputError(f"{name} must lie in [0, 1].")
            for labels in owned:
                check_array(labels, getattr(self, labels), len(images), dtype="torch.int64")
        if bool(((self.victims < 0) | (self.victims >= len(self.clean_images))).any()):
            raise InputError(f"victims must be numbers of the {len(self.clean_images)} clean images.")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def split(self) -> Split:
        """The adversarial signs with their true classes, to be evaluated and audited like any other images."""
        return Split(self.images, self.labels)

    def __repr__(self) -> str:
        return f"AdversarialSigns({len(self)} images of {len(self.clean_images)} signs)"


def balanced_order(labels: np.ndarray, seed: int) -> np.ndarray:
    """All image indices, in an order whose first n images are spread as evenly over the classes as possible, for any n.

    Each class is shuffled by itself. Then come the first images of all classes, the second ones, and so on; each such
    round is in random order.
    """
    order = np.random.default_rng(seed).permutation(len(labels))
    turn = np.zeros(len(labels), dtype=int)
    for label in np.unique(labels):
        own = order[labels[order] == label]
        turn[own] = np.arange(len(own))
    return order[np.argsort(turn[order], kind="stable")]


def hold_out(
    labels: np.ndarray, fraction: float, seed: int, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the images that are kept and of those held out, both in increasing order.

    Of every class the rounded fraction of its images is held out: at least one if it has two, and never all.

    Args:
        labels: (image,) class of each image.
        fraction: 0 <= fraction < 1; 0 holds nothing out.
        seed: decides which images.
        groups: (image,) group of each image. Images of a class in the same group stay together and count as one:
            frames from one drive past a sign look alike, so a split between them would measure memorisation.
    """
    rng = np.random.default_rng(seed)
    held = np.zeros(len(labels), dtype=bool)
    units = np.arange(len(labels)) if groups is None else groups
    if fraction > 0:
        for label in np.unique(labels):
            own = np.unique(units[labels == label])
            count = min(max(round(fraction * len(own)), 1), len(own) - 1)
            held |= (labels == label) & np.isin(units, rng.permutation(own)[:count])
    return np.flatnonzero(~held), np.flatnonzero(held)
