"""Reads images and labels from tensors, arrays, torch datasets or loaders into a `Split`, no more than needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from ecnn.attacks.randomness import forked_generators
from ecnn.checks import MOST, check_count, kind_of, shown
from ecnn.data import Dataset, Split
from ecnn.data.datasets import check_dense, check_range
from ecnn.errors import InputError
from ecnn.evaluation.generators import seeded_generators_of
from ecnn.progress import Milestone, Progress

#: What is evaluated: a Split, (images, labels) as tensors or arrays, a torch dataset of (image, label), or a loader.
Images: TypeAlias = Split | tuple[Any, Any] | TorchDataset[Any] | DataLoader[Any] | Sequence[Any]
_KINDS = (
    "a Split such as data.test, a pair (images, labels) of tensors or arrays, a torch Dataset of (image, label), "
    "or a DataLoader"
)
_CHUNK = 256  # images converted at a time
_ROUNDING = 1e-6  # tolerance beyond [0, 1], for rounding errors of resized images
_COLOURS = (1, 3, 4)


def read_images(
    data: Images,
    limit: int | None = None,
    *,
    classes: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Split:
    """The first images and labels of the data as a Split; InputError if they are not images with labels.

    Bytes count as value / 255. Floating pixels must lie in [0, 1]; if all are multiples of 1/255 they are stored as
    bytes, which are the same pixels. A dataset or loader is read no further than needed. Meanwhile torch's, NumPy's and
    Python's global generators, and those that the data hold themselves, are seeded, so that data which shuffle or
    augment give the same images every time. Afterwards the states of all generators are restored.

    Args:
        data: see `Images`; a Split is not read again, and `limit` does not apply to it.
        limit: how many images to read at most; None for all.
        classes: only images of these classes; None for all.
        progress: called as progress(done, total, note).
    """
    if limit is not None:
        check_count("limit", limit, least=0)
    wanted = None if classes is None else _check_classes(classes)
    if isinstance(data, Split):
        return data if wanted is None else data.select(torch.isin(data.labels, wanted))
    parts: list[Split] = []
    count, is_bytes = 0, False
    with forked_generators(torch.device("cpu"), 0), seeded_generators_of(data):
        for raw_images, raw_labels in _chunks(data, _CHUNK if limit is None else min(_CHUNK, max(1, limit))):
            images, is_bytes = _check_images(raw_images, parts[0] if parts else None)
            part = _as_split(images, _check_labels(raw_labels, len(images)))
            part = part if wanted is None else part.select(torch.isin(part.labels, wanted))
            parts.append(part.take(None if limit is None else limit - count))
            count += len(parts[-1])
            if progress is not None:
                progress(count, count if limit is None else limit, "reading images")
            if limit is not None and count >= limit:
                break
    if not count:
        raise InputError(
            "there is no image to evaluate: the data are empty, limit is 0, or no image is of these classes."
        )
    found = _join(parts)
    if is_bytes:
        _check_bytes(found)
        if progress is not None:
            progress(count, count, Milestone("the images are bytes: pixels count as value / 255"))
    return found


def _check_classes(classes: Any) -> Tensor:
    if isinstance(classes, str) or not isinstance(classes, Sequence) or not len(classes):
        raise InputError(f"classes must be a list of class numbers such as [3, 5, 7], not {shown(classes)}.")
    for number in classes:
        check_count("a class", number, least=0)
    return torch.tensor([int(number) for number in classes])


def _chunks(data: Any, step: int) -> Iterator[tuple[Any, Any]]:
    """Yields (images, labels) with `step` images each, unchecked; from a loader its own batches."""
    if isinstance(data, Dataset):
        raise InputError("give one split of the dataset, such as data.test, and not all three.")
    if isinstance(data, TensorDataset):
        if len(data.tensors) != 2:
            raise InputError(
                f"a TensorDataset must hold two tensors, images and labels, not {len(data.tensors)}."
            )
        data = data.tensors
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], Tensor | np.ndarray):
        yield from _slices(data[0], data[1], step)
    elif isinstance(data, DataLoader):
        for batch in data:
            images, labels = _pair(batch, "a batch of the loader", "(images, labels)")
            if not _ndim(labels) and _ndim(images) < 4:
                raise InputError(
                    "a loader must give batches of images and labels, but this gives single ones: set its batch_size."
                )
            yield images, labels
    elif isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        hint = ": wrap it in a DataLoader." if isinstance(data, IterableDataset) else "."
        raise InputError(f"split must be {_KINDS}, not {kind_of(data)}{hint}")
    elif isinstance(data, str | bytes | Mapping | Tensor | np.ndarray):
        raise InputError(f"split must be {_KINDS}, not {_named(data)}.")
    else:
        yield from _samples(data, step)


def _ndim(values: Any) -> int:
    """Number of axes of a tensor or array; 1 for a list or tuple, 0 for anything else."""
    return int(getattr(values, "ndim", 1 if isinstance(values, list | tuple) else 0))


def _slices(images: Any, labels: Any, step: int) -> Iterator[tuple[Any, Any]]:
    if not isinstance(labels, Tensor | np.ndarray | list | tuple):
        raise InputError(f"labels must be a tensor, an array or a list, not {kind_of(labels)}.")
    check_dense("images", images)
    check_dense("labels", labels)
    for name, values in (("images", images), ("labels", labels)):
        if not _ndim(values):
            raise InputError(
                f"there must be one label for each image, but the {name} are one number, {shown(values)}."
            )
    if len(images) != len(labels):
        raise InputError(
            f"there must be one label for each image, but there are {len(images)} images and {len(labels)} labels."
        )
    for start in range(0, len(images), step):
        yield images[start : start + step], labels[start : start + step]


def _samples(data: Any, step: int) -> Iterator[tuple[Any, Any]]:
    """Yields (images, labels) from a map-style dataset, `step` items at a time."""
    for start in range(0, len(data), step):
        items = (data[number] for number in range(start, min(start + step, len(data))))
        images, labels = zip(*(_pair(item, "an item", "(image, label)") for item in items), strict=True)
        tensors = [_tensor(image) for image in images]
        for number, image in enumerate(tensors):
            if image.shape != tensors[0].shape or image.dtype != tensors[0].dtype:
                raise InputError(
                    f"all images must have one shape and dtype, but image {start + number} is {_form(image)} and image "
                    f"{start} {_form(tensors[0])}: resize them."
                )
        yield torch.stack(tensors), labels


def _pair(item: Any, owner: str, form: str) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        came = f"{len(item)} things" if isinstance(item, tuple | list) else _named(item)
        hint = ": wrap the data so that they give such pairs" if isinstance(item, Mapping) else ""
        raise InputError(f"{owner} must be {form}, not {came}{hint}.")
    return item[0], item[1]


def _named(value: Any) -> str:
    """The kind of a value, with the keys if it is a mapping, for error messages."""
    entries = f" of {', '.join(map(str, value))}" if isinstance(value, Mapping) else ""
    return f"{kind_of(value)}{entries}"


def _tensor(image: Any) -> Tensor:
    """An image, or several, as a tensor on the CPU. All pixels pass through here."""
    check_dense("images", image)
    if isinstance(image, Tensor):
        return image.detach().cpu()
    image = _unmasked("images", image)
    if isinstance(image, np.ndarray) and image.dtype.kind in "uif":
        # torch needs the machine's byte order and a writable array; memory-mapped files may have neither.
        dtype = (
            np.float64
            if image.dtype.kind == "f" and image.dtype.itemsize > 8
            else image.dtype.newbyteorder("=")
        )
        return torch.from_numpy(np.require(image, dtype, ["C", "W"]))
    came = f"an array of {image.dtype}" if isinstance(image, np.ndarray) else kind_of(image)
    hint = ": give the dataset a transform such as torchvision's ToTensor()"
    raise InputError(
        f"images must be tensors or arrays of numbers, not {came}{hint if 'Image' in came else ''}."
    )


def _unmasked(name: str, values: Any) -> Any:
    """The values; a masked array without its mask. InputError if the mask hides any."""
    if not isinstance(values, np.ma.MaskedArray):
        return values
    if hidden := int(np.ma.getmaskarray(values).sum()):
        raise InputError(
            f"{name} must be whole, but they are a masked array that hides {hidden} of {values.size} values: give "
            "filled(VALUE) of it, with what these are to count as."
        )
    return values.data


def _label_array(raw: Any) -> np.ndarray:
    """Labels of any kind as an array. All labels pass through here."""
    check_dense("labels", raw)
    if isinstance(raw, Tensor):
        is_known = not raw.is_floating_point() or raw.dtype in (torch.float16, torch.float32, torch.float64)
        return np.asarray((raw if is_known else raw.float()).detach().cpu())  # NumPy has no bfloat16
    if isinstance(raw, list | tuple):
        raw = [_label_array(label) if isinstance(label, Tensor | np.ndarray) else label for label in raw]
    raw = _unmasked("labels", raw)
    try:
        return np.asarray(raw)
    except ValueError as error:
        raise InputError("labels must be one whole number per image, but their shapes differ.") from error


def _form(images: Tensor) -> str:
    return f"{str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}"


def _check_images(raw: Any, before: Split | None) -> tuple[Tensor, bool]:
    """(image, channel, height, width) bytes, or float32 in [0, 1], on the CPU; and whether they came as bytes.

    Args:
        before: earlier images of the same data, whose shape these must have; None for the first.
    """
    images = _tensor(raw)
    if images.ndim != 4:
        hint = ": add the channel with images[:, None]" if images.ndim == 3 else ""
        raise InputError(f"images must be (image, channel, height, width), not {_form(images)}{hint}.")
    _, channels, height, last = images.shape
    if last in _COLOURS and channels not in _COLOURS and min(channels, height) > last:
        raise InputError(
            f"images must be (image, channel, height, width), but {tuple(images.shape)} has its channels last: permute "
            "them with (0, 3, 1, 2)."
        )
    if before is not None and images.shape[1:] != before.images.shape[1:]:
        raise InputError(
            f"all images must have one shape, but some are {tuple(images.shape[1:])} and the first "
            f"{tuple(before.images.shape[1:])}: resize them."
        )
    if images.dtype == torch.uint8:
        return images, True
    if not images.is_floating_point():
        advice = "convert them to float32" if images.dtype == torch.bool else "convert 0..255 to uint8"
        advice = "take their real part" if images.is_complex() else advice
        raise InputError(
            f"images must be bytes (uint8) or floating pixels in [0, 1], not {_form(images)}: {advice}."
        )
    images = images.to(torch.float32)
    check_range(images, _ROUNDING)
    return images.clamp(0, 1), False


def _check_bytes(found: Split) -> None:
    """Raises InputError for bytes whose maximum is 1: they are probably pixels of [0, 1] cast to integers."""
    if not found.is_float and int(found.images.max()) == 1:
        raise InputError(
            "the images are bytes that reach from 0 to 1 where 255 is white: give pixels of [0, 1] as floats."
        )


def _check_labels(raw: Any, count: int) -> Tensor:
    """(image,) int64 classes."""
    labels = _label_array(raw)
    shape, kind = labels.shape, labels.dtype.name
    if shape != (count,):
        hint = ""
        if not shape:
            raise InputError(
                f"labels must be of shape ({count},), one number per image, not {shown(raw)} alone."
            )
        if shape == (count, 1):
            hint = ": take labels[:, 0]"
        elif len(shape) == 2 and shape[0] == count:
            hint = ": take labels.argmax(1) of one-hot ones"
        raise InputError(f"labels must be of shape ({count},), one number per image, not {shape}{hint}.")
    if not kind.startswith(("int", "uint")):
        hint = ": convert them to int64 if they are class numbers" * kind.startswith(("float", "bool"))
        if kind.startswith(("str", "bytes")):
            kind, hint = "text", ": give the place of each in the list of the model's classes"
        raise InputError(f"labels must be whole numbers, the classes from 0 up, not {kind}{hint}.")
    if count and int(labels.max()) > MOST:  # unsigned ones, which would come out negative
        raise InputError(f"labels must be classes, whole numbers from 0 up to {MOST}, not {labels.max()}.")
    return torch.from_numpy(labels.astype(np.int64))


def _as_split(images: Tensor, labels: Tensor) -> Split:
    """A Split. Pixels that are all multiples of 1/255 are stored as bytes: a quarter of the memory, the same pixels."""
    if images.dtype == torch.float32:
        rounded = (images * 255).round().to(torch.uint8)
        images = rounded if torch.equal(rounded.to(torch.float32) / 255, images) else images
    return Split(images, labels)


def _join(parts: Sequence[Split]) -> Split:
    labels = torch.cat([part.labels for part in parts])
    if any(part.is_float for part in parts):
        return Split(torch.cat([part[:][0] for part in parts]), labels)
    return Split(torch.cat([part.images for part in parts]), labels)
