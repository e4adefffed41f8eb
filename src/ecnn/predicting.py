"""Prediction with a trained model: pictures in, named classes out, and an option to reject."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ecnn import files, runs
from ecnn.asking import in_usual_state, read_model, undisturbed
from ecnn.attacks import Attack
from ecnn.attacks.views import decoded_scores, has_code, members_of
from ecnn.backbones import MOST_OF_ANYTHING
from ecnn.checks import check_count, check_entries, check_number, kind_of
from ecnn.data import Split
from ecnn.data.formats import decode_image, pixels_of, plain_image, read_image
from ecnn.data.sources import IMAGE_SUFFIXES
from ecnn.errors import InputError
from ecnn.evaluation import Rate
from ecnn.objectives import codeword_distances, flagging_threshold, predicted_classes
from ecnn.training.loop import BEST

if TYPE_CHECKING:
    from PIL import Image

BATCH_SIZE = 64
#: Format and version of config.json, which describes the model in a folder without a spec.
CONFIG_FORMAT, CONFIG_VERSION = "ecnn-pretrained", 1
_BYTES = bytes | bytearray | memoryview
_GREY = (0.299, 0.587, 0.114)  # weights of red, green and blue, as in Pillow


@dataclass(frozen=True)
class Guess:
    """A class that an image may show: its number, its name and its softmax probability."""

    label: int
    name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The result of a classifier for one image.

    Attributes:
        image: its path or, without one, "image 3" for the image at index 3.
        guesses: the most probable classes, best first; empty if there is an error.
        margin: difference between the best and the second best score.
        distance: expected number of members that disagree with the nearest codeword; None for a model without a code.
        rejected: whether the distance is above the `reject` that was asked for.
        error: why there is no answer: the image could not be used, or the model's scores are not numbers.
    """

    image: str
    guesses: tuple[Guess, ...] = ()
    margin: float | None = None
    distance: float | None = None
    rejected: bool = False
    error: str | None = None

    @property
    def name(self) -> str | None:
        """Name of the most probable class; None if there is an error."""
        return self.guesses[0].name if self.guesses else None

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Reading:
    """Outputs of a model for some images, on the CPU and in float32 or better.

    Attributes:
        scores: (image, class).
        member_logits: (image, member) or (image, member, symbol); None for a model without a code.
        distances: (image, class) expected number of members that disagree with each codeword; None for a model without
            a code.
    """

    scores: Tensor
    member_logits: Tensor | None = None
    distances: Tensor | None = None

    @property
    def nearest(self) -> Tensor:
        """(image,) distance to the nearest codeword; empty for a model without a code."""
        return torch.zeros(0) if self.distances is None else self.distances.amin(dim=1)

    def take(self, rows: slice) -> Reading:
        """The outputs for some of the images."""
        parts = (self.scores, self.member_logits, self.distances)
        return Reading(*(None if part is None else part[rows] for part in parts))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Classifier:
    """A trained model with the form of its images and the names of its classes. `load_classifier` loads one of a run.

    Attributes:
        model: from pixels (batch, channel, height, width) in [0, 1] to scores.
        class_names: in the order of the scores. A model may have more scores, of codewords that belong to no class;
            predictions name them "none (codeword ...)".
        in_channels: 1 for grey images, 3 for colour.
        image_size: (height, width) in pixels.
    """

    model: nn.Module
    class_names: tuple[str, ...]
    in_channels: int
    image_size: tuple[int, int]

    def predict(
        self,
        images: Any,
        *,
        top: int = 1,
        reject: float | None = None,
        keep_going: bool = False,
        batch_size: int = BATCH_SIZE,
    ) -> list[Prediction]:
        """One prediction per image, in their order.

        Args:
            images: one image or several: paths of files or folders, the bytes of a file, Pillow images, arrays or
                tensors. An array of bytes is read as (height, width, channel); floats in [0, 1], and every tensor, as
                (channel, height, width). If only the other order gives 1, 3 or 4 channels, that one is taken. Two axes
                are a grey image; of four axes the first counts images. Images are converted and resized like a folder
                of images for training.
            top: how many classes to name.
            reject: images further than this from every codeword are rejected (`reject_distance` chooses it).
            keep_going: an image that cannot be used gives a prediction with an `error`; otherwise an InputError.
            batch_size: images per forward pass.
        """
        check_count("top", top, most=MOST_OF_ANYTHING)
        check_count("batch_size", batch_size)
        if reject is not None:
            check_number("reject", reject)
            check_has_code(self.model)
        sources, found = list(_each(images)), dict[int, Prediction]()
        for start in range(0, len(sources), batch_size):
            pixels: dict[int, Tensor] = {}
            for place in range(start, min(start + batch_size, len(sources))):
                name, source = sources[place]
                try:
                    pixels[place] = self._read(source, name)
                except InputError as error:
                    if not keep_going:
                        raise
                    found[place] = Prediction(name, error=str(error))
            if pixels:
                answers = self.describe(ask_model(self.model, torch.stack([*pixels.values()])), top, reject)
                found |= {
                    place: replace(answer, image=sources[place][0])
                    for place, answer in zip(pixels, answers, strict=True)
                }
        return [found[place] for place in range(len(sources))]

    def read(self, image: Any, name: str = "the image") -> Tensor:
        """(channel, height, width) the image as the model takes it, float32 in [0, 1]; `name` is for error messages."""
        return self._read(image, name)

    def distances(self, images: Tensor) -> Tensor:
        """(image,) expected number of members that disagree with the nearest codeword.

        Args:
            images: (image, channel, height, width) in [0, 1].
        """
        check_has_code(self.model)
        return torch.cat([ask_model(self.model, batch).nearest for batch in torch.split(images, BATCH_SIZE)])

    def reject_distance(self, val: Split, share: float = 0.05) -> float:
        """The distance that this share of the validation images exceeds: what to pass as `reject`.

        Args:
            val: images neither trained on nor tested on, as `load_data(...).val`.
            share: largest share of good images that may be rejected.
        """
        if len(val) == 0:
            raise InputError("choosing a distance to reject by needs validation images, and there are none.")
        return float(flagging_threshold(self.distances(val[:][0]), share))

    def describe(self, reading: Reading, top: int = 1, reject: float | None = None) -> Iterator[Prediction]:
        """One prediction per image from the model's outputs; their `image` is still empty."""
        scores, distances = reading.scores, reading.nearest
        best = torch.softmax(scores.double(), dim=1).topk(min(top, scores.shape[1]), dim=1)
        leads = scores.double().topk(2, dim=1).values.diff(dim=1).neg()
        for row, label in enumerate(predicted_classes(scores).tolist()):
            if label < 0:
                yield Prediction(
                    "", error="the model gives no answer for this image: a score is not a number."
                )
                continue
            pairs = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
            distance = float(distances[row]) if len(distances) else None
            yield Prediction(
                "",
                guesses=tuple(Guess(number, self.class_name(number), share) for number, share in pairs),
                margin=float(leads[row]),
                distance=distance,
                rejected=reject is not None and distance is not None and distance > reject,
            )

    def class_name(self, label: int) -> str:
        """Name of the class with that index; "none (codeword ...)" for a codeword that belongs to no class."""
        return self.class_names[label] if label < len(self.class_names) else f"none (codeword {label})"

    def _read(self, source: Any, name: str) -> Tensor:
        if isinstance(source, InputError):
            raise source
        if isinstance(source, np.ndarray | Tensor):
            source = _as_planes(source, name)
            if source.dtype != np.uint8:
                return torch.from_numpy(self._fit_floats(source, name))
        pixels = pixels_of(
            _picture(source, name).convert("L" if self.in_channels == 1 else "RGB"), self.image_size
        )
        planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        return torch.from_numpy(planes.copy()).to(torch.float32) / 255

    def _fit_floats(self, planes: np.ndarray, name: str) -> np.ndarray:
        """Converts (channel, height, width) float32 to the model's channels and size, without rounding to bytes."""
        from PIL import Image

        if len(planes) == 4:
            # Transparent pixels are put on white, as in images from files.
            planes = planes[:3] * planes[3] + (1 - planes[3])
        if len(planes) == 3 and self.in_channels == 1:
            planes = np.tensordot(np.array(_GREY, dtype=np.float32), planes, axes=1)[None]
        elif len(planes) == 1:
            planes = np.repeat(planes, self.in_channels, axis=0)
        height, width = self.image_size
        if planes.shape[1:] != (height, width):
            resized = [
                Image.fromarray(plane).resize((width, height), Image.Resampling.BILINEAR) for plane in planes
            ]
            planes = np.stack([np.asarray(plane) for plane in resized])
        return np.ascontiguousarray(planes.clip(0, 1))


def load_classifier(source: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Classifier:
    """The model of a run folder, of a folder that `ecnn.hub` wrote, or a shipped one by name, ready for pictures."""
    model = runs.load_model(source, device=device)  # refuses a spec without the facts that are needed here
    folder = runs.run_folder(source)
    if not files.exists(folder / runs.SPEC) and files.exists(folder / runs.CONFIG):
        return _described_classifier(model, folder / runs.CONFIG)
    if not files.exists(folder / runs.SPEC):
        raise InputError(
            f"{folder} has no {runs.SPEC}, which would say what its images are: make a Classifier(model, class_names, "
            "in_channels, image_size) yourself."
        )
    facts = runs.read_spec(source).data
    assert facts.in_channels is not None
    assert isinstance(facts.image_size, list)
    height, width = facts.image_size
    return Classifier(model, runs.class_names(source), facts.in_channels, (height, width))


def _described_classifier(model: nn.Module, path: Path) -> Classifier:
    """The model with the form of its images and its classes from the config.json that `ecnn.hub` writes."""
    config = files.read_json(path)
    form = (config.get("format"), config.get("version")) if isinstance(config, dict) else None
    if form != (CONFIG_FORMAT, CONFIG_VERSION):
        raise InputError(f"{path} describes no model of this version of ecnn.")
    kinds = {"class_names": list[str], "in_channels": int, "image_size": list[int], "model": dict}
    check_entries(str(path), config, kinds)
    if len(config["image_size"]) != 2 or min(*config["image_size"], config["in_channels"]) < 1:
        raise InputError(f"{path}: image_size must be [height, width] and in_channels 1 or more.")
    if config["model"].get("num_classes") != len(config["class_names"]):
        raise InputError(
            f"{path} should name as many classes as its model has, not {len(config['class_names'])}."
        )
    files.check_described(path, config, path.with_name(BEST))
    height, width = config["image_size"]
    return Classifier(model, tuple(config["class_names"]), config["in_channels"], (height, width))


@dataclass(frozen=True)
class RejectionResult:
    """How well a model does that may reject images: rates over the same images, clean and attacked.

    Attributes:
        kept: share of clean images that are not rejected.
        right: share of clean images that are not rejected and correctly classified.
        fooled: share of images that are misclassified and not rejected, before or after the attack.
        attacked_rejected: share of attacked images that are rejected.
    """

    kept: Rate
    right: Rate
    fooled: Rate
    attacked_rejected: Rate

    def __str__(self) -> str:
        return (
            f"clean: {self.kept} accepted, {self.right} accepted and right\n"
            f"attacked: {self.attacked_rejected} rejected, {self.fooled} accepted and wrong"
        )


@in_usual_state
def evaluate_rejection(
    model: nn.Module, split: Split, attack: Attack, *, reject: float, limit: int | None = None, seed: int = 0
) -> RejectionResult:
    """How often an attack fools a model that rejects images far from every codeword.

    Use an attack that takes the rejection into account, `PGD(on=Accepted(reject=...), ...)`. Another one is no test.
    Images that are misclassified but rejected when clean are attacked too: if the attack has them accepted, the model
    is fooled.

    Args:
        model: with members and a code; images are moved to its device.
        split: test images.
        attack: an `Attack`, which should take the rejection into account.
        reject: images further than this from every codeword are rejected; choose it on validation images.
        limit: how many images, from the first; None for all.
        seed: of the attack.
    """
    check_number("reject", reject)
    check_has_code(model)
    split = split.take(limit)
    if len(split) == 0:
        raise InputError("a rejection cannot be evaluated on no images.")
    columns = []
    place = next(model.parameters(), torch.zeros(0, device="cpu")).device
    for start in range(0, len(split), BATCH_SIZE):
        images, labels = (values.to(place) for values in split[start : start + BATCH_SIZE])
        index = torch.arange(start, start + len(images), device=place)
        is_wrong, is_far = _verdict(model, images, labels, reject)
        attacked = attack(model, images, labels, seed=seed, index=index)
        again = torch.nonzero(is_wrong & is_far).squeeze(1)
        if len(again):
            whole = replace(attack, early_exit=False)
            attacked[again] = whole(model, images[again], labels[again], seed=seed, index=index[again])
        wrong_then, far_then = _verdict(model, attacked, labels, reject)
        fooled = (is_wrong & ~is_far) | (wrong_then & ~far_then)
        columns.append(torch.stack([~is_far, ~is_wrong & ~is_far, fooled, far_then]).cpu())
    counts = torch.cat(columns, dim=1).sum(dim=1).tolist()
    return RejectionResult(*(Rate(count, len(split)) for count in counts))


def _verdict(model: nn.Module, images: Tensor, labels: Tensor, reject: float) -> tuple[Tensor, Tensor]:
    """(image,) whether each is misclassified, and whether it is rejected."""
    reading = ask_model(model, images)
    is_wrong = predicted_classes(reading.scores).to(labels.device) != labels
    return is_wrong, reading.nearest.to(labels.device) > reject


@torch.no_grad()
def ask_model(model: nn.Module, images: Tensor) -> Reading:
    """The model's outputs for pixels (image, channel, height, width) in [0, 1], those of its members included."""
    images = images.to(next(model.parameters(), torch.zeros(0, device="cpu")).device)
    with undisturbed(model):
        if not has_code(model):
            return Reading(read_model(model, images).cpu())
        logits, symbols = members_of(model, images)
        scores = decoded_scores(model, logits)
        scores = read_model(model, images) if scores is None else scores
        return Reading(scores.cpu(), logits.cpu(), codeword_distances(logits, symbols).cpu())


def check_has_code(model: nn.Module) -> None:
    """Raises InputError unless the model has a code, without which it cannot reject."""
    if not has_code(model):
        raise InputError(
            f"{type(model).__name__} has no codewords to be far from: only a model with a code can reject."
        )


def _each(images: Any) -> Iterator[tuple[str, Any]]:
    """(name, image) for every single image; an image that is missing is an InputError in its place."""
    for number, (name, source) in enumerate(_listed(images)):
        yield name or f"image {number}", source


def _listed(images: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(images, str | os.PathLike):
        path = Path(images)
        if not str(images):
            yield "", InputError("the name of an image is empty.")
            return
        try:
            inside = files.below(path) if files.is_folder(path) else None
        except InputError as error:
            yield str(path), error
            return
        if inside is None:
            yield str(path), path
            return
        own = [entry for entry in inside if entry.suffix.lower() in IMAGE_SUFFIXES]
        if not own:
            yield str(path), InputError(f"{path} has no image ({', '.join(IMAGE_SUFFIXES)}) in it.")
        yield from ((str(entry), entry) for entry in own if not entry.name.startswith("."))
    elif hasattr(images, "read"):  # an open file, over which the last case would iterate line by line
        yield str(getattr(images, "name", "")), images.read()
    elif isinstance(images, np.ndarray | Tensor) and images.ndim == 4:
        yield from (("", image) for image in images)
    elif isinstance(images, np.ndarray | Tensor | _BYTES) or not isinstance(images, Iterable):
        yield "", images
    else:
        for image in images:
            yield from _listed(image)


def _picture(source: Any, name: str) -> Image.Image:
    """The picture that a path, the bytes of a file, an array of bytes or a Pillow image holds."""
    from PIL import Image

    if isinstance(source, Path):
        return read_image(source)
    if isinstance(source, _BYTES):
        return decode_image(bytes(source), name)
    if isinstance(source, np.ndarray):
        pixels = source.transpose(1, 2, 0)
        source = Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if len(source) == 1 else pixels))
    if not isinstance(source, Image.Image):
        raise InputError(
            f"{name} should be a path, the bytes of a file, a Pillow image, an array or a tensor, not "
            f"{kind_of(source)}."
        )
    return plain_image(source, name)


def _as_planes(image: np.ndarray | Tensor, name: str) -> np.ndarray:
    """The image as (channel, height, width), bytes or float32 in [0, 1]; InputError if it cannot be read so."""
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        array = (image.float() if image.is_floating_point() else image).numpy()  # NumPy has no bfloat16
    else:
        array = image
    is_bytes = array.dtype == np.uint8
    if not is_bytes and array.dtype.kind != "f":
        raise InputError(f"{name} should be bytes (uint8) or floats in [0, 1], not {array.dtype}.")
    is_flat = array.ndim == 2  # then its axes are known, even if it has only 1, 3 or 4 columns
    array = array[None] if is_flat else array
    last, first = (array.ndim == 3 and array.shape[axis] in (1, 3, 4) for axis in (2, 0))
    last = last and not is_flat
    if not (last or first) or 0 in array.shape:
        raise InputError(
            f"{name} should be (height, width), (height, width, channel) or (channel, height, width) with 1, 3 or 4 "
            f"channels, not {tuple(array.shape)}."
        )
    if last and not (first and (not is_bytes or isinstance(image, Tensor))):
        array = array.transpose(2, 0, 1)
    if is_bytes:
        return array
    array = array.astype(np.float32)
    if not ((array >= 0) & (array <= 1)).all():  # also false for nan
        raise InputError(f"{name} has values outside [0, 1]: divide by 255, or pass bytes (uint8).")
    return array
