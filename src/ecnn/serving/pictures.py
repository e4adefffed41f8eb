"""Decodes the pictures of requests, and encodes those of answers."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecnn.data.formats import TooManyPixels, decode_image
from ecnn.errors import InputError
from ecnn.predicting import Classifier
from ecnn.serving.limits import Limits

#: Formats of image files that are read, as Pillow names them. Decoders of other formats are unsafe on untrusted files.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_LONGEST_NAME = 100


def read_pictures(classifier: Classifier, sources: Sequence[tuple[str, Any]], limits: Limits) -> Tensor:
    """(image, channel, height, width) pictures in the form that the model takes; InputError if one cannot be used.

    Args:
        classifier: tells the form, and converts the pictures to it.
        sources: (name, picture): the bytes of an image file, base64 of them, or nested lists of numbers in [0, 1].
        limits: on the number of images and of pixels.
    """
    if not sources:
        raise InputError("a request needs at least one image, and this one has none.")
    if len(sources) > limits.images:
        raise too_many_images(limits.images)
    left, found = limits.pixels, []
    for name, source in sources:
        name = name[:_LONGEST_NAME]
        if isinstance(source, str):
            source = _from_base64(source, name)
        if isinstance(source, bytes):
            try:
                picture = decode_image(source, name, formats=FORMATS, most_pixels=left)
            except TooManyPixels as error:
                raise _too_many_pixels(name, limits) if error.most == left else error from None
            left -= picture.width * picture.height
            found.append(classifier.read(picture, name))
        else:
            planes = _from_lists(source, name)
            left -= planes.size
            if left < 0:
                raise _too_many_pixels(name, limits)
            found.append(classifier.read(planes, name))
    return torch.stack(found)


def too_many_images(most: int) -> InputError:
    """The error for a request with more than `most` images."""
    return InputError(f"the request has more images than it may, {most}: send several requests.")


def _too_many_pixels(name: str, limits: Limits) -> InputError:
    return InputError(
        f"with {name} the request has more than {limits.pixels:,} pixels, and all its images together may have no "
        "more: send smaller ones, or several requests."
    )


def _from_base64(text: str, name: str) -> bytes:
    """The bytes that the text encodes; a prefix such as "data:image/png;base64," is skipped."""
    start = text.partition(",")[2] if text.startswith("data:") else text
    try:
        return base64.b64decode("".join(start.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{name} is a text, but no base64 of an image file: {error}.") from error


def _from_lists(values: Any, name: str) -> np.ndarray:
    """A float32 array of any shape, from nested lists of numbers in [0, 1]."""
    try:
        array = np.array(values)
    except (ValueError, OverflowError, RecursionError):
        raise InputError(f"{name} should be rows of equal length, of numbers from 0 to 1.") from None
    if array.dtype.kind not in "fiu":
        raise InputError(f"{name} should be base64 of an image file, or numbers from 0 to 1 in nested lists.")
    if not ((array >= 0) & (array <= 1)).all():  # also false for nan
        raise InputError(f"{name} has values outside [0, 1]: divide bytes by 255.")
    return array.astype(np.float32)


def to_png(image: Tensor) -> str:
    """Base64 of a PNG of an image (channel, height, width) in [0, 1], rounded to bytes."""
    from PIL import Image

    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    written = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(written, format="PNG")
    return base64.b64encode(written.getvalue()).decode()


def rounded(image: Tensor) -> Tensor:
    """The image rounded as `to_png` does: its pixels are multiples of 1/255."""
    return (image.clamp(0, 1) * 255).round() / 255


def perturbation_png(moves: Tensor) -> str:
    """Base64 of a PNG of a perturbation, scaled to its largest change: that is black or white, and mid grey is none."""
    largest = float(moves.abs().max())
    return to_png(0.5 + moves / (2 * largest if largest > 0 else 1))
