"""Pictures in, named classes out."""

from __future__ import annotations

import csv
import io
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_data import write_pictures
from torch import Tensor, nn
from toys import Saturated, images_of_classes
from typer.testing import CliRunner

import ecnn
from ecnn import files, runs
from ecnn.attacks import PGD, Accepted
from ecnn.cli import app
from ecnn.cli.predict_command import _as_text
from ecnn.codes import load_code
from ecnn.data import Split, load_data
from ecnn.data.formats import plain_image, read_image
from ecnn.data.sources import CLASS_NAMES
from ecnn.errors import InputError
from ecnn.objectives import codeword_distances
from ecnn.predicting import Classifier, Guess, Prediction, evaluate_rejection, load_classifier

pytestmark = pytest.mark.usefixtures("one_thread")


class Means(nn.Module):
    """The scores are the mean of each quarter of the image's rows, so that what was read can be told."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([part.mean(dim=(1, 2, 3)) for part in images.chunk(4, dim=2)], dim=1)


def classifier(in_channels: int = 3, size: tuple[int, int] = (8, 8)) -> Classifier:
    return Classifier(Means(), ("north", "upper", "lower", "south"), in_channels, size)


def picture(mode: str = "RGB", size: tuple[int, int] = (13, 17)) -> np.ndarray:
    rng = np.random.default_rng(1)
    return rng.integers(0, 256, size if mode == "L" else (*size, 3), dtype=np.uint8)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_pictures_become_what_a_folder_of_them_becomes(tmp_path: Path, mode: str) -> None:
    """Bit for bit the pixels that training saw, from a file, its bytes, Pillow, an array or a tensor."""
    write_pictures(tmp_path / "own", {"a": 3, "b": 3}, size=(13, 17), mode=mode)
    path = tmp_path / "own" / "a" / "001.png"
    data = load_data(tmp_path / "own", image_size=(8, 6), val_fraction=0)
    ours = classifier(data.in_channels, (8, 6))
    expected = {image.numpy().tobytes() for split in (data.train, data.test) for image in split[:][0]}
    pixels = np.asarray(Image.open(path))
    planes = pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)
    for source in (path, path.read_bytes(), Image.open(path), pixels, planes, torch.tensor(planes)):
        assert ours.read(source).numpy().tobytes() in expected
    with path.open("rb") as file:
        assert [prediction.image for prediction in ours.predict(file)] == [str(path)]
    assert ours.predict(torch.rand(1, 3, 8, 6).bfloat16())[0].name
    floats = ours.read(torch.tensor(planes) / 255)  # not rounded to bytes on the way
    assert torch.allclose(floats, ours.read(path), atol=1 / 255)
    assert torch.equal(ours.read(floats), floats)


@pytest.mark.parametrize("width", [1, 3, 4])
def test_a_narrow_grey_picture_is_not_taken_for_a_coloured_one(width: int) -> None:
    pixels = picture("L", (5, width))
    ours = classifier(1, (5, width))
    for source in (pixels, torch.tensor(pixels), pixels / np.float32(255)):
        assert np.allclose(ours.read(source)[0], pixels / 255, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "channels"), [("L", 3), ("RGB", 1), ("RGBA", 3), ("LA", 1), ("P", 3), ("1", 1)]
)
def test_other_kinds_of_pictures_are_converted(tmp_path: Path, mode: str, channels: int) -> None:
    image = Image.fromarray(picture()).convert(mode)
    ours = classifier(channels, (13, 17))
    shown = ours.read(image)
    wanted = np.asarray(image.convert("L" if channels == 1 else "RGB"), dtype=np.float32) / 255
    assert np.allclose(shown.numpy(), wanted if channels == 1 else wanted.transpose(2, 0, 1))
    planes = np.asarray(image.convert("RGB")).transpose(2, 0, 1) / np.float32(255)
    if mode == "RGB":
        assert np.allclose(ours.read(planes), shown, atol=1 / 255)  # grey of floats, too


def test_what_is_transparent_is_laid_on_white(tmp_path: Path) -> None:
    """A black drawing on a transparent ground is not a black picture, whatever lies below the ground."""
    pixels = np.zeros((4, 4, 4), dtype=np.uint8)
    pixels[1, 1, 3] = 255
    pixels[2, 2] = (255, 0, 0, 51)
    wanted = torch.ones(3, 4, 4)
    wanted[:, 1, 1] = 0
    wanted[1:, 2, 2] = 0.8
    ours = classifier(3, (4, 4))
    drawing = Image.fromarray(pixels)
    drawing.save(tmp_path / "drawing.png")
    for source in (
        tmp_path / "drawing.png",
        drawing,
        pixels,
        pixels.transpose(2, 0, 1) / np.float32(255),
    ):
        assert torch.allclose(ours.read(source), wanted)
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([0, 0, 0, 0, 0, 0])
    palette.putpixel((1, 1), 1)
    palette.save(tmp_path / "palette.gif", transparency=0)
    opaque = drawing.getchannel("A").point(lambda alpha: 255 * (alpha == 255))
    grey = Image.merge("LA", (Image.new("L", (4, 4)), opaque))
    wanted[1:, 2, 2] = 1
    assert torch.allclose(ours.read(tmp_path / "palette.gif"), wanted)
    assert torch.allclose(classifier(1, (4, 4)).read(grey), wanted[:1])


def test_which_axis_is_the_channel() -> None:
    ours = classifier(3, (3, 3))
    both = np.arange(27, dtype=np.uint8).reshape(3, 3, 3)
    assert torch.equal(ours.read(both), torch.tensor(both).permute(2, 0, 1) / 255)
    assert torch.equal(ours.read(torch.tensor(both)), torch.tensor(both) / 255)
    assert torch.equal(ours.read(both / 255), torch.tensor(both) / 255)
    last = np.random.default_rng(0).random((3, 5, 3))[:, :4]
    assert classifier(3, (3, 4)).read(last.transpose(1, 0, 2)).shape == (3, 3, 4)


def test_predictions_in_order_with_names_and_numbers(tmp_path: Path) -> None:
    images = torch.zeros(3, 3, 8, 8)
    for row, start in enumerate((6, 0, 2)):
        images[row, :, start : start + 2] = 0.9
    found = classifier().predict(images, top=2, batch_size=2)
    assert [prediction.name for prediction in found] == ["south", "north", "upper"]
    assert [prediction.image for prediction in found] == ["image 0", "image 1", "image 2"]
    odds = np.exp(0.9) / (np.exp(0.9) + 3)
    assert found[0].guesses[0].probability == pytest.approx(odds)
    assert found[0].margin == pytest.approx(0.9)
    assert found[0].distance is None
    assert len(found[0].guesses) == 2
    Image.fromarray(np.uint8(255 * images[1].numpy().transpose(1, 2, 0))).save(tmp_path / "b.png")
    Image.fromarray(np.uint8(255 * images[2].numpy().transpose(1, 2, 0))).save(tmp_path / "c.png")
    mixed = classifier().predict([images[0], tmp_path, [str(tmp_path / "b.png")]], top=9)
    assert [prediction.name for prediction in mixed] == ["south", "north", "upper", "north"]
    assert mixed[3].image == str(tmp_path / "b.png")
    assert len(mixed[0].guesses) == 4
    json.dumps(mixed[0].to_dict(), allow_nan=False)
    assert classifier().predict([]) == []


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        ("missing.png", "missing.png"),
        (b"no picture", "image 0 cannot be read as an image: it is not one, or of an unknown kind"),
        ("", "the name of an image is empty"),
        (np.zeros((5, 5, 7), np.uint8), r"with 1, 3 or 4 channels, not \(5, 5, 7\)"),
        (np.zeros((0, 5, 3), np.uint8), "channels, not"),
        (np.zeros((4, 4), np.int64), "bytes .* or floats in .* not int64"),
        (np.full((3, 4, 4), 200.0), "divide by 255"),
        (np.full((3, 4, 4), np.nan), "outside"),
        (7, "not an int"),
        (Image.new("F", (4, 4)), "32 bits per value"),
        (Image.new("I", (4, 4)), "32 bits per value"),
        (Image.new("RGB", (0, 0)), "has no pixels: its size is 0 x 0"),
        (Image.new("L", (4, 0)), "has no pixels: its size is 4 x 0"),
    ],
)
def test_what_is_no_picture_is_one_sentence(image: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        classifier().predict([image])
    good = torch.zeros(3, 8, 8)
    first, second = classifier().predict([image, good], keep_going=True)
    assert re.search(sentence, str(first.error))
    assert (first.name, second.error) == (None, None)


def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(tmp_path: Path, as_nobody: Any) -> None:
    top = tmp_path / "top"
    for path in (top / "0.png", top / "closed" / "1.png"):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture()).save(path)
    (top / "closed").chmod(0)
    asked = [top / "closed", top, top / "closed" / "1.png", "x" * 300, top / "0.png"]
    with as_nobody(tmp_path):
        found = classifier().predict(asked, keep_going=True)
    assert [entry.image for entry in found] == [str(path) for path in asked]
    assert [bool(entry.error) for entry in found] == [True, True, True, True, False]
    assert all("closed: Permission denied." in str(entry.error) for entry in found[:2])


def test_a_picture_that_breaks_off_is_a_sentence_however_late_it_is_unpacked(tmp_path: Path) -> None:
    Image.fromarray(picture(size=(64, 64))).save(tmp_path / "cut.jpg")
    whole = (tmp_path / "cut.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    with Image.open(tmp_path / "cut.jpg") as lazy:  # its pixels are read when they are asked for
        cut, good = classifier().predict([lazy, Image.fromarray(picture())], keep_going=True)
        assert "image 0 cannot be read as an image: image file is truncated" in str(cut.error)
        assert good.error is None
        with pytest.raises(InputError, match="image 0 cannot be read as an image"):
            classifier().predict(lazy)


def test_the_bytes_of_a_file_may_come_in_any_form(tmp_path: Path) -> None:
    Image.fromarray(picture()).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    expected = classifier().read(content)
    for source in (bytearray(content), memoryview(content)):
        assert torch.equal(classifier().read(source), expected)
        assert [found.error for found in classifier().predict(source)] == [None]
        assert len(classifier().predict([source, content])) == 2


def deep_png(values: np.ndarray, colour: int, clear: bytes = b"") -> bytes:
    """A PNG of 16 bits per value, which Pillow writes of grey alone; `colour` is PNG's number of a kind of pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, colour, 0, 0, 0))]
    chunks += [(b"tRNS", clear)] * bool(clear)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_of_sixteen_bits_the_upper_eight_count_in_grey_as_in_colour(tmp_path: Path) -> None:
    deep = np.random.default_rng(0).integers(0, 65536, (13, 17), dtype=np.uint16)
    deep[0, :3] = (0, 65535, 1000)
    upper = torch.from_numpy((deep >> 8).astype(np.float32) / 255)
    colours, opaque = np.repeat(deep[:, :, None], 3, axis=2), np.full((13, 17, 1), 65535, dtype=np.uint16)
    ours = classifier(1, (13, 17))
    grey = Image.fromarray(deep)
    grey.save(tmp_path / "deep.tif")
    (tmp_path / "deep.pgm").write_bytes(b"P5 17 13 65535\n" + deep.astype(">u2").tobytes())
    for source in (
        deep_png(deep, 0),
        deep_png(colours, 2),
        deep_png(np.concatenate([deep[:, :, None], opaque], axis=2), 4),
        deep_png(np.concatenate([colours, opaque], axis=2), 6),
        tmp_path / "deep.tif",
        tmp_path / "deep.pgm",
        grey,
    ):
        assert torch.allclose(ours.read(source)[0], upper, atol=1e-6)
    clear = ours.read(deep_png(deep, 0, clear=struct.pack(">H", 1000)))[0]
    assert clear[0, :3].tolist() == [0, 1, 1]
    exif = Image.Exif()
    exif[0x0112] = 6
    grey.save(tmp_path / "lying.png", exif=exif)
    assert torch.allclose(classifier(1, (17, 13)).read(tmp_path / "lying.png")[0], upper.rot90(-1), atol=1e-6)


def test_a_picture_that_was_turned_says_nothing_that_would_turn_it_again(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(picture(size=(8, 8))).save(tmp_path / "a.png", exif=exif)
    for turned in (read_image(tmp_path / "a.png"), plain_image(Image.open(tmp_path / "a.png"), "a")):
        assert 0x0112 not in turned.getexif()
        assert torch.equal(classifier().read(turned), classifier().read(tmp_path / "a.png"))


def test_a_model_without_an_answer() -> None:
    found = classifier().predict(torch.zeros(1, 3, 8, 8), keep_going=True)
    assert found[0].error is None
    silent = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), ("a", "b", "c", "d"), 3, (8, 8))
    silent.model[1].weight.data.fill_(torch.nan)  # type: ignore[index]
    (answer,) = silent.predict(torch.zeros(1, 3, 8, 8))
    assert "no answer" in str(answer.error)


def test_distance_is_hamming_for_sure_members_and_half_of_what_tanh_scores_lack() -> None:
    code = load_code("10x10")
    symbols = torch.from_numpy(code.symbols.astype("int64"))
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (20, 10)))
    hamming = (bits[:, None] != symbols[None]).sum(dim=2)
    found = codeword_distances((2.0 * bits - 1) * 30, symbols)
    assert torch.allclose(found, hamming.to(found.dtype), atol=1e-6)
    two = torch.stack([1 - bits, bits], dim=2) * 60.0
    assert torch.allclose(codeword_distances(two, symbols), hamming.to(found.dtype), atol=1e-6)
    logits = torch.randn(20, 10)
    scores = ecnn.ECNN(code, 1).decode(logits)
    assert torch.allclose(codeword_distances(logits, symbols), (10 - scores) / 2, atol=1e-5)


def test_rejection_loses_the_share_of_validation_images_that_it_may() -> None:
    torch.manual_seed(0)
    model = ecnn.ECNN(load_code("10x10"), 1, depth=8, width=4)
    images = torch.randint(0, 256, (200, 1, 8, 8), dtype=torch.uint8)
    ours = Classifier(model, tuple("0123456789"), 1, (8, 8))
    limit = ours.reject_distance(Split(images, torch.zeros(200, dtype=torch.int64)), 0.1)
    found = ours.predict(images.numpy(), reject=limit)
    assert sum(prediction.rejected for prediction in found) == 20
    assert all(prediction.rejected == (float(prediction.distance or 0) > limit) for prediction in found)
    with pytest.raises(InputError, match="no codewords"):
        classifier().predict([], reject=1.0)
    with pytest.raises(InputError, match="needs validation images"):
        ours.reject_distance(Split(images[:0], torch.zeros(0, dtype=torch.int64)))


@pytest.mark.parametrize("symbols", [False, True])
def test_an_attack_that_knows_the_rejection_is_needed_and_enough(symbols: bool) -> None:
    """Members are linear here: near the border between two classes they disagree, and only beyond it is accepted."""
    model = Saturated(scale=6, symbols=symbols)
    images, labels = images_of_classes(2)
    split = Split(images, labels)
    limit = float(Classifier(model, tuple("0123456789"), 1, (4, 4)).distances(images).max()) + 0.5
    common: dict[str, Any] = {"norm": "linf", "eps": 0.5, "steps": 20, "step_size": 0.05, "start": "image"}
    unaware = evaluate_rejection(model, split, PGD(on="linear", **common), reject=limit)
    aware = evaluate_rejection(model, split, PGD(on=Accepted(reject=limit), **common), reject=limit)
    targeted = PGD(on=Accepted(reject=limit), targets=3, **common)
    assert (unaware.kept.successes, unaware.right.successes) == (20, 20)
    assert unaware.fooled.successes < 10  # it stops as soon as the class is wrong, and there it is rejected
    assert unaware.attacked_rejected.successes > 10
    assert aware.fooled.successes == 20
    assert aware.attacked_rejected.successes == 0
    assert evaluate_rejection(model, split, targeted, reject=limit).fooled.successes == 20
    attacked = PGD(on=Accepted(reject=limit), **common)(model, images, labels)
    assert (model(attacked).argmax(dim=1) != labels).all()
    assert float((attacked - images).abs().max()) <= 0.5 + 1e-6
    assert "accepted and wrong" in str(aware)


def test_an_image_that_is_wrong_and_rejected_at_first_is_attacked_too() -> None:
    model = Saturated(scale=6)
    images, labels = images_of_classes(1)
    limit = float(Classifier(model, tuple("0123456789"), 1, (4, 4)).distances(images).max()) + 0.5
    between = (images[:1] + images[1:2]) / 2 + 0.01 * (images[1:2] - images[:1])  # between the two classes
    attack = PGD(on=Accepted(reject=limit), norm="linf", eps=0.5, steps=20, step_size=0.05, start="image")
    nothing = PGD(on=Accepted(reject=limit), norm="linf", eps=0.0, steps=1, step_size=0.05, start="image")
    split = Split(between.float(), labels[:1])
    assert evaluate_rejection(model, split, nothing, reject=limit).kept.successes == 0
    assert evaluate_rejection(model, split, nothing, reject=limit).fooled.successes == 0
    assert evaluate_rejection(model, split, attack, reject=limit).fooled.successes == 1


def test_what_a_rejection_needs() -> None:
    split = Split(torch.rand(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64))
    attack = PGD(norm="linf", eps=0.1, steps=1, step_size=0.1)
    with pytest.raises(InputError, match="only a model with a code"):
        evaluate_rejection(Means(), split, attack, reject=1)
    with pytest.raises(InputError, match="on no images"):
        evaluate_rejection(Saturated(), split, attack, reject=1, limit=0)
    with pytest.raises(InputError, match="reject must be a number"):
        Accepted(reject=-1)


def test_names_travel_with_the_run_and_are_known_for_shipped_models(tmp_path: Path) -> None:
    assert load_classifier("cifar10-ecnn30").class_names[3] == "cat"
    assert runs.class_names("mnist-tanh16") == tuple("0123456789")
    assert CLASS_NAMES["digits"] == load_data("digits").class_names
    assert len(CLASS_NAMES["gtsrb"]) == 43
    shown = load_classifier("mnist-tanh16").predict(np.zeros((28, 28), np.uint8), top=16)[0]
    assert sum(guess.name.startswith("none (codeword 1") for guess in shown.guesses) == 6


def test_weights_without_a_spec_are_not_enough(tmp_path: Path) -> None:
    data = load_data("digits")
    model = ecnn.ECNN(load_code("10x10"), 1, depth=8, width=2)
    ecnn.fit(model, data.train.take(64), val=None, recipe="small", epochs=1, seed=0, run_dir=tmp_path)
    with pytest.raises(InputError, match=r"has no spec\.toml, .* make a Classifier"):
        load_classifier(tmp_path)


def train(folder: Path) -> None:
    write_pictures(folder / "own", {"bird house": 8, 'été, "so"': 8}, size=(8, 8), mode="L")
    small = [
        "model.width=2",
        "model.depth=8",
        "code.code_length=3",
        "code.steps=200",
        "train.epochs=1",
        "train.batch_size=4",
    ]
    words = [
        "train",
        "--data",
        str(folder / "own"),
        "--out",
        str(folder / "run"),
        *(word for entry in small for word in ("--set", entry)),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


def test_the_command_names_classes_and_says_which_file_cannot_be_used(tmp_path: Path) -> None:
    train(tmp_path)
    run = tmp_path / "run"
    assert runs.class_names(run) == ("bird house", 'été, "so"')
    (tmp_path / "cut.png").write_bytes((tmp_path / "own" / "bird house" / "000.png").read_bytes()[:60])
    words = ["predict", str(run), str(tmp_path / "own"), str(tmp_path / "cut.png"), "--reject", "5%"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert len(done.stdout.splitlines()) == 16
    assert done.stderr.startswith(f"ecnn: {tmp_path / 'cut.png'} cannot be read as an image")
    assert len(done.stderr.splitlines()) == 1
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert found["class_names"] == ["bird house", 'été, "so"']
    assert found["predictions"][16]["error"]
    rows = list(csv.DictReader(io.StringIO(CliRunner().invoke(app, [*words, "--csv", "--top", "2"]).stdout)))
    for row, entry in zip(rows, found["predictions"][:16], strict=False):
        assert row["class"] == entry["guesses"][0]["name"]
        assert float(row["probability_2"]) == entry["guesses"][1]["probability"]
        assert row["rejected"] == str(entry["rejected"])
    for wrong, sentence in (
        (["--json", "--csv"], "give one"),
        (["--reject", "far"], "must be a distance"),
        (["--reject", "300%"], "share to be flagged must be"),
        (["--top", "0"], "top must be"),
    ):
        refused = CliRunner().invoke(app, [*words[:3], *wrong])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert sentence in refused.stderr
    (tmp_path / "own" / "bird house" / "000.png").rename(tmp_path / "own" / "bird house" / "x.png")
    refused = CliRunner().invoke(app, words)  # the distance would be chosen on other images
    assert "are not those that the model was trained on" in refused.stderr
    classes = run / "classes.json"
    classes.write_text(classes.read_text().replace("bird", "lizard"))
    with pytest.raises(InputError, match=r"classes\.json was damaged or changed"):
        runs.class_names(run)
    (run / "DONE").unlink()
    files.write_json(classes, ["one"])
    with pytest.raises(InputError, match="should name 2 classes, not 1"):
        runs.class_names(run)


def test_a_line_of_predict_is_one_whatever_the_names_are() -> None:
    found = Prediction(image="a\nb.png", guesses=(Guess(0, "two\nlines\x1b[31m", 1.0),), margin=1.0)
    assert _as_text([found]) == "a?b.png  two?lines?[31m 100.0 %   margin 1.00\n"
