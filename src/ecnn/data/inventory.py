"""Which datasets can be loaded, which files they lack, and what a folder of images holds."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ecnn import files
from ecnn.checks import check_choice
from ecnn.data.formats import read_image
from ecnn.data.loading import find_folder, resolve_root
from ecnn.data.sources import ARCHIVES, IMAGE_SUFFIXES, READERS, SIGNS_FILE, class_folders, list_classes
from ecnn.errors import InputError


@dataclass(frozen=True)
class DatasetFiles:
    """Whether a named dataset can be loaded.

    Attributes:
        where: the folder or package that it is read from.
        missing: files, or a package, that it needs and that are not there.
        fetch: addresses of the missing files, from which `load_data` downloads them.
    """

    name: str
    where: str
    missing: tuple[str, ...]
    fetch: tuple[str, ...] = ()


@dataclass(frozen=True)
class OwnImages:
    """The contents of a folder of images by class.

    Attributes:
        counts: number of images by class, in train/ and test/ together.
        sizes: number of images by (height, width).
        grey: number of grey images.
        problems: a sentence for each image that cannot be used.
        left_out: number of entries that are not used: files by suffix, and folders under "folders".
        untested: classes with too few images to hold one out for testing.
    """

    folder: str
    counts: Mapping[str, int]
    sizes: Mapping[tuple[int, int], int]
    grey: int
    problems: tuple[str, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)
    untested: tuple[str, ...] = ()


def find_datasets(root: str | os.PathLike[str] | None = None) -> list[DatasetFiles]:
    """Every named dataset, and the adversarial signs, each with the files that it lacks.

    Args:
        root: as in `load_data`.
    """
    place = resolve_root(root)
    found = []
    for name in READERS:
        if name == "digits":
            missing = () if importlib.util.find_spec("sklearn") else ("the package scikit-learn",)
            found.append(DatasetFiles(name, "scikit-learn", missing))
            continue
        if name == "gtsrb" and all(
            files.exists(place / "gtsrb" / f"{part}.npz") for part in ("train", "test")
        ):
            found.append(DatasetFiles(name, str(place / "gtsrb"), ()))
            continue
        lacking = [archive for archive in ARCHIVES[name] if archive.missing(place)]
        absent = tuple(str(archive.missing(place)) for archive in lacking)
        found.append(DatasetFiles(name, str(place), absent, tuple(archive.url for archive in lacking)))
    signs = place / SIGNS_FILE
    found.append(DatasetFiles("optprojtran", str(place), () if files.exists(signs) else (str(signs),)))
    return found


def inspect_folder(name: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> OwnImages:
    """Reads every image of a folder and reports what it holds; damaged images are listed as problems."""
    folder = find_folder(str(name), resolve_root(root))
    if folder is None:
        check_choice(f"there is no folder {str(name)!r}, and a dataset by name", str(name), READERS)
        raise InputError(f"{name} is a named dataset, not a folder of images: leave it out to see its files.")
    counts, sizes = Counter[str](), Counter[tuple[int, int]]()
    grey, problems = 0, list[str]()
    parts = class_folders(folder)
    for part in parts:
        names, paths, labels = list_classes(part)
        for path, label in zip(paths, labels, strict=True):
            try:
                picture = read_image(path)
            except InputError as error:
                problems.append(str(error))
                continue
            counts[names[label]] += 1
            sizes[picture.height, picture.width] += 1
            grey += picture.mode == "L"
    untested = () if len(parts) == 2 else tuple(name for name, count in counts.items() if count == 1)
    left_out = _count_left_out(folder, parts)
    return OwnImages(str(Path(folder)), dict(counts), dict(sizes), grey, tuple(problems), left_out, untested)


def _count_left_out(folder: Path, parts: tuple[Path, ...]) -> dict[str, int]:
    """Number of entries among the images that are not read: other files by suffix, and folders that are no class."""
    counts = Counter[str]()
    classes = {
        entry
        for part in parts
        for entry in files.entries(part)
        if files.is_folder(entry) and not entry.name.startswith(".")
    }
    for place in {folder, *parts, *classes}:
        for entry in files.entries(place):
            if entry in classes or entry in parts or entry.name.startswith("."):
                continue
            if files.is_folder(entry):
                counts["folders"] += 1
            elif place not in classes or entry.suffix.lower() not in IMAGE_SUFFIXES:
                counts[entry.suffix.lower() or "no suffix"] += 1
    return dict(sorted(counts.items()))
