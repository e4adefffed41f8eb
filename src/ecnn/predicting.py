"""Pictures in, named classes out: a trained model with all that it takes to use it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ecnn import runs
from ecnn.attacks.base import read_model
from ecnn.attacks.views import decoded_scores, members_of
from ecnn.backbones import undisturbed
from ecnn.checks import check_count, check_number
from ecnn.data import Split
from ecnn.data.formats import decode_image, pixels_of, plain_image, read_image
from ecnn.data.sources import IMAGE_SUFFIXES
from ecnn.errors import InputError
from ecnn.objectives import codeword_distances, flagging_threshold, predicted_classes

if TYPE_CHECKING:
    from PIL import Image

BATCH_SIZE = 64
_GREY = (0.299, 0.587, 0.114)  # of red, green and blue, as Pillow has them


@dataclass(frozen=True)
class Guess:
    """A class that an image may show: its number, its name and its probability."""

    label: int
    name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What a classifier says of one image.

    Attributes:
        image: its path, or "image 3" by its place among those given.
        guesses: the most probable classes, best first; none if there is an error.
        margin: by how much the best score leads the second.
        distance: expected number of members that disagree with the nearest codeword; None for a model without a code.
        rejected: whether that is more than what was asked for.
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
        """Of the most probable class."""
        return self.guesses[0].name if self.guesses else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Classifier:
    """A trained model with the form of its images and the names of its classes; `load_classifier` makes one of a run.

    Attributes:
        model: from pixels (batch, channel, height, width) in [0, 1] to scores.
        class_names: in the order of the scores. Scores beyond them, of codewords that no class has, are named so.
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
                tensors. Bytes in an array are (height, width, channel) and floats in [0, 1] (channel, height, width),
                unless only the other reading gives 1, 3 or 4 channels; an axis of images may come first. They are
                converted and resized as a folder of images is for training.
            top: how many classes to name.
            reject: images further than this from every codeword are rejected (`reject_distance` chooses it).
            keep_going: an image that cannot be used gives a prediction with an `error`; otherwise an InputError.
        """
        check_count("top", top)
        check_count("batch_size", batch_size)
        if reject is not None:
            check_number("reject", reject)
            self._check_has_code()
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
                answers = self._answers(torch.stack([*pixels.values()]), top, reject)
                found |= {
                    place: replace(answer, image=sources[place][0])
                    for place, answer in zip(pixels, answers, strict=True)
                }
        return [found[place] for place in range(len(sources))]

    def read(self, image: Any) -> Tensor:
        """(channel, height, width) the image as the model takes it, float32 in [0, 1]."""
        return self._read(image, "the image")

    def distances(self, images: Tensor) -> Tensor:
        """(image,) expected number of members that disagree with the nearest codeword.

        Args:
            images: (image, channel, height, width) in [0, 1].
        """
        self._check_has_code()
        return torch.cat([self._ask(batch)[1] for batch in torch.split(images, BATCH_SIZE)])

    def reject_distance(self, val: Split, share: float = 0.05) -> float:
        """The distance that this share of the validation images exceeds: what to pass as `reject`.

        Args:
            val: images neither trained on nor tested on, as `load_data(...).val`.
            share: of good images that may be lost.
        """
        if len(val) == 0:
            raise InputError("a distance to reject by needs validation images, and there are none.")
        return float(flagging_threshold(self.distances(val[:][0]), share))

    def _answers(self, images: Tensor, top: int, reject: float | None) -> Iterator[Prediction]:
        """What the model says of each image, which has no name yet."""
        scores, distances = self._ask(images)
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
                guesses=tuple(Guess(number, self._name(number), share) for number, share in pairs),
                margin=float(leads[row]),
                distance=distance,
                rejected=reject is not None and distance is not None and distance > reject,
            )

    @torch.no_grad()
    def _ask(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(image, class) scores, and (image,) distances or, of a model without a code, none; on the CPU."""
        first = next(self.model.parameters(), torch.zeros(0))
        images = images.to(first.device)
        with undisturbed(self.model):
            if not self._has_code:
                return read_model(self.model, images).cpu(), torch.zeros(0)
            logits, symbols = members_of(self.model, images)
            scores = decoded_scores(self.model, logits)
            nearest = codeword_distances(logits, symbols).amin(dim=1)
            return (read_model(self.model, images) if scores is None else scores).cpu(), nearest.cpu()

    @property
    def _has_code(self) -> bool:
        return hasattr(self.model, "member_logits") and hasattr(self.model, "code")

    def _check_has_code(self) -> None:
        if not self._has_code:
            raise InputError(
                f"{type(self.model).__name__} has no codewords to be far from: only a model with a code can reject."
            )

    def _name(self, label: int) -> str:
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
        """The same conversion of (channel, height, width) float32 without rounding to bytes."""
        from PIL import Image

        planes = planes[:3]  # what is transparent counts as it is, as in files
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
    """The model of a run folder, or a shipped one by its name, ready for pictures."""
    facts = runs.read_spec(source).data
    model = runs.load_model(source, device=device)  # refuses a spec without these facts
    assert facts.in_channels is not None
    assert isinstance(facts.image_size, list)
    height, width = facts.image_size
    return Classifier(model, runs.class_names(source), facts.in_channels, (height, width))


def _each(images: Any) -> Iterator[tuple[str, Any]]:
    """Every single image with its name; in place of one that is not there, the InputError that says so."""
    for number, (name, source) in enumerate(_listed(images)):
        yield name or f"image {number}", source


def _listed(images: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(images, str | os.PathLike):
        path = Path(images)
        if not path.is_dir():
            yield str(path), path
            return
        own = sorted(entry for entry in path.rglob("*") if entry.suffix.lower() in IMAGE_SUFFIXES)
        if not own:
            yield str(path), InputError(f"{path} has no image ({', '.join(IMAGE_SUFFIXES)}) in it.")
        yield from ((str(entry), entry) for entry in own if not entry.name.startswith("."))
    elif isinstance(images, np.ndarray | Tensor) and images.ndim == 4:
        yield from (("", image) for image in images)
    elif isinstance(images, np.ndarray | Tensor | bytes) or not isinstance(images, Iterable):
        yield "", images
    else:
        for image in images:
            yield from _listed(image)


def _picture(source: Any, name: str) -> Image.Image:
    """The picture that a path, the bytes of a file, an array of bytes or a Pillow image holds."""
    from PIL import Image

    if isinstance(source, Path):
        return read_image(source)
    if isinstance(source, bytes):
        return decode_image(source, name)
    if isinstance(source, np.ndarray):
        pixels = source.transpose(1, 2, 0)
        source = Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if len(source) == 1 else pixels))
    if not isinstance(source, Image.Image):
        raise InputError(
            f"{name} should be a path, the bytes of a file, a Pillow image, an array or a tensor, not a "
            f"{type(source).__name__}."
        )
    return plain_image(source, name)


def _as_planes(image: np.ndarray | Tensor, name: str) -> np.ndarray:
    """(channel, height, width) of bytes or of float32 in [0, 1]."""
    array = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    is_bytes = array.dtype == np.uint8
    if not is_bytes and array.dtype.kind != "f":
        raise InputError(f"{name} should be bytes (uint8) or floats in [0, 1], not {array.dtype}.")
    if array.ndim == 2:
        array = array[None]
    last, first = (array.ndim == 3 and array.shape[axis] in (1, 3, 4) for axis in (2, 0))
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
