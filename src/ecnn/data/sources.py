"""Where each dataset's files are, what they must contain, and how they become arrays."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ecnn import files
from ecnn.checks import check_array
from ecnn.data.datasets import hold_out
from ecnn.data.downloads import Archive, provide
from ecnn.data.formats import gunzip, header_size, read_checked, read_idx, read_images, read_pickle, resize
from ecnn.errors import InputError
from ecnn.progress import Progress

TEST_FRACTION = 0.2  # for sources without test images of their own
TEST_SEED = 0  # never the caller's seed: test images must not move between runs
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")

# SHA-256 of official files, by path below the root.
CHECKSUMS = {
    "MNIST/raw/train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "MNIST/raw/train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "MNIST/raw/t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "MNIST/raw/t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "MNIST/raw/train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "MNIST/raw/train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "MNIST/raw/t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "MNIST/raw/t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    "cifar-10-batches-py/data_batch_1": "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd",
    "cifar-10-batches-py/data_batch_2": "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8",
    "cifar-10-batches-py/data_batch_3": "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9",
    "cifar-10-batches-py/data_batch_4": "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b",
    "cifar-10-batches-py/data_batch_5": "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154",
    "cifar-10-batches-py/test_batch": "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831",
    "cifar-10-batches-py/batches.meta": "f962466ef690d46b226450fb9aadc74ba4bc64a76aa526b5827fe4bc5c7125cb",
    "cifar-100-python/train": "735e79b04f092ca3d2e6d07f368c0a7d70d48c48d28865950cc24454cf45129b",
    "cifar-100-python/test": "4b67687d9933c4db8f0831104447f15b93774f4f464bd0516f0f0f2ac83b7864",
    "cifar-100-python/meta": "a5d4786345c961390f865e93b434dbd5c6904ce880667e0cb888c97d449f28b9",
    "optprojtran/optprojtran.npz": "3cc9b290c5c67403c3fc4e668975f79deac6c27d29f89665cc326d5ce8de006c",
}

#: Path of the adversarial signs below the root.
SIGNS_FILE = "optprojtran/optprojtran.npz"


class Form(NamedTuple):
    """Sizes of a dataset, known before its files are read: numbers of images, classes, channels and pixels a side."""

    train: int
    test: int
    num_classes: int
    in_channels: int
    side: int


# Of the named datasets. If a file has no official checksum, these numbers of images are the check.
FORMS = {
    "digits": Form(1437, 360, num_classes=10, in_channels=1, side=8),
    "mnist": Form(60_000, 10_000, num_classes=10, in_channels=1, side=28),
    "cifar10": Form(50_000, 10_000, num_classes=10, in_channels=3, side=32),
    "cifar100": Form(50_000, 10_000, num_classes=100, in_channels=3, side=32),
    "gtsrb": Form(39_209, 12_630, num_classes=43, in_channels=3, side=32),
}

# For a folder of images without a given size: the largest side that is kept, and the size that replaces others.
_LARGEST_KEPT, _USUAL_SIZE = 64, (32, 32)

# Datasets in which a mirrored image belongs to another class, or to none.
NEVER_MIRRORED = ("digits", "mnist", "gtsrb")

_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_GTSRB = "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370/"
_GTSRB_TRAIN = "GTSRB/Final_Training/Images"
_GTSRB_TEST = "GTSRB/Final_Test/Images"

ARCHIVES: dict[str, tuple[Archive, ...]] = {
    "mnist": tuple(
        Archive(_MNIST + Path(relative).name, sha256, "MNIST/raw", (relative,), unpack=False)
        for relative, sha256 in CHECKSUMS.items()
        if relative.endswith(".gz")
    ),
    "cifar10": (
        Archive(
            _CIFAR + "cifar-10-python.tar.gz",
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            ".",
            tuple(relative for relative in CHECKSUMS if relative.startswith("cifar-10-")),
        ),
    ),
    "cifar100": (
        Archive(
            _CIFAR + "cifar-100-python.tar.gz",
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            ".",
            tuple(relative for relative in CHECKSUMS if relative.startswith("cifar-100-")),
        ),
    ),
    "gtsrb": (
        Archive(
            _GTSRB + "GTSRB_Final_Training_Images.zip",
            "d32ac4b5fa9a1cbd1994768413902e8193599d9434cf0a8eb9cfd00a6d3a290c",
            ".",
            (f"{_GTSRB_TRAIN}/00042/GT-00042.csv",),
        ),
        Archive(
            _GTSRB + "GTSRB_Final_Test_Images.zip",
            "48ba6fab7e877eb64eaf8de99035b0aaecfbc279bee23e35deca4ac1d0a837fa",
            ".",
            (f"{_GTSRB_TEST}/00000.ppm",),
        ),
        Archive(
            _GTSRB + "GTSRB_Final_Test_GT.zip",
            "f94e5a7614d75845c74c04ddb26b8796b9e483f43541dd95dd5b726504e16d6d",
            _GTSRB_TEST,
            (f"{_GTSRB_TEST}/GT-final_test.csv",),
        ),
    ),
}

_GTSRB_NAMES = (
    *(f"speed limit {limit}" for limit in (20, 30, 50, 60, 70, 80)),
    *(
        "end of speed limit 80",
        "speed limit 100",
        "speed limit 120",
        "no overtaking",
        "no overtaking by lorries",
    ),
    *(
        "priority at next crossing",
        "priority road",
        "give way",
        "stop",
        "no vehicles",
        "no lorries",
        "no entry",
    ),
    *("danger", "bend to the left", "bend to the right", "double bend", "bumpy road", "slippery road"),
    *("road narrows on the right", "road works", "traffic lights", "pedestrians", "children", "bicycles"),
    *("ice or snow", "wild animals", "end of all limits", "turn right", "turn left", "ahead only"),
    *("ahead or right", "ahead or left", "keep right", "keep left", "roundabout", "end of no overtaking"),
    "end of no overtaking by lorries",
)


_TEN_DIGITS = tuple("0123456789")

#: Class names of datasets whose classes never change, for models that were saved without a list of names.
CLASS_NAMES: dict[str, tuple[str, ...]] = {
    "digits": _TEN_DIGITS,
    "mnist": _TEN_DIGITS,
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "gtsrb": _GTSRB_NAMES,
}


@dataclass(frozen=True)
class Request:
    """The caller's options, passed to every reader."""

    root: Path
    image_size: tuple[int, int] | None
    download: bool
    progress: Progress | None


@dataclass(frozen=True)
class Arrays:
    """A dataset as it was read: images (image, channel, height, width) uint8, labels (image,) whole numbers.

    `tracks` (image,) numbers the training images. Those of a class with the same number must not be split between
    training and validation. It is None if all images may be.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    class_names: tuple[str, ...]
    tracks: np.ndarray | None = None


def read_digits(request: Request) -> Arrays:
    """scikit-learn's own 8x8 digits, which need no files."""
    images, labels, train, test = _embedded_digits()
    images = resize(images, request.image_size, request.progress)
    return Arrays(images[train], labels[train], images[test], labels[test], _TEN_DIGITS)


@functools.cache
def _embedded_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images, labels, indices of training and of test images; cached, as one task of an experiment asks ten times."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise InputError("digits come with scikit-learn, which is not installed: install it.") from error
    digits = load_digits()
    images = np.rint(digits.images * 255 / 16).astype(np.uint8)[:, None]
    labels = digits.target.astype(np.int64)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=TEST_FRACTION, stratify=labels, random_state=TEST_SEED
    )
    return images, labels, np.sort(train), np.sort(test)


def read_mnist(request: Request) -> Arrays:
    """MNIST from its four idx files, compressed or not."""
    provide("mnist", ARCHIVES["mnist"], request.root, request.download, request.progress)
    arrays = []
    for part in ("train", "t10k"):
        images = _read_mnist_file(request.root, f"{part}-images-idx3-ubyte", ndim=3)
        labels = _read_mnist_file(request.root, f"{part}-labels-idx1-ubyte", ndim=1)
        arrays += [resize(images[:, None], request.image_size, request.progress), labels]
    return Arrays(arrays[0], arrays[1], arrays[2], arrays[3], _TEN_DIGITS)


def _read_mnist_file(root: Path, file_name: str, ndim: int) -> np.ndarray:
    relative = f"MNIST/raw/{file_name}"
    if files.exists(root / relative):
        content = read_checked(root / relative, CHECKSUMS.get(relative))
        return read_idx(content, root / relative, ndim)
    packed = root / f"{relative}.gz"
    content = gunzip(read_checked(packed, CHECKSUMS.get(f"{relative}.gz")), packed)
    return read_idx(content, packed, ndim)


def read_cifar10(request: Request) -> Arrays:
    """CIFAR-10 from the five training batches and the test batch of the Python version."""
    provide("cifar10", ARCHIVES["cifar10"], request.root, request.download, request.progress)
    batches = [
        _read_cifar_file(request, f"cifar-10-batches-py/data_batch_{number}", "labels")
        for number in range(1, 6)
    ]
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    test_images, test_labels = _read_cifar_file(request, "cifar-10-batches-py/test_batch", "labels")
    names = _read_cifar_names(request.root, "cifar-10-batches-py/batches.meta", "label_names")
    return Arrays(images, labels, test_images, test_labels, names)


def read_cifar100(request: Request) -> Arrays:
    """CIFAR-100 with its fine classes, from the Python version."""
    provide("cifar100", ARCHIVES["cifar100"], request.root, request.download, request.progress)
    train = _read_cifar_file(request, "cifar-100-python/train", "fine_labels")
    test = _read_cifar_file(request, "cifar-100-python/test", "fine_labels")
    return Arrays(*train, *test, _read_cifar_names(request.root, "cifar-100-python/meta", "fine_label_names"))


def _read_cifar_file(request: Request, relative: str, labels_key: str) -> tuple[np.ndarray, np.ndarray]:
    path = request.root / relative
    entries = read_pickle(read_checked(path, CHECKSUMS.get(relative)), path, ("data", labels_key))
    pixels, labels = entries["data"], entries[labels_key]
    check_array(f"{path}: data", pixels, "image", 3072, dtype="uint8")
    if (
        not isinstance(labels, list)
        or len(labels) != len(pixels)
        or not all(isinstance(label, int) and 0 <= label < 100 for label in labels)
    ):
        raise InputError(f"{path} should hold {len(pixels)} labels, one per image, each from 0 to 99.")
    images = pixels.reshape(-1, 3, 32, 32)
    return resize(images, request.image_size, request.progress), np.array(labels, dtype=np.int64)


def _read_cifar_names(root: Path, relative: str, key: str) -> tuple[str, ...]:
    path = root / relative
    names = read_pickle(read_checked(path, CHECKSUMS.get(relative)), path, (key,))[key]
    if not isinstance(names, list) or not all(isinstance(name, bytes | str) for name in names):
        raise InputError(f"{path} should hold a list of class names.")
    return tuple(name.decode("latin1") if isinstance(name, bytes) else name for name in names)


def read_gtsrb(request: Request) -> Arrays:
    """GTSRB from 32x32 .npz files if they are there and that size is wanted, else from the official folders."""
    size = request.image_size or (32, 32)
    packed = [request.root / "gtsrb" / f"{part}.npz" for part in ("train", "test")]
    if size == (32, 32) and any(files.exists(path) for path in packed):
        train = _read_gtsrb_npz(packed[0], ("x", "y", "track"))
        test = _read_gtsrb_npz(packed[1], ("x", "y"))
        return Arrays(train["x"], train["y"], test["x"], test["y"], _GTSRB_NAMES, train["track"])
    provide("gtsrb", ARCHIVES["gtsrb"], request.root, request.download, request.progress)
    rows = []
    for label in range(len(_GTSRB_NAMES)):
        rows += _read_gtsrb_csv(request.root / _GTSRB_TRAIN / f"{label:05d}" / f"GT-{label:05d}.csv")
    try:
        tracks = np.array([int(path.name.split("_")[0]) for path, _ in rows])
    except ValueError as error:
        raise InputError(
            f"{request.root / _GTSRB_TRAIN} should hold files named track_frame.ppm, like 00000_00012.ppm."
        ) from error
    test_rows = _read_gtsrb_csv(request.root / _GTSRB_TEST / "GT-final_test.csv")
    # Counted before the images are read: half an archive should not cost minutes.
    check_sizes("gtsrb", len(rows), len(test_rows))
    images = read_images([path for path, _ in rows + test_rows], image_size=size, progress=request.progress)
    labels = np.array([label for _, label in rows + test_rows])
    cut = len(rows)
    return Arrays(images[:cut], labels[:cut], images[cut:], labels[cut:], _GTSRB_NAMES, tracks)


def _read_gtsrb_npz(path: Path, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    arrays = files.read_npz(path, keys=keys)
    images = arrays["x"]
    check_array(f"{path}: x", images, "image", 32, 32, 3, dtype="uint8")
    for key in keys[1:]:
        check_array(f"{path}: {key}", arrays[key], len(images), dtype="whole numbers")
    arrays["x"] = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    return arrays


def _read_gtsrb_csv(path: Path) -> list[tuple[Path, int]]:
    """Image files and their classes, in the order of an official annotation file."""
    content = files.read_bytes(path)
    try:
        lines = io.StringIO(content.decode(), newline="")
        rows = [(row["Filename"], int(row["ClassId"])) for row in csv.DictReader(lines, delimiter=";")]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise InputError(f"{path} should have columns Filename and ClassId separated by ;.") from error
    for name, _ in rows:
        if not name or Path(name).name != name:
            raise InputError(f"{path} names the file {name!r}, which is not a plain file name.")
    return [(path.parent / name, label) for name, label in rows]


def read_folder(folder: Path, request: Request) -> Arrays:
    """Images from folder/train/<class>/* and folder/test/<class>/*, or from folder/<class>/*.

    In the second case a fifth of each class is drawn for testing. Classes are numbered in the order of their names.
    """
    parts = class_folders(folder)
    if len(parts) == 2:
        train_folder, test_folder = parts
        names, train_paths, train_labels = list_classes(train_folder)
        test_names, test_paths, test_labels = list_classes(test_folder)
        if names != test_names:
            odd = sorted(set(names) ^ set(test_names))[0]
            raise InputError(
                f"{train_folder} and {test_folder} differ: only one of them has a class {odd!r}."
            )
        images = read_images(
            train_paths + test_paths, image_size=request.image_size, progress=request.progress
        )
        cut = len(train_paths)
        return Arrays(images[:cut], np.array(train_labels), images[cut:], np.array(test_labels), names)
    names, paths, listed = list_classes(folder)
    images = read_images(paths, image_size=request.image_size, progress=request.progress)
    labels = np.array(listed)
    train, test = hold_out(labels, TEST_FRACTION, TEST_SEED)
    return Arrays(images[train], labels[train], images[test], labels[test], names)


def usual_size(folder: Path) -> tuple[int, int] | None:
    """Default (height, width) for a folder's images: None, to keep it, if all have one small size, else 32 x 32."""
    sizes = {header_size(path) for part in class_folders(folder) for path in list_classes(part)[1]} - {None}
    is_small = all(size is not None and max(size) <= _LARGEST_KEPT for size in sizes)
    return None if len(sizes) <= 1 and is_small else _USUAL_SIZE


def class_folders(folder: Path) -> tuple[Path, ...]:
    """The folders that hold the class folders: train and test if there are both, else the folder itself."""
    parts = (folder / "train", folder / "test")
    return parts if all(files.is_folder(part) for part in parts) else (folder,)


def list_classes(folder: Path) -> tuple[tuple[str, ...], list[Path], list[int]]:
    """Names of the classes, all image files, and the class number of each file."""
    classes = [
        entry for entry in files.entries(folder) if files.is_folder(entry) and not entry.name.startswith(".")
    ]
    if len(classes) < 2:
        raise InputError(
            f"{folder} should hold at least 2 folders of images, one per class (or a folder train and a folder test of "
            f"such folders), not {len(classes)}."
        )
    paths: list[Path] = []
    labels: list[int] = []
    for label, entry in enumerate(classes):
        found = [path for path in files.entries(entry) if not path.name.startswith(".")]
        own = [path for path in found if path.suffix.lower() in IMAGE_SUFFIXES]
        if not own and any(files.is_folder(path) for path in found):
            raise InputError(
                f"{entry} holds folders in place of images: put images directly into the folder of their class, or "
                "into such folders below two folders that are called train and test."
            )
        if not own:
            raise InputError(
                f"{entry} has no image ({', '.join(IMAGE_SUFFIXES)}): add some or remove the folder."
            )
        paths += own
        labels += [label] * len(own)
    return tuple(entry.name for entry in classes), paths, labels


def note_on_order(names: Sequence[str]) -> str | None:
    """A warning if class names are numbers whose order as text is another ("10" comes before "2"); else None."""
    if not all(name.isascii() and name.isdecimal() for name in names):
        return None
    for number, (name, other) in enumerate(zip(names, sorted(names, key=int), strict=True)):
        if name != other:
            return (
                f"classes are numbered in the order of their names as text: {name!r} is class {number}; call them 00, "
                "01, ... to have them in the order of numbers"
            )
    return None


def check_sizes(name: str, train: int, test: int) -> None:
    """Raises InputError unless a named dataset has all of its images; other names are not checked."""
    form = FORMS.get(name)
    if form is not None and (train, test) != (form.train, form.test):
        raise InputError(
            f"{name} should have {form.train} training and {form.test} test images, not {train} and {test}: "
            "some files are missing or were altered; delete them and fetch them again."
        )


READERS: dict[str, Callable[[Request], Arrays]] = {
    "digits": read_digits,
    "mnist": read_mnist,
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
    "gtsrb": read_gtsrb,
}
