"""Datasets: splits, readers of every format with true and hostile files, downloads, augmentation."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import os
import pickle
import struct
import sys
import tarfile
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from conftest import DATA
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ecnn import files
from ecnn.backbones import ResNet
from ecnn.data import (
    NAMES,
    AdversarialSigns,
    Augmentation,
    Dataset,
    Split,
    downloads,
    load_adversarial_signs,
    load_data,
    sources,
)
from ecnn.data.datasets import hold_out
from ecnn.data.formats import read_idx, read_images, read_pickle
from ecnn.data.inventory import inspect_folder
from ecnn.errors import InputError
from ecnn.training import fit

MNIST_FILES = [
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
]


def refused(sentence: str) -> Any:
    return pytest.raises(InputError, match=sentence)


def split_of(labels: list[int], size: int = 4) -> Split:
    rng = np.random.default_rng(len(labels))
    images = rng.integers(0, 256, (len(labels), 3, size, size), dtype=np.uint8)
    return Split(torch.from_numpy(images), torch.tensor(labels, dtype=torch.int64))


# Split and Dataset


def test_a_split_gives_batches_in_unit_range() -> None:
    split = split_of([0, 1, 2, 1])
    images, labels = split[1:3]
    assert images.dtype == torch.float32
    assert torch.equal(images, split.images[1:3].float() / 255)
    assert labels.tolist() == [1, 2]
    one, label = split[-1]
    assert one.shape == (1, 3, 4, 4)
    assert label.tolist() == [1]
    picked, labels = split[torch.tensor([2, 0])]
    assert torch.equal(picked * 255, split.images[[2, 0]].float())
    assert labels.tolist() == [2, 0]
    assert sum(len(batch) for batch, _ in iter(split)) == len(split) == 4
    with pytest.raises(IndexError):
        split[4]
    white = Split(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    assert white[0][0].max().item() == 1.0


def test_parts_of_a_split() -> None:
    split = split_of([0, 1, 2, 1])
    assert split.take(None) is split
    assert torch.equal(split.take(2).images, split.images[:2])
    assert len(split.take(9)) == 4
    assert split.select(np.array([3, 0])).labels.tolist() == [1, 0]
    assert len(split.select(torch.tensor([]))) == len(split.take(0)) == 0
    assert split.to("cpu").labels.tolist() == [0, 1, 2, 1]
    assert repr(split) == "Split(4 images of 3x4x4)"
    for limit in (-1, 1.5, True):
        with refused("limit must be"):
            split.take(limit)  # type: ignore[arg-type]
    with refused(r"indices must lie in 0\.\.3, not 0\.\.4"):
        split.select(torch.tensor([0, 4]))
    with refused("whole numbers, not torch.float32"):
        split.select(torch.tensor([0.5]))


def test_images_that_bytes_would_round_stay_float_and_are_not_trained_on() -> None:
    images = torch.rand(3, 3, 4, 4)
    split = Split(images, torch.tensor([0, 1, 2]))
    assert torch.equal(split.select(torch.tensor([2, 0])).take(1)[:][0], images[2:])
    with refused("the test images must be bytes"):
        Dataset("toy", split_of([0, 1, 2]), split_of([1]), split, ("a", "b", "c"))
    with refused("training images must be bytes"):
        fit(ResNet(3, depth=8, width=2), split, val=None, recipe="small", seed=0)


@pytest.mark.parametrize(
    ("images", "labels", "sentence"),
    [
        (
            torch.zeros(2, 1, 4, 4, dtype=torch.float64),
            torch.zeros(2, dtype=torch.int64),
            r"torch.uint8 or torch.float32 of shape .* not torch.float64",
        ),
        (torch.full((1, 1, 2, 2), 2.0), torch.tensor([0]), "must lie in \\[0, 1\\]"),
        (torch.full((1, 1, 2, 2), 255.0), torch.tensor([0]), "from 255 to 255: divide them by 255"),
        (torch.full((1, 1, 2, 2), -1.0), torch.tensor([0]), "before they were normalised.*ecnn.Normalized"),
        (
            torch.zeros(1, 2, 2),
            torch.tensor([0]),
            r"float32 of shape \(image, .*\), not of shape \(1, 2, 2\)",
        ),
        (
            torch.zeros(1, 1, 2, 2).to_sparse(),
            torch.tensor([0]),
            "images must be an ordinary tensor.*to_dense",
        ),
        (torch.full((1, 1, 2, 2), torch.nan), torch.tensor([0]), "must lie in \\[0, 1\\]"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), r"shape \(2, 4, 4\)"),
        (
            np.zeros((2, 1, 4, 4), np.uint8),
            torch.zeros(2, dtype=torch.int64),
            "not uint8 of shape",
        ),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2), "torch.int64 of shape"),
        (
            torch.zeros(2, 1, 4, 4, dtype=torch.uint8),
            torch.zeros(3, dtype=torch.int64),
            r"of shape \(3,\)",
        ),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, -1]), "0 or more, not -1"),
        (torch.zeros(2, 1, 0, 4, dtype=torch.uint8), torch.tensor([0, 1]), "at least one channel"),
    ],
)
def test_bad_splits_are_refused(images: Any, labels: Any, sentence: str) -> None:
    with refused(sentence):
        Split(images, labels)


def test_a_dataset_knows_its_shape_and_its_mean() -> None:
    data = Dataset("toy", split_of([0, 1, 2, 0]), split_of([1]), split_of([2, 2]), ("a", "b", "c"))
    assert (data.num_classes, data.in_channels, data.image_size) == (3, 3, (4, 4))
    expected = data.train.images.double().mean(dim=0) / 255
    assert data.mean_image.dtype == torch.float32
    assert torch.equal(data.mean_image, expected.float())
    assert torch.equal(data.to("cpu").mean_image, data.mean_image)


def test_the_fingerprint_is_about_every_image_label_and_split() -> None:
    train, val, test = split_of([0, 1, 2, 0]), split_of([1]), split_of([2, 2])
    data = Dataset("toy", train, val, test, ("a", "b", "c"))
    same = Dataset("other name", train.take(4), val.to("cpu"), test, ("x", "y", "z"))
    assert data.fingerprint == same.fingerprint
    assert len(data.fingerprint) == 64
    changed = train.images.clone()
    changed[3, 2, 3, 3] ^= 1
    others = [
        Dataset("toy", Split(changed, train.labels), val, test, ("a", "b", "c")),
        Dataset("toy", Split(train.images, torch.tensor([0, 1, 2, 1])), val, test, ("a", "b", "c")),
        Dataset("toy", train, test, val, ("a", "b", "c")),
        Dataset("toy", train, val.take(0), test, ("a", "b", "c")),
    ]
    assert len({data.fingerprint, *(other.fingerprint for other in others)}) == 5


@pytest.mark.parametrize(
    ("train", "test", "names", "sentence"),
    [
        ([0, 2], [1], ("a", "b", "c"), r"class 1 \(b\) has no training image"),
        ([0, 0], [0], ("a",), "num_classes must be a whole number from 2 up, not 1"),
        ([0, 1], [2], ("a", "b"), r"test split has a label 2, but the 2 classes are 0\.\.1"),
        ([], [0], ("a", "b"), r"class 0 \(a\) has no training image"),
    ],
)
def test_bad_datasets_are_refused(
    train: list[int], test: list[int], names: tuple[str, ...], sentence: str
) -> None:
    with refused(sentence):
        Dataset("toy", split_of(train), split_of([]), split_of(test), names)


def test_splits_of_one_dataset_have_one_image_size() -> None:
    with refused(r"test images have shape \(3, 5, 5\) but the train images \(3, 4, 4\)"):
        Dataset("toy", split_of([0, 1]), split_of([]), split_of([0], size=5), ("a", "b"))


# Holding out


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 9),
)
def test_hold_out_takes_the_rounded_fraction_of_every_class(
    labels: list[int], fraction: float, seed: int
) -> None:
    array = np.array(labels)
    kept, held = hold_out(array, fraction, seed)
    assert sorted([*kept, *held]) == list(range(len(labels)))
    assert [*held] == sorted(held)
    for label in set(labels):
        count = labels.count(label)
        expected = min(max(round(fraction * count), 1), count - 1) if fraction else 0
        assert (array[held] == label).sum() == expected
    again = hold_out(array, fraction, seed)
    assert np.array_equal(again[1], held)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=60), st.integers(0, 9))
def test_hold_out_never_cuts_a_group(pairs: list[tuple[int, int]], seed: int) -> None:
    labels, groups = (np.array(column) for column in zip(*pairs, strict=True))
    kept, held = hold_out(labels, 0.3, seed, groups)
    assert not {pairs[i] for i in kept} & {pairs[i] for i in held}
    for label in set(labels.tolist()):
        tracks = len({pair for pair in pairs if pair[0] == label})
        assert len({pairs[i] for i in held if labels[i] == label}) == min(
            max(round(0.3 * tracks), 1), tracks - 1
        )


def test_seeds_hold_out_different_images() -> None:
    labels = np.repeat(np.arange(3), 40)
    assert not np.array_equal(hold_out(labels, 0.2, 0)[1], hold_out(labels, 0.2, 1)[1])


# digits


def test_digits_are_whole_and_their_test_split_is_fixed() -> None:
    data = load_data("digits")
    assert (len(data.train), len(data.val), len(data.test)) == (1295, 142, 360)
    assert (data.in_channels, data.image_size, data.class_names) == (1, (8, 8), tuple("0123456789"))
    assert torch.bincount(data.test.labels).tolist() == [36, 36, 35, 37, 36, 37, 36, 36, 35, 36]
    values = torch.cat([part.images.flatten() for part in (data.train, data.val, data.test)])
    assert sorted(set(values.tolist())) == [round(value * 255 / 16) for value in range(17)]
    other = load_data("digits", seed=1)
    assert torch.equal(data.test.images, other.test.images)
    assert not torch.equal(data.val.labels, other.val.labels) or not torch.equal(
        data.val.images, other.val.images
    )
    # Fixed for all time: reports name the images they are about.
    assert data.fingerprint == "15965d2d8bb12263cae0bceeadb55ecff56cd19cb6c1125f0f1e2d96b1e1ebce"


def test_no_validation_and_another_size() -> None:
    data = load_data("digits", val_fraction=0, image_size=(10, 12))
    assert (len(data.train), len(data.val)) == (1437, 0)
    assert data.val.images.shape == (0, 1, 10, 12)
    original = load_data("digits", val_fraction=0).train.images[5, 0].numpy()
    by_pillow = np.asarray(Image.fromarray(original).resize((12, 10), Image.Resampling.BILINEAR))
    assert np.array_equal(data.train.images[5, 0].numpy(), by_pillow)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"val_fraction": 1.0}, "val_fraction"),
        ({"val_fraction": -0.1}, "val_fraction"),
        ({"val_fraction": float("nan")}, "val_fraction"),
        ({"val_fraction": "0.1"}, "val_fraction"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"image_size": 0}, "image_size"),
        ({"image_size": (8, 8, 3)}, "image_size"),
        ({"image_size": "32"}, "image_size"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with refused(f"{sentence} must be"):
        load_data("digits", **options)


def test_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    assert NAMES == ("digits", "mnist", "cifar10", "cifar100", "gtsrb")
    known = "digits, mnist, cifar10, cifar100, gtsrb"
    with refused(rf"must be one of {known}, not 'CIFAR-10'; did you mean 'cifar10'\?"):
        load_data("CIFAR-10", tmp_path)
    with refused("load_adversarial_signs"):
        load_data("optprojtran", tmp_path)
    for name in ("", "no/such/folder"):
        with refused("and a dataset by name must be one of digits"):
            load_data(name, tmp_path)


# MNIST


def idx(array: np.ndarray) -> bytes:
    return (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def write_mnist(root: Path, packed: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    arrays = {}
    for part, count in (("train", 40), ("t10k", 20)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (count, 28, 28))
        arrays[f"{part}-labels-idx1-ubyte"] = np.arange(count) % 10
    for name, array in arrays.items():
        content = idx(array)
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return arrays


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("unofficial")
def test_mnist_files(tmp_path: Path, packed: bool) -> None:
    arrays = write_mnist(tmp_path, packed)
    data = load_data("mnist", tmp_path, val_fraction=0, download=False)
    assert np.array_equal(data.train.images[:, 0].numpy(), arrays["train-images-idx3-ubyte"])
    assert np.array_equal(data.test.labels.numpy(), arrays["t10k-labels-idx1-ubyte"])
    assert len(load_data("mnist", tmp_path, val_fraction=0.25, download=False).val) == 10


def test_unofficial_mnist_files_fail_their_checksum(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    with refused("train-images-idx3-ubyte is not the official file: .* truncated or altered"):
        load_data("mnist", tmp_path, download=False)


@pytest.mark.usefixtures("unofficial")
def test_a_dataset_with_too_few_images_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path)
    monkeypatch.setitem(sources.FORMS, "mnist", sources.Form(60_000, 10_000, 10, 1, 28))
    with refused("should have 60000 training and 10000 test images, not 40 and 20"):
        load_data("mnist", tmp_path, download=False)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "starts with  instead of 00000803"),
        (idx(np.zeros((2, 2)))[:-1], "starts with 00000802"),
        (b"\x1f\x8b\x08\x08", "starts with 1f8b0808"),
        (idx(np.zeros((2, 2, 2)))[:15], "16 bytes before its values"),
        (idx(np.zeros((2, 2, 2)))[:-1], "promises 2 x 2 x 2 values but holds 7"),
        (idx(np.zeros((2, 2, 2))) + b"0", "promises 2 x 2 x 2 values but holds 9"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "promises 4294967295 x"),
    ],
)
def test_bad_idx_files_are_refused(content: bytes, sentence: str) -> None:
    with refused(sentence):
        read_idx(content, Path("some-idx3-ubyte"), 3)


@pytest.mark.usefixtures("unofficial")
def test_cut_gzip_files_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=True)
    path = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz"
    for content in (path.read_bytes()[:-20], b"not gzip at all", b""):
        path.write_bytes(content)
        with refused("t10k-images-idx3-ubyte.gz is not a"):
            load_data("mnist", tmp_path, download=False)


# CIFAR


def write_cifar(root: Path, fine: bool) -> np.ndarray:
    rng = np.random.default_rng(0)
    folder = root / ("cifar-100-python" if fine else "cifar-10-batches-py")
    folder.mkdir(parents=True)
    classes, key = (100, b"fine_labels") if fine else (10, b"labels")
    names = ["train", "test"] if fine else [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
    pixels = rng.integers(0, 256, (len(names), classes, 3072), dtype=np.uint8)
    for name, rows in zip(names, pixels, strict=True):
        content = {b"data": rows, key: list(range(classes)), b"filenames": [b"x"] * classes}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    meta = {b"fine_label_names" if fine else b"label_names": [b"class %d" % n for n in range(classes)]}
    (folder / ("meta" if fine else "batches.meta")).write_bytes(pickle.dumps(meta, protocol=2))
    return pixels


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.usefixtures("unofficial")
def test_cifar_files(tmp_path: Path, fine: bool) -> None:
    pixels = write_cifar(tmp_path, fine)
    data = load_data("cifar100" if fine else "cifar10", tmp_path, val_fraction=0, download=False)
    classes = 100 if fine else 10
    assert data.class_names[:2] == ("class 0", "class 1")
    assert data.num_classes == classes
    assert np.array_equal(data.train.images.numpy().reshape(-1, 3072), pixels[:-1].reshape(-1, 3072))
    assert np.array_equal(data.test.images.numpy().reshape(-1, 3072), pixels[-1])
    assert data.train.labels.tolist() == list(range(classes)) * (len(pixels) - 1)


class Attack:
    """What an attacker would pickle: unpickling it the usual way runs a command."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.usefixtures("unofficial")
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_does_not_run(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "ran"
    for function, arguments in (
        (os.system, (f"touch {marker}",)),
        (eval, (f"open({str(marker)!r}, 'w')",)),
        (Path.touch, (marker,)),
        (np.save, (str(marker), 1)),
    ):
        write_cifar(tmp_path / function.__name__, fine=False)
        path = tmp_path / function.__name__ / "cifar-10-batches-py" / "data_batch_1"
        attack = {b"data": Attack(function, *arguments), b"labels": []}
        path.write_bytes(pickle.dumps(attack, protocol=protocol))
        with refused("data_batch_1 is refused .*: it asks for .*, which no dataset needs"):
            load_data("cifar10", tmp_path / function.__name__, download=False)
        assert not list(tmp_path.glob("ran*"))
    pickle.loads(path.read_bytes())  # noqa: S301 shows that the file was armed
    assert list(tmp_path.glob("ran*"))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (b"", "is refused"),
        (b"\x80\x02garbage", "is refused"),
        (pickle.dumps([1, 2]), 'has no entry "data"'),
        (pickle.dumps({b"labels": []}), 'has no entry "data"'),
        (pickle.dumps({"data": 1})[:-1], "is refused"),
        (b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00zip\x86R.", "is refused"),
        (b"\x80\x02Nr\xff\xff\xff\x1f.", "LONG_BINPUT asks for more memory"),  # 4 GB by 9 bytes
        (b"\x80\x05\x96\xff\xff\xff\xff\x0f\x00\x00\x00.", "is refused"),
        (b"cnumpy\nndarray\n(I9999999999\ntR.", "is refused"),
        (b"cnumpy\ndtype\n(X\x05\x00\x00\x00S9999tR.", "an array of 'S9999'"),
        (
            pickle.dumps({"data": [np.zeros(1)] * 16 + [np.zeros(1) for _ in range(17)]}),
            "more than 16 arrays",
        ),
    ],
)
def test_damaged_pickles_are_refused(value: bytes, sentence: str) -> None:
    with refused(sentence) as caught:
        read_pickle(value, Path("data_batch_1"), ("data",))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("unofficial")
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {b"data": np.zeros((2, 3071), np.uint8), b"labels": [0, 1]},
            r"data must be uint8 of shape \(image, 3072\)",
        ),
        ({b"data": np.zeros((2, 3072)), b"labels": [0, 1]}, r"data must be uint8 of shape \(image, 3072\)"),
        ({b"data": "text", b"labels": [0, 1]}, r"data must be uint8 of shape \(image, 3072\)"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}, "2 labels"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, -1]}, "from 0 to 99"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, "1"]}, "from 0 to 99"),
    ],
)
def test_cifar_files_of_another_shape_are_refused(
    tmp_path: Path, content: dict[bytes, Any], sentence: str
) -> None:
    write_cifar(tmp_path, fine=False)
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps(content, protocol=2))
    with refused(sentence):
        load_data("cifar10", tmp_path, download=False)


# GTSRB and the adversarial signs


def write_gtsrb_npz(root: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(43, dtype=np.uint8), 6)
    arrays: dict[str, np.ndarray] = {
        "x": rng.integers(0, 256, (len(labels), 32, 32, 3), dtype=np.uint8),
        "y": labels,
        "track": np.tile(np.repeat(np.arange(3, dtype=np.int16), 2), 43),
    }
    (root / "gtsrb").mkdir(parents=True)
    np.savez(root / "gtsrb" / "train.npz", **arrays)  # type: ignore[arg-type]
    np.savez(root / "gtsrb" / "test.npz", x=arrays["x"][::6], y=labels[::6])
    return arrays


@pytest.mark.usefixtures("unofficial")
def test_gtsrb_npz_files(tmp_path: Path) -> None:
    arrays = write_gtsrb_npz(tmp_path)
    data = load_data("gtsrb", tmp_path, val_fraction=0.3, download=False)
    assert (len(data.train), len(data.val), len(data.test)) == (172, 86, 43)
    assert data.num_classes == len(set(data.class_names)) == 43
    assert (data.class_names[13], data.class_names[14], data.class_names[17]) == (
        "give way",
        "stop",
        "no entry",
    )
    whole = load_data("gtsrb", tmp_path, val_fraction=0, download=False)
    assert np.array_equal(whole.train.images.numpy(), arrays["x"].transpose(0, 3, 1, 2))
    # Another size cannot come from 32x32 images, and the official folders are not there.
    with refused(r"gtsrb needs .*00042.* is not there"):
        load_data("gtsrb", tmp_path, image_size=48, download=False)
    (tmp_path / "gtsrb" / "test.npz").unlink()
    with refused("cannot read .*test.npz: No such file"):
        load_data("gtsrb", tmp_path, download=False)


def write_gtsrb_folders(root: Path) -> dict[tuple[int, int, int], np.ndarray]:
    rng = np.random.default_rng(0)
    pictures = {}
    for label in range(43):
        folder = root / "GTSRB" / "Final_Training" / "Images" / f"{label:05d}"
        folder.mkdir(parents=True)
        lines = ["Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"]
        for track in range(2):
            for frame in range(2):
                pixels = rng.integers(0, 256, (6, 5, 3), dtype=np.uint8)
                pictures[label, track, frame] = pixels
                Image.fromarray(pixels).save(folder / f"{track:05d}_{frame:05d}.ppm")
                lines.append(f"{track:05d}_{frame:05d}.ppm;5;6;0;0;4;5;{label}")
        (folder / f"GT-{label:05d}.csv").write_text("\n".join(lines) + "\n")
    folder = root / "GTSRB" / "Final_Test" / "Images"
    folder.mkdir(parents=True)
    for number in range(3):
        Image.fromarray(pictures[number, 0, 0]).save(folder / f"{number:05d}.ppm")
    rows = "".join(f"{number:05d}.ppm;5;6;0;0;4;5;{number}\n" for number in range(3))
    (folder / "GT-final_test.csv").write_text(
        "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId\n" + rows
    )
    return pictures


@pytest.mark.usefixtures("unofficial")
def test_official_gtsrb_folders(tmp_path: Path) -> None:
    pictures = write_gtsrb_folders(tmp_path)
    steps: list[tuple[int, int, str]] = []
    data = load_data(
        "gtsrb", tmp_path, val_fraction=0.5, download=False, progress=lambda *step: steps.append(step)
    )
    assert steps[-1] == (175, 175, "images read")
    assert (len(data.train), len(data.val), len(data.test)) == (86, 86, 3)
    resized = np.asarray(Image.fromarray(pictures[2, 0, 0]).resize((32, 32), Image.Resampling.BILINEAR))
    assert np.array_equal(data.test.images[2].permute(1, 2, 0).numpy(), resized)
    # At the files' own size nothing is resampled, so every image can be told apart and its track looked up.
    exact = load_data("gtsrb", tmp_path, val_fraction=0.5, image_size=(6, 5), download=False)
    names = {pixels.transpose(2, 0, 1).tobytes(): name for name, pixels in pictures.items()}
    tracks = [
        {names[image.numpy().tobytes()][:2] for image in split.images} for split in (exact.train, exact.val)
    ]
    assert not tracks[0] & tracks[1]
    assert [len(part) for part in tracks] == [43, 43]


@pytest.mark.usefixtures("unofficial")
def test_pipes_and_devices_are_no_images(tmp_path: Path) -> None:
    """Neither waits for ever nor reads without end."""
    os.mkfifo(tmp_path / "x.png")
    (tmp_path / "y.png").symlink_to("/dev/zero")
    for name, sentence in (("x.png", "it is a pipe"), ("y.png", "it is a device")):
        with refused(sentence):
            read_images([tmp_path / name], image_size=None)


@pytest.mark.usefixtures("unofficial")
def test_bad_gtsrb_folders_are_refused(tmp_path: Path) -> None:
    write_gtsrb_folders(tmp_path)
    folder = tmp_path / "GTSRB" / "Final_Training" / "Images" / "00007"
    table = folder / "GT-00007.csv"
    good = table.read_text()
    for content, sentence in (
        (good.replace("00000_00001.ppm", "../../escape.ppm"), "not a plain file name"),
        (good.replace("00000_00001.ppm", "noframe.ppm"), "track_frame.ppm"),
        (good.replace(";", ","), "columns Filename and ClassId"),
        (good.replace(";7\n", ";seven\n"), "columns Filename and ClassId"),
        (good.replace("00001_00001.ppm", "00009_00000.ppm"), "cannot read .*00009_00000.ppm: No such file"),
    ):
        table.write_text(content)
        with refused(sentence):
            load_data("gtsrb", tmp_path, download=False)
    table.unlink()
    with refused("cannot read .*GT-00007.csv"):
        load_data("gtsrb", tmp_path, download=False)


def test_half_of_gtsrb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    write_gtsrb_folders(tmp_path)
    with refused("should have 39209 training and 12630 test images, not 172 and 3"):
        load_data("gtsrb", tmp_path, download=False)


@pytest.mark.usefixtures("unofficial")
def test_npz_files_with_objects_are_refused(tmp_path: Path) -> None:
    write_gtsrb_npz(tmp_path)
    path, marker = tmp_path / "gtsrb" / "train.npz", tmp_path / "ran"
    bomb = np.array([Attack(os.system, f"touch {marker}")], dtype=object)
    np.savez(path, x=bomb, y=np.zeros(1, np.int64), track=np.zeros(1, np.int64))
    with refused("train.npz is not a whole array file"):
        load_data("gtsrb", tmp_path, download=False)
    assert not marker.exists()


@pytest.mark.usefixtures("unofficial")
@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        (
            {"x": np.zeros((1, 32, 32, 3), np.uint8), "y": np.zeros(1, np.int64)},
            'no array "track"; .* has x, y',
        ),
        (
            {"x": np.zeros((1, 32, 32, 3)), "y": np.zeros(1, int), "track": np.zeros(1, int)},
            "x must be uint8",
        ),
        (
            {"x": np.zeros((1, 3, 32, 32), np.uint8), "y": np.zeros(1, int), "track": np.zeros(1, int)},
            "x must be uint8",
        ),
        (
            {"x": np.zeros((1, 32, 32, 3), np.uint8), "y": np.zeros(2, int), "track": np.zeros(1, int)},
            "y must be whole numbers",
        ),
        (
            {"x": np.zeros((1, 32, 32, 3), np.uint8), "y": np.zeros(1, int), "track": np.zeros(1)},
            "track must be whole numbers",
        ),
    ],
)
def test_npz_files_of_another_shape_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], sentence: str
) -> None:
    write_gtsrb_npz(tmp_path)
    np.savez(tmp_path / "gtsrb" / "train.npz", **arrays)  # type: ignore[arg-type]
    with refused(sentence):
        load_data("gtsrb", tmp_path, download=False)


def test_damaged_npz_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.arange(1000))
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[500] ^= 255
    for content in (b"", b"PK\x03\x04", whole[:-30], whole[: len(whole) // 2], bytes(flipped)):
        path.write_bytes(content)
        with refused("a.npz is not a whole array file"):
            files.read_npz(path, keys=("x",))
    path.write_bytes(whole)
    monkeypatch.setattr("ecnn.files.arrays.MAX_ARRAY_BYTES", 1000)
    with refused("too large"):
        files.read_npz(path, keys=("x",))


def write_signs(root: Path, **changes: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {
        "x_adv": rng.random((5, 32, 32, 3), dtype=np.float32),
        "y_true": np.array([1, 1, 2, 2, 2]),
        "y_target": np.array([3, 4, 3, 4, 5]),
        "victim": np.array([0, 0, 1, 1, 1]),
        "x_clean": rng.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8),
        "y_clean": np.array([1, 2]),
    } | changes
    (root / "optprojtran").mkdir(parents=True, exist_ok=True)
    np.savez(root / "optprojtran" / "optprojtran.npz", **arrays)  # type: ignore[arg-type]
    return arrays


@pytest.mark.usefixtures("unofficial")
def test_adversarial_signs_keep_every_bit(tmp_path: Path) -> None:
    arrays = write_signs(tmp_path)
    signs = load_adversarial_signs(tmp_path)
    assert isinstance(signs, AdversarialSigns)
    assert len(signs) == 5
    assert np.array_equal(signs.images.numpy(), arrays["x_adv"].transpose(0, 3, 1, 2))
    assert torch.equal(signs.clean_labels[signs.victims], signs.labels)
    assert signs.targets.tolist() == [3, 4, 3, 4, 5]
    assert np.array_equal((signs.clean_images * 255).round().numpy(), arrays["x_clean"].transpose(0, 3, 1, 2))
    for changes, sentence in (
        ({"x_adv": arrays["x_adv"] * 2}, r"images must lie in \[0, 1\]"),
        ({"x_adv": np.full_like(arrays["x_adv"], np.nan)}, r"images must lie in \[0, 1\]"),
        ({"y_true": np.array([1])}, "labels must be torch.int64 of shape"),
        ({"victim": np.array([0, 0, 1, 1, 2])}, "victims must be numbers of the 2 clean images"),
        ({"x_adv": np.zeros((5, 3))}, "x_adv must be float32 of shape"),
    ):
        write_signs(tmp_path, **changes)
        with refused(sentence):
            load_adversarial_signs(tmp_path)


def test_adversarial_signs_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_signs(tmp_path)
    with refused("optprojtran.npz is not the official file"):
        load_adversarial_signs(tmp_path)
    monkeypatch.setenv("ECNN_DATA", str(tmp_path / "elsewhere"))
    with refused("cannot read .*elsewhere.*optprojtran.npz"):
        load_adversarial_signs()


# Folders of images


def write_pictures(
    folder: Path,
    counts: dict[str, int],
    size: tuple[int, int] = (6, 4),
    mode: str = "RGB",
    suffix: str = "png",
) -> None:
    rng = np.random.default_rng(0)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            shape = size if mode == "L" else (*size, 3)
            pixels = rng.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:03d}.{suffix}")


def test_a_folder_of_classes(tmp_path: Path) -> None:
    write_pictures(tmp_path / "signs", {"stop": 10, "go": 20})
    (tmp_path / "signs" / "go" / "notes.txt").write_text("not an image")
    (tmp_path / "signs" / ".hidden").mkdir()
    data = load_data(tmp_path / "signs", val_fraction=0.25)
    assert (data.name, data.class_names, data.image_size) == ("signs", ("go", "stop"), (6, 4))
    assert torch.bincount(data.test.labels).tolist() == [4, 2]
    assert torch.bincount(data.val.labels).tolist() == [4, 2]
    assert torch.bincount(data.train.labels).tolist() == [12, 6]
    below_root = load_data("signs", tmp_path, val_fraction=0.25, seed=7)
    assert torch.equal(data.test.images, below_root.test.images)
    first = np.asarray(Image.open(tmp_path / "signs" / "go" / "000.png")).transpose(2, 0, 1)
    everything = torch.cat([part.images for part in (data.train, data.val, data.test)]).numpy()
    assert len(everything) == 30
    assert (everything == first).all(axis=(1, 2, 3)).sum() == 1


def test_a_folder_with_its_own_test_images(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", {"a": 3, "b": 2}, suffix="bmp")
    write_pictures(tmp_path / "test", {"a": 1, "b": 4}, mode="L", suffix="PNG")
    data = load_data(tmp_path, val_fraction=0, image_size=5)
    assert (len(data.train), len(data.test)) == (5, 5)
    assert (data.in_channels, data.image_size) == (3, (5, 5))
    grey = data.test.images
    assert torch.equal(grey[:, 0], grey[:, 1])  # made RGB as the others are
    write_pictures(tmp_path / "test", {"c": 1})
    with refused("only one of them has a class 'c'"):
        load_data(tmp_path, image_size=5)


def test_grey_images_stay_grey(tmp_path: Path) -> None:
    write_pictures(tmp_path, {"a": 5, "b": 5}, mode="L")
    data = load_data(tmp_path)
    assert data.in_channels == 1
    assert (len(data.train), len(data.val), len(data.test)) == (6, 2, 2)


def test_images_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    write_pictures(tmp_path, {"a": 2}, size=(6, 4))
    write_pictures(tmp_path, {"b": 2}, size=(4, 6))
    with refused(r"different sizes \(.*: 6 x 4, .*: 4 x 6 pixels\): pass image_size"):
        load_data(tmp_path)
    assert load_data(tmp_path, image_size=(3, 7)).image_size == (3, 7)


def test_a_folder_that_may_not_be_read_is_not_called_absent(tmp_path: Path, as_nobody: Any) -> None:
    write_pictures(tmp_path / "closed" / "own", {"a": 2, "b": 2})
    for closed in (tmp_path / "closed" / "own" / "b", tmp_path / "closed" / "own", tmp_path / "closed"):
        closed.chmod(0)
        with as_nobody(tmp_path), refused(r"cannot read .*: Permission denied\."):
            load_data(tmp_path / "closed" / "own")
        with as_nobody(tmp_path), refused(r"cannot read .*: Permission denied\."):
            inspect_folder("own", tmp_path / "closed")


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    with refused("at least 2 folders of images, .* not 0"):
        load_data(tmp_path)
    write_pictures(tmp_path, {"a": 2})
    with refused("at least 2 folders of images, .* not 1"):
        load_data(tmp_path)
    (tmp_path / "b").mkdir()
    with refused("b has no image"):
        load_data(tmp_path)
    for part in ("train", "val"):  # a usual layout, but for the name of the second
        write_pictures(tmp_path / "usual" / part, {"a": 2, "b": 2})
    with refused("usual/train holds folders in place of images: .* called train and test"):
        load_data(tmp_path / "usual")


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_a_picture_is_turned_as_its_camera_says(tmp_path: Path, suffix: str) -> None:
    """Phones keep pixels as the sensor lay and write beside them how to turn them: what people see counts."""
    upright = Image.fromarray(np.repeat(np.arange(0, 240, 20, dtype=np.uint8)[:, None], 8, axis=1))
    exif = Image.Exif()
    for orientation, lying in ((6, Image.Transpose.ROTATE_90), (3, Image.Transpose.ROTATE_180)):
        exif[0x0112] = orientation
        for name in ("a", "b"):
            (tmp_path / name).mkdir(exist_ok=True)
            upright.save(tmp_path / name / f"0.{suffix}", quality=100)
            upright.transpose(lying).save(tmp_path / name / f"1.{suffix}", exif=exif, quality=100)
        data = load_data(tmp_path, image_size="auto")  # one size once all are upright: nothing to resize
        assert data.image_size == (12, 8)
        for images, _ in (data.train[:], data.test[:]):
            assert torch.allclose(images[:, 0, :, 0] * 255, torch.arange(0, 240, 20.0), atol=12)


def test_damaged_exif_turns_nothing(tmp_path: Path) -> None:
    picture = Image.fromarray(np.full((4, 6), 100, dtype=np.uint8))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(2):
            picture.save(tmp_path / name / f"{number}.jpg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + bytes(9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_data(tmp_path, image_size="auto").image_size == (4, 6)


def test_bad_images_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pictures(tmp_path, {"a": 2, "b": 2}, size=(40, 40))
    path = tmp_path / "b" / "001.png"
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 255
    for content in (b"", b"no image", whole[: len(whole) // 2], bytes(damaged), whole[:20]):
        path.write_bytes(content)
        with refused("001.png cannot be read as an image") as caught:
            load_data(tmp_path)
        assert str(path) in str(caught.value)
    Image.new("F", (40, 40)).save(path, format="TIFF")
    with refused(r"001.png has 32 bits per value \(mode F\)"):
        load_data(tmp_path)
    path.write_bytes(whole)
    for limit in (1000, 100):  # Pillow warns above the limit and refuses above twice the limit
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with refused(f"000.png has more than {limit:,} pixels, and no more are read"):
            load_data(tmp_path)


# Downloads


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """A web server on this machine and the folder that it shows."""
    pytest.importorskip("pooch")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    ) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/", folder
        running.shutdown()
        thread.join()


def archive_of(folder: Path, relative: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(folder / relative, arcname=relative)
    return buffer.getvalue()


def offer(monkeypatch: pytest.MonkeyPatch, name: str, url: str, content: bytes) -> None:
    sha256 = hashlib.sha256(content).hexdigest()
    official = sources.ARCHIVES[name][0]
    monkeypatch.setitem(
        sources.ARCHIVES, name, (downloads.Archive(url, sha256, official.folder, official.provides),)
    )


@pytest.mark.usefixtures("unofficial")
def test_missing_files_are_downloaded(
    tmp_path: Path,
    server: tuple[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    address, served = server
    pixels = write_cifar(tmp_path / "made", fine=True)
    content = archive_of(tmp_path / "made", "cifar-100-python")
    (served / "cifar-100-python.tar.gz").write_bytes(content)
    offer(monkeypatch, "cifar100", address + "cifar-100-python.tar.gz", content)
    root = tmp_path / "new" / "root"
    steps: list[tuple[int, int, str]] = []
    data = load_data("cifar100", root, val_fraction=0, progress=lambda *step: steps.append(step))
    assert np.array_equal(data.train.images.numpy().reshape(-1, 3072), pixels[0])
    assert steps[-1] == (len(content), len(content), "downloading cifar-100-python.tar.gz")
    assert all(0 <= done <= total for done, total, _ in steps)
    assert [path.name for path in root.iterdir()] == ["cifar-100-python"]
    (served / "cifar-100-python.tar.gz").unlink()
    assert (
        load_data("cifar100", root, val_fraction=0).fingerprint == data.fingerprint
    )  # nothing fetched again
    assert capfd.readouterr() == ("", "")


def test_mnist_is_downloaded_file_by_file(
    tmp_path: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, unofficial: None
) -> None:
    address, served = server
    write_mnist(tmp_path / "made", packed=True)
    archives = []
    for name in MNIST_FILES:
        content = (tmp_path / "made" / "MNIST" / "raw" / f"{name}.gz").read_bytes()
        (served / f"{name}.gz").write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        archives.append(
            downloads.Archive(
                f"{address}{name}.gz", sha256, "MNIST/raw", (f"MNIST/raw/{name}.gz",), unpack=False
            )
        )
    monkeypatch.setitem(sources.ARCHIVES, "mnist", tuple(archives))
    assert len(load_data("mnist", tmp_path, val_fraction=0).train) == 40
    assert sorted(path.name for path in (tmp_path / "MNIST" / "raw").iterdir()) == sorted(
        f"{name}.gz" for name in MNIST_FILES
    )


def test_a_failed_download_is_one_sentence(
    tmp_path: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, served = server
    (served / "x.tar.gz").write_bytes(b"other bytes")
    for url, reason in (
        (address + "x.tar.gz", "wrong checksum"),
        (address + "none.tar.gz", "HTTPError"),
        ("http://127.0.0.1:9/x.tar.gz", "ConnectionError"),
    ):
        offer(monkeypatch, "cifar10", url, b"expected bytes")
        with refused(
            rf"cifar10 needs .*data_batch_1, .* failed \({reason}\): fetch {url} yourself"
        ) as caught:
            load_data("cifar10", tmp_path / "mistyped" / "root")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "mistyped").exists()


def test_an_archive_without_the_files_is_refused(
    tmp_path: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, served = server
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "readme").write_text("nothing else")
    for content, sentence in (
        (archive_of(tmp_path / "made", "readme"), "data_batch_1, which .* does not contain"),
        (b"no archive", "cifar10: .* is not a whole archive"),
    ):
        (served / "c.tar.gz").write_bytes(content)
        offer(monkeypatch, "cifar10", address + "c.tar.gz", content)
        (tmp_path / "c.tar.gz").unlink(missing_ok=True)
        with refused(sentence):
            load_data("cifar10", tmp_path)


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100", "gtsrb"])
def test_without_download_the_sentence_comes_at_once(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(rf"{name} needs .* is not there: pass download=True, or fetch https://.* yourself and"):
        load_data(name, tmp_path, download=False)
    monkeypatch.setitem(sys.modules, "pooch", None)
    with refused(rf"{name} needs .* needs the package pooch: install that, or fetch https://"):
        load_data(name, tmp_path)
    assert not list(tmp_path.iterdir())


def tar_with(member: tarfile.TarInfo, content: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        good = tarfile.TarInfo("good.txt")
        good.size = 4
        tar.addfile(good, io.BytesIO(b"good"))
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zip_with(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        made.writestr("good.txt", "good")
        made.writestr(name, "bad")
    return buffer.getvalue()


def link(kind: bytes, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo("link")
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    ("file_name", "content"),
    [
        ("a.tar.gz", tar_with(tarfile.TarInfo("../escaped"), b"bad")),
        ("a.tar.gz", tar_with(tarfile.TarInfo("sub/../../escaped"), b"bad")),
        ("a.tar.gz", tar_with(tarfile.TarInfo("/tmp/escaped-from-a-test"), b"bad")),  # noqa: S108 never written
        ("a.tar.gz", tar_with(link(tarfile.SYMTYPE, "/etc"))),
        ("a.tar.gz", tar_with(link(tarfile.LNKTYPE, "good.txt"))),
        ("a.tar.gz", tar_with(link(tarfile.FIFOTYPE, ""))),
        ("a.zip", zip_with("../escaped")),
        ("a.zip", zip_with("/tmp/escaped-from-a-test")),  # noqa: S108 never written
    ],
)
def test_archives_that_would_write_elsewhere_are_refused(
    tmp_path: Path, file_name: str, content: bytes
) -> None:
    archive = tmp_path / file_name
    archive.write_bytes(content)
    with refused("is refused: its entry"):
        downloads.unpack(archive, tmp_path / "into")
    assert not list((tmp_path / "into").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {file_name, "into"}


def test_zip_archives_are_unpacked_over_what_is_there(tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    archive.write_bytes(zip_with("deep/er/file"))
    for _ in range(2):
        downloads.unpack(archive, tmp_path)
    assert (tmp_path / "good.txt").read_text() == "good"
    assert (tmp_path / "deep" / "er" / "file").read_text() == "bad"
    archive.write_bytes(archive.read_bytes()[:-10])
    with refused("not a whole archive"):
        downloads.unpack(archive, tmp_path)


def test_an_archive_that_grows_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "large.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(5000))
    monkeypatch.setattr(downloads, "_MAX_UNPACKED_BYTES", 4999)
    with refused("holds more than"):
        downloads.unpack(tmp_path / "large.zip", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_first_test_images_of_a_folder_are_of_all_classes_alike(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b", "c")):
        (tmp_path / "pics" / name).mkdir(parents=True)
        for image in range(10 * (number + 1)):
            pixels = np.full((8, 8), 80 * number + image, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pics" / name / f"{image:02}.png")
    data = load_data(tmp_path / "pics")
    assert data.folder == str((tmp_path / "pics").resolve())
    for split in (data.test, data.val):
        for limit in range(3, 1 + 3 * int(torch.bincount(split.labels).min())):
            counts = torch.bincount(split.take(limit).labels, minlength=3)
            assert int(counts.max() - counts.min()) <= 1
    assert torch.bincount(data.test.labels).tolist() == [2, 4, 6]
    assert torch.equal(load_data(tmp_path / "pics", seed=5).test.images, data.test.images)
    assert load_data("digits").folder is None


def test_official_addresses() -> None:
    assert {name: len(archives) for name, archives in sources.ARCHIVES.items()} == {
        "mnist": 4,
        "cifar10": 1,
        "cifar100": 1,
        "gtsrb": 3,
    }
    for archive in (archive for archives in sources.ARCHIVES.values() for archive in archives):
        assert archive.url.startswith("https://")
        assert len(archive.sha256) == 64
        assert archive.provides


# Augmentation


def augment_slowly(
    images: torch.Tensor, shift: int, flip: bool, fill: str, generator: torch.Generator
) -> torch.Tensor:
    """Image by image and pixel row by pixel row, with the random numbers that Augmentation draws."""
    batch, _, height, width = images.shape
    moves = torch.randint(-shift, shift + 1, (2, batch, 1), generator=generator)[:, :, 0].tolist()
    mirrored = torch.randint(2, (batch, 1), generator=generator)[:, 0].tolist() if flip else [0] * batch
    out = torch.zeros_like(images)
    for number in range(batch):
        for row in range(height):
            for column in range(width):
                from_row, from_column = row + moves[0][number], column + moves[1][number]
                if fill == "nearest":
                    from_row = min(max(from_row, 0), height - 1)
                    from_column = min(max(from_column, 0), width - 1)
                if 0 <= from_row < height and 0 <= from_column < width:
                    out[number, :, row, column] = images[number, :, from_row, from_column]
        if mirrored[number]:
            out[number] = out[number].flip(-1)
    return out


@pytest.mark.parametrize("fill", ["nearest", "zero"])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 4, 9])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_augmentation_equals_a_slow_loop(
    shift: int, flip: bool, fill: Literal["nearest", "zero"], dtype: torch.dtype
) -> None:
    images = torch.randint(1, 256, (12, 3, 7, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    before = images.clone()
    fast = Augmentation(shift, flip, fill)(images, torch.Generator().manual_seed(5))
    slow = augment_slowly(images, shift, flip, fill, torch.Generator().manual_seed(5))
    assert fast.dtype == dtype
    assert torch.equal(fast, slow)
    assert torch.equal(images, before)
    torch.manual_seed(5)
    assert torch.equal(Augmentation(shift, flip, fill)(images), fast)  # torch's own generator


def test_every_move_and_flip_happens_equally_often() -> None:
    images = torch.zeros(20_000, 1, 5, 5)
    images[:, :, 2, 2] = 1
    images[:, :, 2, 3] = 0.5  # to the right of the centre unless mirrored
    out = Augmentation(1, True, "zero")(images, torch.Generator().manual_seed(0))
    peaks = out.flatten(1).argmax(dim=1)
    mirrored = out.flatten(1).gather(1, peaks[:, None] - 1)[:, 0] == 0.5
    counts = torch.bincount(peaks * 2 + mirrored, minlength=50)
    expected = 20_000 / 18
    assert (counts > 0).sum() == 18
    assert ((counts[counts > 0] - expected).abs() < 5 * expected**0.5).all()


def test_augmentation_that_does_nothing_and_memory_formats() -> None:
    images = torch.rand(4, 3, 8, 8)
    assert Augmentation()(images) is images
    last = images.to(memory_format=torch.channels_last)
    augmentation = Augmentation(2, True)
    out = augmentation(last, torch.Generator().manual_seed(0))
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out, augmentation(images, torch.Generator().manual_seed(0)))
    assert augmentation(images).is_contiguous()
    assert augmentation(images[:0]).shape == (0, 3, 8, 8)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shift": -1}, "shift"),
        ({"shift": 1.5}, "shift"),
        ({"flip": 1}, "flip"),
        ({"fill": "reflect"}, "fill"),
    ],
)
def test_bad_augmentations_are_refused(options: dict[str, Any], sentence: str) -> None:
    with refused(f"{sentence} must be"):
        Augmentation(**options)
    with refused(r"shape \(batch, channel, height, width\), not .* of shape \(3, 8, 8\)"):
        Augmentation(1)(torch.rand(3, 8, 8))


@pytest.mark.gpu
def test_augmentation_inside_a_cuda_graph() -> None:
    images = torch.rand(64, 3, 32, 32, device="cuda")
    augmentation = Augmentation(4, True, "zero")
    augmentation(images)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = augmentation(images)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)  # fresh random numbers at every replay
    generator = torch.Generator("cuda").manual_seed(1)
    again = torch.Generator("cuda").manual_seed(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        a, b = augmentation(images, generator), augmentation(images, again)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(a, b)


# The real files


@pytest.mark.data("MNIST/raw")
def test_real_mnist() -> None:
    data = load_data("mnist", DATA, val_fraction=0, download=False)
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert data.train.labels[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert torch.bincount(data.test.labels).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
    assert data.mean_image.mean().item() == pytest.approx(0.1307, abs=1e-4)
    split = load_data("mnist", DATA, download=False)
    assert (len(split.train), len(split.val)) == (54_001, 5_999)


@pytest.mark.data("MNIST/raw/train-images-idx3-ubyte.gz")
def test_real_mnist_is_the_same_packed(tmp_path: Path) -> None:
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    for name in MNIST_FILES:
        (tmp_path / "MNIST" / "raw" / f"{name}.gz").symlink_to(DATA / "MNIST" / "raw" / f"{name}.gz")
    packed = load_data("mnist", tmp_path, download=False)
    assert packed.fingerprint == load_data("mnist", DATA, download=False).fingerprint


@pytest.mark.data("cifar-10-batches-py")
def test_real_cifar10() -> None:
    data = load_data("cifar10", DATA, val_fraction=0, download=False)
    assert (len(data.train), len(data.test)) == (50_000, 10_000)
    assert torch.bincount(data.train.labels).tolist() == [5_000] * 10
    assert torch.bincount(data.test.labels).tolist() == [1_000] * 10
    assert data.class_names[:3] == ("airplane", "automobile", "bird")
    assert data.mean_image.mean(dim=(1, 2)).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)
    assert data.fingerprint.startswith("320b8c56d864")


@pytest.mark.data("cifar-10-batches-py")
def test_real_cifar10_cut_short_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for path in (DATA / "cifar-10-batches-py").iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "data_batch_1").unlink()
    (folder / "data_batch_1").write_bytes((DATA / "cifar-10-batches-py" / "data_batch_1").read_bytes()[:-1])
    with refused("data_batch_1 is not the official file"):
        load_data("cifar10", tmp_path, download=False)


@pytest.mark.data("cifar-100-python")
def test_real_cifar100() -> None:
    data = load_data("cifar100", DATA, download=False)
    assert (len(data.train), len(data.val), len(data.test)) == (45_000, 5_000, 10_000)
    assert torch.bincount(data.train.labels).tolist() == [450] * 100
    assert torch.bincount(data.val.labels).tolist() == [50] * 100
    assert (data.class_names[0], data.class_names[99]) == ("apple", "worm")


@pytest.mark.data("gtsrb/train.npz")
def test_real_gtsrb_keeps_tracks_together() -> None:
    data = load_data("gtsrb", DATA, download=False)
    assert len(data.train) + len(data.val) == 39_209
    assert (len(data.test), data.num_classes) == (12_630, 43)
    arrays = files.read_npz(DATA / "gtsrb" / "train.npz", keys=("x", "y", "track"))
    kept, held = hold_out(arrays["y"].astype(np.int64), 0.1, 0, arrays["track"])
    pairs = np.stack([arrays["y"], arrays["track"]], axis=1)
    assert not {*map(tuple, pairs[kept].tolist())} & {*map(tuple, pairs[held].tolist())}
    assert np.array_equal(data.val.images.numpy(), arrays["x"][held].transpose(0, 3, 1, 2))
    assert torch.bincount(data.val.labels, minlength=43).min() >= 29  # at least one track of every sign
    assert torch.bincount(data.train.labels)[0] == 180


@pytest.mark.data("optprojtran/optprojtran.npz")
def test_real_adversarial_signs() -> None:
    signs = load_adversarial_signs(DATA)
    assert signs.images.shape == (392, 3, 32, 32)
    assert signs.clean_images.shape == (20, 3, 32, 32)
    assert torch.equal(signs.clean_labels[signs.victims], signs.labels)
    assert not (signs.labels == signs.targets).any()
    rounded = (signs.images * 255).round() / 255
    assert (rounded != signs.images).float().mean() > 0.1  # why they are not kept as bytes
    assert len(set(signs.targets.tolist())) == 20
