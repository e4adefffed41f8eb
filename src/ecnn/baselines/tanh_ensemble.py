"""TanhEns16 (Verma & Swami 2019): a Hadamard code of 16 bits, learnt by four networks of four bits each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 as all of torch's users call it
from torch import Tensor, nn

from ecnn.asking import full_precision
from ecnn.backbones import Centre, ConvUnit, Mean, check_images
from ecnn.checks import check_count, check_has, check_number
from ecnn.codes import CodeMatrix
from ecnn.decoders import make_decoder
from ecnn.errors import InputError
from ecnn.kinds import ModelKind, Published, options_of
from ecnn.model import MemberDense
from ecnn.objectives import member_hinge, member_targets
from ecnn.recipes import Recipe

#: The published networks, and one of ours for 8x8 digits, as options of `TanhEnsemble`.
TANH_SIZES: dict[str, dict[str, Any]] = {
    "cifar10": {"image_size": 32, "filters": (32, 64, 128), "bit_filters": 16, "batch_norm": True},
    "mnist": {"image_size": 28, "filters": (32, 32, 32), "bit_filters": 4, "batch_norm": False},
    "digits": {"image_size": 8, "filters": (8, 16, 16), "bit_filters": 4, "batch_norm": True},
}
#: Their disturbances in training, as options of `TanhEnsembleObjective`; MNIST's noise is too strong for 8x8 pixels.
TANH_DISTURBANCES: dict[str, dict[str, float]] = {
    "cifar10": {"noise": 0.032, "blend": 0.032, "rotation": 15.0},
    "mnist": {"noise": 0.3, "blend": 0.3, "rotation": 0.0},
    "digits": {"noise": 0.032, "blend": 0.032, "rotation": 0.0},
}
# Weights of red, green and blue in a grey image (ITU-R BT.601, rounded as in TensorFlow).
_GREY = (0.2989, 0.5870, 0.1140)
_DENSE = (16, 8, 4, 2, 1)
_CENTRE = 0.5
_BLEND_ROTATION, _BLEND_SHIFT = 180.0, 4.0


def tanh_code(order: int = 16, *, seed: int | None = 59) -> CodeMatrix:
    """The code of TanhEns: all rows of Sylvester's Hadamard matrix, with its constant first column made alternating.

    The new column is the complement of another, so two members learn the same task (d_VI = 0). Rows stay at least
    order / 2 apart. The code has as many codewords as bits: with ten classes and order 16, six belong to no class.

    Args:
        order: a power of two from 4 up.
        seed: of the shuffle of rows and columns, by NumPy's legacy generator; 59 in the authors' program. None keeps
            Sylvester's order.
    """
    if isinstance(order, bool) or not isinstance(order, int) or order < 4 or order & (order - 1):
        raise InputError(f"order must be a power of two from 4 up, not {order!r}.")
    signs = np.ones((1, 1), dtype=np.int64)
    while len(signs) < order:
        signs = np.kron([[1, 1], [1, -1]], signs)
    signs[::2, 0] = -1
    if seed is not None:
        rng = np.random.RandomState(seed)
        rng.shuffle(signs)
        signs = signs[:, rng.permutation(order)]
    provenance = {"method": "hadamard, first column alternating", "order": order, "seed": seed}
    return CodeMatrix((signs + 1) // 2, provenance=provenance)


class TanhEnsemble(nn.Module):
    """TanhEns: pixels in [0, 1] to the logarithm of p_nu over all codewords, (batch, order).

    Each chunk is a separate network that serves some of the bits. Each bit has layers of its own, which also read a
    grey copy of the image. Chunks and bits are groups of the same convolutions, not loops. Scores include the codewords
    that belong to no class (six for ten classes), and these can be the argmax. The defaults are the CIFAR-10 network,
    2,313,104 parameters; `TANH_SIZES["mnist"]` has 401,168.

    Args:
        num_classes: how many of the codewords stand for a class; at most `order`.
        in_channels: of the images, 1 or 3.
        image_size: of the images, one number or (height, width); the dense layers depend on it.
        filters: channels of a chunk's three stacks.
        bit_filters: channels of a bit's own convolutions.
        batch_norm: after every convolution of a chunk but the last.
        order: of the Hadamard matrix, which is the number of bits.
        num_chunks: among how many networks the bits are divided.
        code_seed: see `tanh_code`.

    Departs: strided convolutions are padded on both sides (Keras: right and below), and batch norm has torch's
        constants. Weights are initialised as in Keras, by Glorot's uniform rule.
    """

    code_symbols: Tensor
    grey_weights: Tensor

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        *,
        image_size: int | Sequence[int] = 32,
        filters: Sequence[int] = (32, 64, 128),
        bit_filters: int = 16,
        batch_norm: bool = True,
        order: int = 16,
        num_chunks: int = 4,
        code_seed: int = 59,
    ) -> None:
        super().__init__()
        size = [image_size] * 2 if isinstance(image_size, int) else list(image_size)
        _check_sizes(num_classes, in_channels, size, list(filters), bit_filters, order, num_chunks)
        check_count("code_seed", code_seed, least=0)
        self.code = tanh_code(order, seed=code_seed)
        self.config: dict[str, Any] = {
            "num_classes": num_classes,
            "in_channels": in_channels,
            "image_size": size,
            "filters": list(filters),
            "bit_filters": bit_filters,
            "batch_norm": batch_norm,
            "order": order,
            "num_chunks": num_chunks,
            "code_seed": code_seed,
        }
        self.in_channels = in_channels
        self.image_size = tuple(size)
        self.register_buffer(
            "code_symbols", torch.from_numpy(self.code.symbols.astype("int64")), persistent=False
        )
        self.register_buffer("grey_weights", torch.tensor(_GREY).view(3, 1, 1), persistent=False)
        self.decoder = make_decoder(self.code, "logit", "p_nu")
        self.centre = Centre(_CENTRE)
        self.chunks = _make_chunks(in_channels, list(filters), num_chunks, batch_norm)
        self.bits = _Bits(order, num_chunks, filters[-1], bit_filters, size)
        _init_glorot(self)

    def member_logits(self, images: Tensor) -> Tensor:
        """(batch, order) logit of each bit, before tanh."""
        check_images(images, self.in_channels)
        if tuple(images.shape[2:]) != self.image_size:
            raise InputError(
                f"this model was built for images of {self.image_size}, not {tuple(images.shape[2:])}."
            )
        centred = self.centre(images)
        grey = centred if self.in_channels == 1 else (centred * self.grey_weights).sum(dim=1, keepdim=True)
        return full_precision(self.bits(self.chunks(centred), grey))

    def decode(self, member_logits: Tensor) -> Tensor:
        """(batch, order) log p_nu: p_k is proportional to max(m_k . tanh(z), 0) + 1e-6."""
        scores: Tensor = self.decoder(member_logits)
        return scores

    def forward(self, images: Tensor) -> Tensor:
        return self.decode(self.member_logits(images))


class _Bits(nn.Module):
    """Each bit's own layers: from its chunk's maps and the grey image to one logit.

    A bit's first 2x2 convolution reads its chunk's maps and the maps of its own grey layers. It is computed as the sum
    of two convolutions, so that the chunk's maps need not be repeated for every bit.
    """

    def __init__(self, order: int, num_chunks: int, in_channels: int, width: int, size: list[int]) -> None:
        super().__init__()
        self.order = order
        self.grey = nn.Sequential(
            ConvUnit(1, width, kernel_size=5, stride=2, activation="elu", groups=order, shared_input=True),
            ConvUnit(width, width, stride=2, activation="elu", groups=order),
            ConvUnit(width, width, stride=2, activation="elu", groups=order),
        )
        wide = order * width
        self.from_chunk = nn.Conv2d(num_chunks * in_channels, wide, 2, groups=num_chunks)
        self.from_grey = nn.Conv2d(wide, wide, 2, groups=order, bias=False)
        self.mix = nn.Conv2d(wide, wide, 2, groups=order)
        height, breadth = (math.ceil(length / 8) for length in size)
        sizes = (width * height * breadth, *_DENSE)
        self.dense = nn.ModuleList(
            MemberDense(order, before, after) for before, after in itertools.pairwise(sizes)
        )

    def forward(self, chunk_maps: Tensor, grey_image: Tensor) -> Tensor:
        grey_maps = self.grey(grey_image)
        maps = F.elu(self.from_chunk(_pad(chunk_maps)) + self.from_grey(_pad(grey_maps)))
        maps = F.elu(self.mix(_pad(maps)))
        features = torch.unflatten(maps.flatten(1), 1, (self.order, -1))
        for index, layer in enumerate(self.dense):
            features = layer(features)
            if index < len(self.dense) - 2:  # the last two are linear
                features = F.elu(features)
        return features.squeeze(2)


def _make_chunks(in_channels: int, filters: list[int], num_chunks: int, batch_norm: bool) -> nn.Sequential:
    """Three stacks of two convolutions and a strided one; batch norm follows the ELU, as in the authors' program."""
    layers: list[nn.Module] = []
    before = in_channels
    for stack, width in enumerate(filters):
        for place in range(3):
            strided = place == 2
            layers.append(
                ConvUnit(
                    before,
                    width,
                    kernel_size=5 if stack == 0 and not strided else 3,
                    stride=2 if strided else 1,
                    activation="elu",
                    groups=num_chunks,
                    shared_input=not layers,
                )
            )
            if batch_norm and not (strided and stack == len(filters) - 1):
                layers.append(nn.BatchNorm2d(num_chunks * width))
            before = width
    return nn.Sequential(*layers)


def _pad(maps: Tensor) -> Tensor:
    """Pads one row below and one column on the right, so that a 2x2 convolution keeps the size, as in Keras."""
    return F.pad(maps, (0, 1, 0, 1))


def _init_glorot(model: TanhEnsemble) -> None:
    """Draws weights uniformly between +-sqrt(6 / (inputs + outputs)) of one chunk or bit, as Keras does by default."""
    order, chunks = model.config["order"], model.config["num_chunks"]
    for part, copies in ((model.chunks, chunks), (model.bits, order)):
        for module in part.modules():
            if isinstance(module, nn.Conv2d):
                area = math.prod(module.kernel_size)
                inputs, outputs = area * module.weight.shape[1], area * module.out_channels // copies
                if module in (model.bits.from_chunk, model.bits.from_grey):  # two halves of one convolution
                    inputs = area * (model.config["filters"][-1] + model.config["bit_filters"])
                _draw_glorot(module.weight, inputs, outputs)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, MemberDense):
                _draw_glorot(module.weight, *module.weight.shape[1:])


def _draw_glorot(weight: Tensor, inputs: int, outputs: int) -> None:
    limit = math.sqrt(6 / (inputs + outputs))
    nn.init.uniform_(weight, -limit, limit)


@dataclass(frozen=True, kw_only=True)
class TanhEnsembleObjective:
    """Mean hinge loss of the bits on noisy, blended images, as Verma & Swami train.

    An image plus Gaussian noise is mixed with a share of another image of the batch, which is shifted by up to 4 pixels
    and turned by up to 180 degrees; the label stays. Random numbers come from the generator if one is given, as in
    `fit`, else from torch's global one.

    Attributes:
        noise: standard deviation on the [0, 1] scale; 0.032 for CIFAR-10, 0.3 for MNIST.
        blend: share of the other image, 0 to 1; 0.032 for CIFAR-10, 0.3 for MNIST.
        rotation: each image is turned by a random angle of at most this, in degrees; 15 for CIFAR-10, 0 for MNIST.
        margin: of the hinge.

    Departs: the authors' program disturbs the image anew for each chunk and for its grey copies, ours once for all. The
        sum of its four losses is four times our mean, to which Adam is invariant. Shifts and flips are in the recipe.
    """

    noise: float
    blend: float
    rotation: float = 0.0
    margin: float = 1.0

    def __post_init__(self) -> None:
        check_number("noise", self.noise)
        check_number("blend", self.blend, most=1.0)
        check_number("rotation", self.rotation, most=180.0)
        check_number("margin", self.margin)

    def __call__(
        self, model: Any, images: Tensor, labels: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        check_has("the objective of TanhEnsemble", model, "code_symbols")
        member_logits = model.member_logits(self.disturb(images, generator=generator))
        targets = member_targets(model.code_symbols, labels)
        return member_hinge(member_logits, targets, margin=self.margin).mean()

    def disturb(self, images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """The images with noise, rotation and blending, still in [0, 1]; pixels from beyond the border are mid-grey."""
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            noise = torch.randn(images.shape, generator=generator, device=images.device, dtype=images.dtype)
            centred = images - _CENTRE + self.noise * noise
            if self.rotation:
                centred = _turn_randomly(centred, self.rotation, 0.0, generator)
            if self.blend:
                # A shuffle by sorting random numbers, which a CUDA graph can record.
                order = _draw(centred, 1, generator).squeeze(1).argsort()
                other = _turn_randomly(centred[order], _BLEND_ROTATION, _BLEND_SHIFT, generator)
                centred = (1 - self.blend) * centred + self.blend * other.clamp(-_CENTRE, _CENTRE)
            return (centred + _CENTRE).clamp(0, 1)


def _draw(images: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """(batch, count) uniform numbers between -1 and 1."""
    draws = torch.rand(len(images), count, generator=generator, device=images.device, dtype=images.dtype)
    return 2 * draws - 1


def _turn_randomly(
    images: Tensor, degrees: float, pixels: float, generator: torch.Generator | None
) -> Tensor:
    draws = _draw(images, 3, generator)
    return shift_and_turn(images, pixels * draws[:, :2], math.radians(degrees) * draws[:, 2])


def shift_and_turn(images: Tensor, shifts: Tensor, angles: Tensor) -> Tensor:
    """The images shifted and then turned around the middle, by nearest pixels; pixels from outside are 0.

    Args:
        images: (batch, channel, height, width).
        shifts: (batch, 2) to the right and down, in pixels.
        angles: (batch,) counter-clockwise, in radians.
    """
    height, width = images.shape[2:]
    cos, sin = angles.cos(), angles.sin()
    # The source of each pixel in units of half the image: the rotation undone, then the shift undone.
    right = torch.stack([cos, -sin * height / width, -2 * shifts[:, 0] / width], dim=1)
    down = torch.stack([sin * width / height, cos, -2 * shifts[:, 1] / height], dim=1)
    grid = F.affine_grid(torch.stack([right, down], dim=1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)


def _check_sizes(
    num_classes: int,
    in_channels: int,
    image_size: list[int],
    filters: list[int],
    bit_filters: int,
    order: int,
    num_chunks: int,
) -> None:
    check_count("num_classes", num_classes, least=2)
    if num_classes > order:
        raise InputError(
            f"a Hadamard code of order {order} has no codewords for {num_classes} classes: use a larger order."
        )
    if in_channels not in (1, 3):
        raise InputError(f"images must have 1 or 3 channels to have a grey copy, not {in_channels!r}.")
    if len(image_size) != 2 or len(filters) != 3:
        raise InputError(
            f"image_size must be one or two numbers, and filters three, not {image_size} and {filters}."
        )
    for length in image_size:
        check_count("image_size", length)
    for width in (*filters, bit_filters):
        check_count("filters", width)
    check_count("num_chunks", num_chunks)
    if order % num_chunks:
        raise InputError(f"{order} bits cannot be dealt equally to {num_chunks} chunks.")


def _sized_by_mean(
    num_classes: int, in_channels: int, *, mean: Mean | None = None, **options: Any
) -> TanhEnsemble:
    """A TanhEnsemble for images of the size of `mean`, which is not subtracted: the original subtracts 0.5."""
    shape = np.shape(mean) if mean is not None else ()
    if "image_size" not in options and len(shape) == 3 and shape[1:] != (1, 1):
        options["image_size"] = [int(length) for length in shape[1:]]
    return TanhEnsemble(num_classes, in_channels, **options)


# TanhEns16's program (Verma & Swami 2019) for CIFAR-10; noise, blending and rotation are the objective's.
_RECIPE = Recipe(
    epochs=400,
    batch_size=200,
    optimizer="adam",
    lr=2e-4,
    objective="tanh_ensemble",
    objective_options=TANH_DISTURBANCES["cifar10"],
    shift=4,
    flip=True,
    fill="zero",
)
_RECIPES = {
    "tanh_ensemble": _RECIPE,
    "tanh_ensemble_mnist": replace(
        _RECIPE, epochs=150, lr=3e-4, objective_options=TANH_DISTURBANCES["mnist"], shift=0, flip=False
    ),
}
_RECIPE_FOR = {"cifar10": "tanh_ensemble", "mnist": "tanh_ensemble_mnist", "digits": None}

KIND = ModelKind(
    name="tanh_ensemble",
    model=_sized_by_mean,
    more_options=options_of(TanhEnsemble),
    objectives=("tanh_ensemble", "member_hinge", "member_cross_entropy", "cross_entropy", "trades"),
    own_objectives={"tanh_ensemble": TanhEnsembleObjective},
    own_recipes=_RECIPES,
    published={
        sort: Published(
            recipe=recipe,
            options={name: value for name, value in TANH_SIZES[sort].items() if name != "image_size"},
            settings=TANH_DISTURBANCES[sort],
        )
        for sort, recipe in _RECIPE_FOR.items()
    },
)
