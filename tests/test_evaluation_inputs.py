"""What `evaluate` and `audit` take: images as people have them, with the same outcomes; for the rest a sentence."""

from __future__ import annotations

import random
import warnings
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from toys import TINY, half_spaces

import ecnn
from ecnn.attacks import PGD
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation import evaluate, read_images
from ecnn.evaluation.outcomes import COLUMNS

pytestmark = pytest.mark.usefixtures("one_thread")

GENERATOR = torch.Generator().manual_seed(0)
BYTES = torch.randint(0, 256, (12, 1, 4, 4), generator=GENERATOR, dtype=torch.uint8)
PIXELS = BYTES.float() / 255
MODEL = half_spaces(torch.randn(16, generator=GENERATOR))
with torch.no_grad():
    LABELS = MODEL(PIXELS).argmax(dim=1)
SPLIT = Split(BYTES, LABELS)
ATTACK = PGD(norm="linf", eps=0.1, steps=3, step_size=0.05)


class Items(Dataset[Any]):
    """A map-style dataset that counts what is read of it."""

    def __init__(self, images: Any, labels: Any, length: int | None = None) -> None:
        self.images, self.labels, self.read = images, labels, 0
        self.length = len(images) if length is None else length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        self.read += 1
        return self.images[number % len(self.images)], self.labels[number % len(self.images)]


class Stream(IterableDataset[Any]):
    """A dataset without a length."""

    def __iter__(self) -> Any:
        return iter(zip(PIXELS, LABELS, strict=True))


ALIKE: dict[str, Any] = {
    "tensors": (PIXELS, LABELS),
    "bytes": (BYTES, LABELS),
    "arrays": (PIXELS.numpy(), LABELS.numpy()),
    "float64": (PIXELS.numpy().astype(np.float64), LABELS.numpy().astype(np.int8)),
    "a list of labels": [BYTES.numpy(), LABELS.tolist()],
    "a TensorDataset": TensorDataset(PIXELS, LABELS),
    "a dataset": Items(PIXELS, LABELS),
    "a dataset of arrays and numbers": Items(BYTES.numpy(), LABELS.tolist()),
    "a list of items": list(zip(PIXELS, LABELS.tolist(), strict=True)),
    "a loader": DataLoader(TensorDataset(PIXELS, LABELS), batch_size=5),
    "a loader of a stream": DataLoader(Stream(), batch_size=5),
}


@pytest.mark.parametrize("given", ALIKE)
def test_every_way_to_give_images_has_the_outcomes_of_a_split(given: str) -> None:
    expected = evaluate(MODEL, SPLIT, {"pgd": ATTACK}, limit=9)
    found = evaluate(MODEL, ALIKE[given], {"pgd": ATTACK}, limit=9)
    for column in COLUMNS:
        mine, theirs = (getattr(part.outcomes["pgd"], column) for part in (found, expected))
        assert np.array_equal(mine, theirs), column


def test_audit_takes_them_too_and_reads_no_further_than_it_needs() -> None:
    settings: Any = {"norm": "linf", "eps": 0.1, "limit": 6, "classes": [0, 1], "budget": TINY}
    expected = ecnn.audit(
        MODEL, Split(BYTES[torch.arange(1200) % 12], LABELS[torch.arange(1200) % 12]), **settings
    )
    gigantic = Items(PIXELS, LABELS, length=10**9)
    found = ecnn.audit(MODEL, gigantic, **settings)
    assert (found.accuracy, found.broken_by) == (expected.accuracy, expected.broken_by)
    assert gigantic.read <= 6 + 1000 + 256


def test_a_gigantic_dataset_is_read_up_to_the_limit() -> None:
    gigantic = Items(PIXELS, LABELS, length=10**9)
    assert len(read_images(gigantic, 30)) == 30
    assert gigantic.read == 30
    on_disk = np.broadcast_to(PIXELS.numpy()[:1], (10**7, 1, 4, 4))
    assert len(read_images((on_disk, np.zeros(10**7, dtype=np.int64)), 3)) == 3


def test_arrays_of_other_machines_and_of_files_that_only_read(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", PIXELS.numpy().astype(">f4"))
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of memory that it must not write to
        for images in (mapped, PIXELS.numpy().astype(np.longdouble), PIXELS.numpy()[:, :, ::-1, ::-1]):
            found = read_images((images, LABELS.numpy().astype(">i4")))
            assert torch.equal(found.labels, LABELS)
            assert torch.equal(found[:][0], torch.tensor(images.astype(np.float32)))


def test_pixels_between_bytes_stay_floats_and_rounding_beyond_the_range_is_cut_off() -> None:
    assert not read_images((PIXELS, LABELS)).is_float
    between = PIXELS.clone()
    between[0, 0, 0, 0], between[1, 0, 0, 0] = 0.1234567, 1 + 1e-7
    found = read_images((between, LABELS))
    assert found.is_float
    assert torch.equal(found.images, between.clamp(0, 1))


def test_a_shuffling_loader_gives_the_same_images_every_time_and_leaves_the_generators() -> None:
    loader = DataLoader(TensorDataset(PIXELS, LABELS), batch_size=4, shuffle=True)
    before = torch.get_rng_state()
    first, second = read_images(loader, 4), read_images(loader, 4)
    assert torch.equal(first.images, second.images)
    assert not torch.equal(first.images, BYTES[:4])
    assert torch.equal(torch.get_rng_state(), before)


class Drawn(Sampler[int]):
    """All images in an order that a generator of NumPy's or Python's own draws."""

    def __init__(self, shuffle: Any) -> None:
        self.shuffle_by = shuffle

    def __iter__(self) -> Iterator[int]:
        order = list(range(12))
        self.shuffle_by.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 12


class Noisy(Items):
    """Images that a generator of the dataset's makes darker."""

    def __init__(self, draws: Any) -> None:
        super().__init__(PIXELS, LABELS)
        self.draws = draws

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        image, label = super().__getitem__(number)
        return image * float(torch.rand((), generator=self.draws)), label


def own_loaders(pairs: Dataset[Any]) -> dict[str, tuple[Any, Any]]:
    """Loaders that draw from generators of their own, with one of these."""
    torchs = [torch.Generator().manual_seed(seed) for seed in range(8)]
    nested = BatchSampler(RandomSampler(pairs, generator=torchs[3]), 4, drop_last=False)  # type: ignore[arg-type]
    noisy: Any = ConcatDataset([Subset(Noisy(torchs[6]), range(6)), Subset(Noisy(torchs[7]), range(6))])
    by_numpy, by_state, by_python = np.random.default_rng(3), np.random.RandomState(3), random.Random(3)
    weighted: Any = WeightedRandomSampler([1.0] * 12, 12, generator=torchs[2])
    chosen: Any = SubsetRandomSampler(range(12), generator=torchs[1])
    return {
        "shuffle": (DataLoader(pairs, batch_size=4, shuffle=True, generator=torchs[0]), torchs[0]),
        "a subset": (DataLoader(pairs, batch_size=4, sampler=chosen), torchs[1]),
        "weights": (DataLoader(pairs, batch_size=4, sampler=weighted), torchs[2]),
        "batches": (DataLoader(pairs, batch_sampler=nested), torchs[3]),
        "NumPy's": (DataLoader(pairs, batch_size=4, sampler=Drawn(by_numpy)), by_numpy),
        "NumPy's older": (DataLoader(pairs, batch_size=4, sampler=Drawn(by_state)), by_state),
        "Python's": (DataLoader(pairs, batch_size=4, sampler=Drawn(by_python)), by_python),
        "a dataset's": (DataLoader(noisy, batch_size=4), torchs[7]),
        "a dataset's alone": (noisy, torchs[6]),
        "with a worker": (
            DataLoader(pairs, batch_size=4, shuffle=True, generator=torchs[4], num_workers=1),
            torchs[4],
        ),
    }


def state_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return str(generator.get_state().tolist())
    if isinstance(generator, np.random.Generator):
        return str(generator.bit_generator.state)
    is_pythons = isinstance(generator, random.Random)
    return str(generator.getstate() if is_pythons else generator.get_state(legacy=False))


@pytest.mark.parametrize("given", own_loaders(TensorDataset(PIXELS, LABELS)))
def test_generators_of_a_loader_are_seeded_too_and_left_as_they_were(given: str) -> None:
    """Else two models would be compared on different images, and a run_dir be refused when it is resumed."""
    loader, generator = own_loaders(TensorDataset(PIXELS, LABELS))[given]
    before = state_of(generator)
    first = read_images(loader, 8)
    assert state_of(generator) == before
    for _ in loader:  # as a training between two evaluations, which moves the generator
        pass
    moved = state_of(generator)
    assert moved != before
    second = read_images(loader, 8)
    assert state_of(generator) == moved
    assert torch.equal(first[:][0], second[:][0])
    assert torch.equal(first.labels, second.labels)
    assert not torch.equal(first[:][0], PIXELS[:8])


def test_bytes_are_said_to_be_taken_as_shares_of_255() -> None:
    news: list[str] = []
    evaluate(MODEL, (BYTES, LABELS), {}, limit=4, progress=lambda done, total, note: news.append(note))
    assert "the images are bytes: pixels count as value / 255" in news


def test_only_images_of_the_asked_classes_are_asked() -> None:
    found = evaluate(MODEL, (PIXELS, LABELS), {"pgd": ATTACK}, limit=3, classes=[1])
    assert found.clean.label.tolist() == [1, 1, 1]
    wanted = Split(BYTES[LABELS == 1], LABELS[LABELS == 1])
    expected = evaluate(MODEL, wanted, {"pgd": ATTACK}, limit=3)
    assert np.array_equal(found.outcomes["pgd"].image_hash, expected.outcomes["pgd"].image_hash)
    assert np.array_equal(found.outcomes["pgd"].prediction, expected.outcomes["pgd"].prediction)


def one_hot(labels: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(labels, 2)


def batch_of(images: Any, labels: Any) -> DataLoader[Any]:
    """A loader whose only batch is this one."""
    return DataLoader(TensorDataset(PIXELS, LABELS), batch_size=12, collate_fn=lambda items: (images, labels))


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its interface may change
        return torch.nested.nested_tensor(list(PIXELS))


def masked(values: Tensor) -> np.ma.MaskedArray[Any, Any]:
    return np.ma.masked_array(values.numpy(), np.arange(values.numel()).reshape(values.shape) < 3)


UNORDINARY: dict[str, tuple[Any, str]] = {
    "sparse": (lambda values: values.to_sparse(), "must be an ordinary tensor.*sparse_coo: give to_dense"),
    "meta": (lambda values: values.to("meta"), "must be an ordinary tensor.*meta, which holds no numbers"),
    "masked": (masked, r"hides 3 of \d+ values: give filled\(VALUE\)"),
}


@pytest.mark.parametrize("kind", UNORDINARY)
@pytest.mark.parametrize("name", ["images", "labels"])
def test_what_holds_its_numbers_otherwise_is_refused_on_every_way_in(kind: str, name: str) -> None:
    change, sentence = UNORDINARY[kind]
    images, labels = (
        change(PIXELS) if name == "images" else PIXELS,
        change(LABELS) if name == "labels" else LABELS,
    )
    with pytest.raises(InputError, match=f"^{name} .*{sentence}"):
        read_images((images, labels))
    with pytest.raises(InputError, match=f"^{name} .*{sentence}"):
        read_images(batch_of(images, labels))
    if kind != "masked":  # an item of such an array is a number
        item = (change(PIXELS[0]), 0) if name == "images" else (PIXELS[0], change(LABELS[0]))
        with pytest.raises(InputError, match=f"^{name} .*{sentence}"):
            read_images([item])
        with pytest.raises(InputError, match=f"^{name} .*{sentence}"):
            Split(images, labels)


def test_labels_of_every_exact_kind_are_read_and_masks_that_hide_nothing_play_no_part() -> None:
    unmasked = np.ma.masked_array(PIXELS.numpy())
    small = [torch.tensor(int(label), dtype=torch.uint8) for label in LABELS]
    for labels in (
        LABELS.numpy().astype(np.uint64),
        small,
        [label.numpy() for label in LABELS],
        LABELS.byte(),
    ):
        found = read_images((unmasked, labels))
        assert torch.equal(found.labels, LABELS)
        assert torch.equal(found.images, BYTES)


RAGGED = [(torch.zeros(1, size, size), 0) for size in (4, 4, 5)]
REFUSED: dict[str, tuple[Any, str]] = {
    "floats of 0..255": ((PIXELS * 255, LABELS), "reach from 0 to 254: divide them by 255"),
    "floats of 0..16": ((PIXELS * 16, LABELS), "divide them by the value of white"),
    "normalised": ((PIXELS * 2 - 1, LABELS), r"before they were normalised.*ecnn.Normalized"),
    "no numbers": ((PIXELS * float("nan"), LABELS), "some are not finite numbers"),
    "channels last": (
        (np.zeros((12, 8, 8, 3), np.uint8), LABELS),
        r"channels last: permute them with \(0, 3, 1, 2\)",
    ),
    "no channel": ((PIXELS[:, 0], LABELS), r"add the channel with images\[:, None\]"),
    "flat": ((PIXELS.flatten(1), LABELS), r"\(image, channel, height, width\)"),
    "integers": ((BYTES.long(), LABELS), "convert 0..255 to uint8"),
    "bytes of 0 and 1": ((PIXELS.round().to(torch.uint8), LABELS), "bytes that reach from 0 to 1"),
    "labels one-hot": ((PIXELS, one_hot(LABELS)), r"take labels.argmax\(1\)"),
    "labels in a column": ((PIXELS, LABELS[:, None]), r"take labels\[:, 0\]"),
    "labels float": ((PIXELS, LABELS.float()), "convert them to int64"),
    "labels text": (
        (PIXELS, ["cat"] * 12),
        "not text: give the place of each in the list of the model's classes",
    ),
    "labels bfloat16": ((PIXELS, LABELS.bfloat16()), "convert them to int64"),
    "labels ragged": ((PIXELS, [[1], [0, 1]] * 6), "one whole number per image, but their shapes differ"),
    "labels of a batch ragged": (batch_of(PIXELS, [[1], [0, 1]] * 6), "but their shapes differ"),
    "one label": ((PIXELS, LABELS[0]), r"the labels are one number, tensor\("),
    "one label of an array": ((PIXELS, np.array(3)), r"the labels are one number, array\(3\)"),
    "one image": ((torch.tensor(1.0), LABELS), r"the images are one number, tensor\(1\.\)"),
    "one label of a batch": (
        batch_of(PIXELS, LABELS[0]),
        r"of shape \(12,\), one number per image, not tensor",
    ),
    "no labels of a batch": (batch_of(PIXELS, None), r"one number per image, not None alone"),
    "labels beyond int64": (
        (PIXELS, np.full(12, 2**63 + 5, dtype=np.uint64)),
        f"whole numbers from 0 up to {2**63 - 1}, not {2**63 + 5}",
    ),
    "images nested": ((nested(), LABELS), "not a nested one: resize"),
    "images complex": ((PIXELS.to(torch.complex64), LABELS), "take their real part"),
    "labels negative": ((PIXELS, LABELS - 1), "labels must be 0 or more"),
    "labels from 1": ((PIXELS, LABELS + 1), "scores for 2 classes.*or subtract 1 if yours begin at 1"),
    "labels too large": ((PIXELS, LABELS + 2), r"scores for 2 classes \(0 to 1\): [^,]*\.$"),
    "labels of items one-hot": (Items(PIXELS, one_hot(LABELS)), r"argmax\(1\)"),
    "empty": ((PIXELS[:0], LABELS[:0]), "there is no image"),
    "an empty dataset": (Items(PIXELS, LABELS, length=0), "there is no image"),
    "other lengths": ((PIXELS, LABELS[:5]), "12 images and 5 labels"),
    "ragged": (RAGGED, r"image 2 is float32 of shape \(1, 5, 5\).*resize them"),
    "ragged batches": ([*RAGGED[:2]] * 128 + RAGGED[2:], "all images must have one shape"),
    "three tensors": (TensorDataset(PIXELS, LABELS, LABELS), "two tensors"),
    "items of one thing": ([PIXELS[0], PIXELS[1], PIXELS[2]], r"an item must be \(image, label\)"),
    "items as tables": ([{"image": PIXELS[0], "label": 0}], "not a dict of image, label: wrap the data"),
    "an archive": (UserDict({"x": PIXELS, "y": LABELS}), "not a UserDict of x, y"),  # as np.load gives one
    "a loader of single images": (
        DataLoader(TensorDataset(PIXELS, LABELS), batch_size=None),
        "set its batch_size",
    ),
    "truth values": ((PIXELS > 0.5, LABELS), "convert them to float32"),
    "a stream": (Stream(), "wrap it in a DataLoader"),
    "a name": ("digits", "a Split such as data.test"),
    "nothing": (None, "a Split such as data.test"),
    "a dataset of ours": (ecnn.load_data("digits"), "give one split of the dataset, such as data.test"),
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_does_not_fit_is_told_in_a_sentence(given: str) -> None:
    data, sentence = REFUSED[given]
    with pytest.raises(InputError, match=sentence):
        evaluate(MODEL, data, {}, limit=None)


def test_pictures_want_a_transform() -> None:
    image = pytest.importorskip("PIL.Image")
    with pytest.raises(InputError, match="ToTensor"):
        read_images([(image.new("L", (4, 4)), 0)])


@pytest.mark.parametrize("classes", [[], "3,5", [1.5], [-1], 3])
def test_classes_are_numbers(classes: Any) -> None:
    with pytest.raises(InputError, match="class"):
        read_images(SPLIT, classes=classes)
    with pytest.raises(InputError, match="no image"):
        evaluate(MODEL, (PIXELS, LABELS), {}, limit=None, classes=[7])
