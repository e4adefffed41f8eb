"""`load_data`: a dataset by name or from a folder of images, with a validation split taken from the training images."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ecnn import files
from ecnn.checks import check_array, check_choice, check_count, check_number, shown
from ecnn.data.datasets import AdversarialSigns, Dataset, Split, balanced_order, hold_out
from ecnn.data.formats import read_checked
from ecnn.data.sources import (
    CHECKSUMS,
    NEVER_MIRRORED,
    READERS,
    SIGNS_FILE,
    TEST_SEED,
    Arrays,
    Request,
    check_sizes,
    read_folder,
    usual_size,
)
from ecnn.errors import InputError
from ecnn.progress import Progress

#: Datasets that `load_data` knows by name.
NAMES: tuple[str, ...] = tuple(READERS)
#: Largest height and width, in pixels, that images are resized to.
MOST_PIXELS = 1024


def load_data(
    name: str | os.PathLike[str],
    root: str | os.PathLike[str] | None = None,
    *,
    val_fraction: float = 0.1,
    seed: int = 0,
    image_size: int | tuple[int, int] | Literal["auto"] | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> Dataset:
    """A dataset with train, val and test splits as bytes. Nothing is normalised, so that attacks work on true pixels.

    Args:
        name: digits, mnist, cifar10, cifar100, gtsrb, or a folder of images by class, also looked for below `root`.
        root: folder of the files; None is the environment's ECNN_DATA, or else `data` in the working directory.
        val_fraction: how much of each class is taken from the training images for validation, 0 up to below 1.
        seed: decides which images those are; test images do not depend on it.
        image_size: pixels of a side, or (height, width), to resize to; None keeps the size (GTSRB: 32), and so does
            "auto", except that images of a folder become 32 x 32 if they differ in size or exceed 64 pixels.
        download: fetch missing official files.
        progress: called while images are read or downloaded.

    Returns:
        The dataset. Missing, damaged or altered files are an InputError of one sentence.
    """
    check_number("val_fraction", val_fraction, most=1, below=True)
    check_count("seed", seed, least=0)
    size = None if image_size == "auto" else _resolve_size(image_size)
    request = Request(resolve_root(root), size, download, progress)
    title = str(name)
    folder = None if title in READERS else find_folder(title, request.root)
    if folder is not None:
        if image_size == "auto":
            request = replace(request, image_size=usual_size(folder))
        found = _as_dataset(folder.resolve().name, read_folder(folder, request), val_fraction, seed)
        # Files are read class by class. In the new order the first few images, of any number, are of all classes.
        val, test = (
            split.select(balanced_order(split.labels.numpy(), TEST_SEED)) for split in (found.val, found.test)
        )
        return replace(found, val=val, test=test, folder=str(folder.resolve()))
    if title == "optprojtran":
        raise InputError("optprojtran is not a dataset to train on: use load_adversarial_signs.")
    check_choice(f"there is no folder {title!r}, and a dataset by name", title, READERS)
    arrays = READERS[title](request)
    check_sizes(title, len(arrays.train_labels), len(arrays.test_labels))
    return _as_dataset(title, arrays, val_fraction, seed)


def load_adversarial_signs(root: str | os.PathLike[str] | None = None) -> AdversarialSigns:
    """The 392 adversarial traffic signs of OptProjTran and the 20 clean signs they were made from.

    Args:
        root: folder that holds optprojtran/optprojtran.npz; None as in `load_data`.
    """
    path = resolve_root(root) / SIGNS_FILE
    image_keys = {"x_adv": "float32", "x_clean": "uint8"}
    label_keys = ("y_true", "y_target", "victim", "y_clean")
    content = read_checked(path, CHECKSUMS.get(SIGNS_FILE))
    arrays = files.read_npz(path, keys=(*image_keys, *label_keys), content=content)
    for key, dtype in image_keys.items():
        check_array(f"{path}: {key}", arrays[key], "image", "height", "width", "channel", dtype=dtype)
    for key in label_keys:
        check_array(f"{path}: {key}", arrays[key], "image", dtype="whole numbers")
    images, clean = (
        torch.from_numpy(np.ascontiguousarray(arrays[key].transpose(0, 3, 1, 2))) for key in image_keys
    )
    labels, targets, victims, clean_labels = (
        torch.from_numpy(arrays[key].astype(np.int64)) for key in label_keys
    )
    return AdversarialSigns(images, labels, targets, victims, clean.to(torch.float32) / 255, clean_labels)


def _as_dataset(title: str, arrays: Arrays, val_fraction: float, seed: int) -> Dataset:
    train = _as_split(arrays.train_images, arrays.train_labels)
    kept, held = hold_out(train.labels.numpy(), val_fraction, seed, arrays.tracks)
    return Dataset(
        name=title,
        train=train.select(kept) if len(held) else train,
        val=train.select(held),
        test=_as_split(arrays.test_images, arrays.test_labels),
        class_names=arrays.class_names,
        may_be_mirrored=title not in NEVER_MIRRORED,
    )


def _as_split(images: np.ndarray, labels: np.ndarray) -> Split:
    # Copied unless writable: torch must not share memory that Python takes to be immutable.
    owned = np.require(images, dtype=np.uint8, requirements=["C", "W"])
    return Split(torch.from_numpy(owned), torch.from_numpy(labels.astype(np.int64)))


def resolve_root(root: str | os.PathLike[str] | None) -> Path:
    """The folder of the files; None is the environment's ECNN_DATA, or else `data` in the working directory."""
    return Path(os.environ.get("ECNN_DATA") or "data") if root is None else Path(root)


def _resolve_size(image_size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if image_size is None:
        return None
    sides = image_size if isinstance(image_size, tuple | list) else (image_size, image_size)
    if len(sides) != 2 or not all(
        isinstance(side, int) and not isinstance(side, bool) and 0 < side <= MOST_PIXELS for side in sides
    ):
        raise InputError(
            f"image_size must be a number of pixels or (height, width), each from 1 to {MOST_PIXELS}, not "
            f"{shown(image_size)}."
        )
    return sides[0], sides[1]


def find_folder(name: str, root: Path) -> Path | None:
    """The folder of that path, taken as it is or below the root; None if there is neither."""
    folders = (Path(name), root / name) if name else ()
    return next((folder for folder in folders if files.is_folder(folder)), None)
