"""Readers of the file formats that datasets come in; a file that is cut short, altered or hostile is an InputError."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import pickle
import pickletools
import re
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ecnn import files
from ecnn.errors import InputError
from ecnn.progress import Progress

if TYPE_CHECKING:
    from PIL import Image

_GREY_MODES = ("1", "L", "LA", "La")
_DEEP_MODES = ("I", "F")  # 32 bits per value, whose range is unknown
_DEEP_FORMATS = ("PNG", "PPM")  # in these formats mode "I" has 16 bits
_CLEAR_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
_ORIENTATION = 0x0112  # number of the tag in EXIF
_IDX_HEAD = 4
_MOST_ARRAYS = 16
_MOST_RESIZED = 2**30


def read_checked(path: Path, sha256: str | None) -> bytes:
    """The bytes of a file; InputError unless it has this SHA-256, if one is given."""
    content = files.read_bytes(path)
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise InputError(
            f"{path} is not the official file: its SHA-256 is {found} instead of {sha256}, so it was truncated or "
            "altered; delete it and fetch it again."
        )
    return content


def gunzip(content: bytes, path: Path) -> bytes:
    """The content of a .gz file."""
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a whole gzip file: {error}.") from error


def read_idx(content: bytes, path: Path, ndim: int) -> np.ndarray:
    """The uint8 array in an idx file, MNIST's format: a magic number, the sizes of all axes, then the values."""
    head = _IDX_HEAD + 4 * ndim
    magic = bytes((0, 0, 8, ndim))
    if content[:_IDX_HEAD] != magic:
        raise InputError(
            f"{path} is not an idx file of bytes with {ndim} axes: it starts with {content[:4].hex()} instead of "
            f"{magic.hex()}."
        )
    if len(content) < head:
        raise InputError(f"{path} is cut short: an idx file has {head} bytes before its values.")
    shape = struct.unpack(f">{ndim}I", content[_IDX_HEAD:head])
    if len(content) - head != math.prod(shape):
        raise InputError(
            f"{path} promises {' x '.join(map(str, shape))} values but holds {len(content) - head}: it is cut short "
            "or damaged."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape)


class _ArrayUnpickler(pickle.Unpickler):
    """Reads lists, dictionaries, texts, numbers and arrays; a pickle that asks for anything else is refused.

    The functions that a pickled array calls are replaced by harmless ones, which take no more memory than the pickle.
    """

    def __init__(self, content: bytes) -> None:
        for opcode, argument, _ in pickletools.genops(content):
            # Both would allocate as much memory as the pickle says.
            if opcode.name == "BYTEARRAY8" or ("PUT" in opcode.name and int(argument or 0) > len(content)):
                raise pickle.UnpicklingError(f"its {opcode.name} asks for more memory than a dataset needs")
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.bytes_left, self.arrays_left = len(content), _MOST_ARRAYS
        self.harmless = {
            ("numpy.core.multiarray", "_reconstruct"): self._empty_array,
            ("numpy._core.multiarray", "_reconstruct"): self._empty_array,
            ("numpy", "ndarray"): "ndarray",
            ("numpy", "dtype"): _plain_dtype,
            ("_codecs", "encode"): self._latin1,
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.harmless:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no dataset needs")
        return self.harmless[module, name]

    def _empty_array(self, *_: Any) -> np.ndarray:
        """The start of every array. The pickle then gives shape and values, which NumPy checks against each other."""
        self.arrays_left -= 1
        if self.arrays_left < 0:
            raise pickle.UnpicklingError(f"it holds more than {_MOST_ARRAYS} arrays")
        return np.empty(0, dtype=np.uint8)

    def _latin1(self, text: str, encoding: str) -> bytes:
        """Replaces `_codecs.encode`, with which pickles of protocol 2 hold bytes; only Latin-1 is allowed."""
        self.bytes_left -= len(text)
        if encoding != "latin1" or self.bytes_left < 0:
            raise pickle.UnpicklingError(f"the encoding {encoding!r}, or more text than it holds")
        return text.encode("latin1")


def _plain_dtype(kind: str | bytes, *_: Any) -> np.dtype[Any]:
    name = kind.decode("latin1") if isinstance(kind, bytes) else str(kind)
    if not re.fullmatch(r"[<>|]?[biuf][1248]", name):
        raise pickle.UnpicklingError(f"an array of {name!r}, which no dataset needs")
    return np.dtype(name)


def read_pickle(content: bytes, path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """The named entries of a dictionary pickled by Python 2. No code that the pickle names is run."""
    try:
        value = _ArrayUnpickler(content).load()
    # Damaged pickles raise nearly every kind of error.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} is refused as a pickle of plain arrays: {reason}.") from error
    entries = {}
    if isinstance(value, dict):
        entries = {key.decode("latin1") if isinstance(key, bytes) else key: value[key] for key in value}
    missing = [key for key in keys if key not in entries]
    if missing:
        raise InputError(f'{path} has no entry "{missing[0]}", which a CIFAR file has.')
    return {key: entries[key] for key in keys}


def read_images(
    paths: Sequence[Path], *, image_size: tuple[int, int] | None, progress: Progress | None = None
) -> np.ndarray:
    """(image, channel, height, width) uint8 from image files: one channel if all are grey, else RGB.

    Args:
        image_size: (height, width) that every image is resized to, bilinearly; None if all have the same size.
    """
    pictures: list[np.ndarray] = []
    for done, path in enumerate(paths, start=1):
        picture = pixels_of(read_image(path), image_size)
        if pictures and picture.shape[:2] != pictures[0].shape[:2]:
            raise InputError(
                f"the images have different sizes ({paths[0]}: {_size(pictures[0])}, {path}: {_size(picture)} "
                "pixels): pass image_size."
            )
        if not pictures:
            check_memory(len(paths) * picture.nbytes, files.MAX_ARRAY_BYTES)
        pictures.append(picture)
        if progress is not None and (done % 256 == 0 or done == len(paths)):
            progress(done, len(paths), "images read")
    if any(picture.ndim == 3 for picture in pictures):
        stacked = np.stack(
            [
                picture if picture.ndim == 3 else np.repeat(picture[:, :, None], 3, axis=2)
                for picture in pictures
            ]
        )
        return np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))
    return np.stack(pictures)[:, None]


def resize(
    images: np.ndarray, image_size: tuple[int, int] | None, progress: Progress | None = None
) -> np.ndarray:
    """(image, channel, height, width) images resized bilinearly to `image_size`; unchanged if that is None."""
    if image_size is None or images.shape[2:] == image_size:
        return images
    from PIL import Image

    height, width = image_size
    check_memory(math.prod(images.shape[:2]) * height * width, _MOST_RESIZED)
    resized = np.empty((*images.shape[:2], height, width), dtype=np.uint8)
    for number, image in enumerate(images):
        for channel, plane in enumerate(image):
            picture = Image.fromarray(np.ascontiguousarray(plane))
            resized[number, channel] = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
        if progress is not None and ((number + 1) % 256 == 0 or number + 1 == len(images)):
            progress(number + 1, len(images), "images resized")
    return resized


def check_memory(needed: int, most: int) -> None:
    """Raises InputError if images would take more than `most` bytes."""
    if needed > most:
        raise InputError(
            f"the images would take {needed / 2**30:.1f} GiB of memory, more than {most / 2**30:.0f}: use fewer "
            "images or a smaller image_size."
        )


def read_image(path: Path) -> Image.Image:
    """The picture in a file, grey ("L") or "RGB"."""
    return decode_image(files.read_bytes(path, most=files.MAX_IMAGE_BYTES), str(path))


def header_size(path: Path) -> tuple[int, int] | None:
    """(height, width) that an image file will have when it is read; None if it cannot be read as an image."""
    from PIL import Image

    try:
        with _quietly(), Image.open(io.BytesIO(files.read_bytes(path, most=files.MAX_IMAGE_BYTES))) as image:
            # EXIF behind the pixels of a PNG is ignored: to read it, Pillow would decode all pixels.
            is_known = image.format != "PNG" or "exif" in image.info
            upright = _upright(image) if is_known and _orientation(image) > 4 else image
            return upright.height, upright.width
    except Exception:  # the error is raised when the image is read
        return None


@contextmanager
def _quietly() -> Iterator[None]:
    """Silences Pillow's warnings inside, such as those on damaged EXIF; only too many pixels are an error."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


class TooManyPixels(InputError):  # noqa: N818 what happened, not a fault
    """An image has more than `most` pixels, too many to be decoded."""

    def __init__(self, name: str, most: int) -> None:
        super().__init__(f"{name} has more than {most:,} pixels, and no more are read: make it smaller.")
        self.most = most


@contextmanager
def _in_one_sentence(name: str, most_pixels: int | None = None) -> Iterator[None]:
    """Turns every error of Pillow inside into an InputError that calls the picture by this name."""
    from PIL import Image, UnidentifiedImageError

    try:
        with _quietly():
            yield
    except InputError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        most = Image.MAX_IMAGE_PIXELS or 0  # not None here, or Pillow would not have raised this
        raise TooManyPixels(name, most if most_pixels is None else min(most, most_pixels)) from error
    except UnidentifiedImageError as error:
        raise InputError(
            f"{name} cannot be read as an image: it is not one, or of an unknown kind."
        ) from error
    # Pillow's decoders raise many kinds of error for damaged files.
    except Exception as error:
        raise InputError(f"{name} cannot be read as an image: {_first_line(error)}.") from error


def decode_image(
    content: bytes, name: str, *, formats: tuple[str, ...] | None = None, most_pixels: int | None = None
) -> Image.Image:
    """The picture in the bytes of an image file, as from `plain_image`; `name` is for error messages.

    Args:
        formats: the only formats to try, by Pillow's names; None for all that it knows.
        most_pixels: a larger image is refused (TooManyPixels) before it is decoded; None for Pillow's own limit.
    """
    from PIL import Image

    with (
        _in_one_sentence(name, most_pixels),
        Image.open(io.BytesIO(content), formats=formats) as image,
    ):
        if most_pixels is not None and image.width * image.height > most_pixels:
            raise TooManyPixels(name, most_pixels)
        return plain_image(image, name)


def plain_image(image: Image.Image, name: str) -> Image.Image:
    """The picture as a viewer shows it, in mode "L" if it is grey, else in "RGB", without the file's metadata.

    It is rotated and mirrored as EXIF says, and put on white where it is transparent. Of 16 bits per value the upper 8
    are kept, as Pillow does for colours; 32 bits per value are an InputError.
    """
    with _in_one_sentence(name):
        if 0 in image.size:
            raise InputError(f"{name} has no pixels: its size is {image.width} x {image.height}.")
        upright = _upright(image)
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _DEEP_FORMATS):
            return _upper_bits(upright)
        if image.mode in _DEEP_MODES:
            raise InputError(
                f"{name} has 32 bits per value (mode {image.mode}), whose largest possible value is unknown: convert "
                "it to 8 bits first."
            )
        plain = _on_white(upright).convert("L" if image.mode in _GREY_MODES else "RGB")
        plain.info = {}  # a reader of EXIF's orientation would rotate the picture again
        return plain


def _orientation(image: Image.Image) -> int:
    """The orientation in EXIF: 1 is upright, above 4 the picture lies on its side; 1 if EXIF is missing or damaged."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        return 1


def _upright(image: Image.Image) -> Image.Image:
    """The picture rotated and mirrored as EXIF says."""
    from PIL.Image import Transpose

    image.load()  # first, so that an error in the pixels is not taken for one in EXIF
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _upper_bits(image: Image.Image) -> Image.Image:
    """A grey picture with the upper 8 of its 16 bits per value, white where it is transparent."""
    from PIL import Image

    values = np.asarray(image)
    clear = image.info.get("transparency", -1)
    return Image.fromarray(np.where(values == clear, 255, values >> 8).astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    """The picture on a white background, without transparency."""
    from PIL import Image

    is_palette = image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A")
    if image.mode not in _CLEAR_MODES and "transparency" not in image.info and not is_palette:
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))


def pixels_of(picture: Image.Image, image_size: tuple[int, int] | None) -> np.ndarray:
    """(height, width) of a grey picture or (height, width, 3), uint8, resized bilinearly to (height, width)."""
    from PIL import Image

    if image_size is not None and picture.size != (image_size[1], image_size[0]):
        picture = picture.resize((image_size[1], image_size[0]), Image.Resampling.BILINEAR)
    return np.asarray(picture)


def _size(picture: np.ndarray) -> str:
    return f"{picture.shape[0]} x {picture.shape[1]}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
