"""ResNets built as in Keras, their parts, and layers that normalise images; nothing here depends on codes.

Parts take `groups`: the number of independent copies, side by side in the channel axis, run as grouped convolutions.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ecnn.asking import full_precision
from ecnn.checks import check_choice, check_count, check_kind, did_you_mean
from ecnn.errors import InputError

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU, "elu": nn.ELU}

Mean = float | npt.ArrayLike | Tensor

#: Name of the trunk for feature vectors, see `make_trunk`.
DENSE = "dense"
#: Upper limit for numbers of layers, channels, classes and the like; a larger number is a mistake.
MOST_OF_ANYTHING = 10_000
# Standard deviation of a standard normal truncated at -2 and 2. Dividing by it gives the variance asked for.
_CUT_NORMAL_STD = 0.8796256610342398


def make_activation(name: str) -> nn.Module:
    """A fresh activation by name; an unknown name is an InputError that lists the known ones."""
    check_choice("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]()


def init_he_normal(weight: Tensor, fan_in: int) -> None:
    """Fills a weight with values of variance 2 / fan_in from a normal truncated at two deviations, as Keras does."""
    deviation = math.sqrt(2 / fan_in) / _CUT_NORMAL_STD
    nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)


def check_images(images: Tensor, in_channels: int) -> None:
    """Raises InputError unless images are a floating-point (batch, channel, height, width); values are not checked."""
    check_kind("images", images, Tensor, "a tensor of floating numbers in [0, 1]")
    if images.ndim != 4 or images.shape[1] != in_channels:
        raise InputError(
            f"images must have the shape (batch, {in_channels}, height, width), not {tuple(images.shape)}."
        )
    if not images.is_floating_point():
        raise InputError(
            f"images must be floating numbers in [0, 1], not {images.dtype}: divide bytes by 255."
        )


class Centre(nn.Module):
    """Subtracts a mean from images. The mean is a buffer, saved with the weights.

    Args:
        mean: a number, one per channel (channel,), or a mean image (channel, height, width); None subtracts
            zero.

    A saved mean of another shape replaces this one on loading, so that a model can be rebuilt before its mean
    is known.
    """

    mean: Tensor

    def __init__(self, mean: Mean | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", image_table(0.0 if mean is None else mean, "mean"))

    def forward(self, images: Tensor) -> Tensor:
        _check_table(self.mean, images, "mean")
        return images - self.mean

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(f"{prefix}mean")
        if isinstance(saved, Tensor) and saved.ndim == 3 and saved.shape != self.mean.shape:
            self.mean = self.mean.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Normalized(nn.Module):
    """A model that takes pixels in [0, 1], made of one that takes normalised images.

    It subtracts the mean, divides by std and calls the model. With the normalisation inside, an attack's eps means the
    same for every model.

    Args:
        model: any module that takes normalised images.
        mean, std: a number, one per channel (channel,), or an image (channel, height, width).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, mean: Mean, std: Mean = 1.0) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", image_table(mean, "mean"))
        self.register_buffer("std", image_table(std, "std"))
        if not (self.std > 0).all():
            raise InputError("std must be positive everywhere.")

    def forward(self, images: Tensor) -> Tensor:
        _check_table(self.mean, images, "mean")
        _check_table(self.std, images, "std")
        result: Tensor = self.model((images - self.mean) / self.std)
        return result


class ConvUnit(nn.Module):
    """Convolution with bias, then optionally batch norm, then optionally an activation.

    Args:
        in_channels, out_channels: of one copy.
        activation: a name of `ACTIVATIONS`, or None for none.
        groups: independent copies side by side in the channel axis.
        shared_input: all copies read the same `in_channels` channels. Their kernels then form one ordinary
            convolution. It has as many parameters as the grouped one, and the input need not be repeated.

    Departs: Keras pads a strided convolution on the right and below only; here both sides are padded.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_size: int = 3,
        stride: int = 1,
        batch_norm: bool = False,
        activation: str | None = "relu",
        groups: int = 1,
        shared_input: bool = False,
    ) -> None:
        super().__init__()
        read = 1 if shared_input else groups
        self.conv = nn.Conv2d(
            read * in_channels,
            groups * out_channels,
            kernel_size,
            stride=stride,
            padding=kernel_size // 2,
            groups=read,
        )
        init_he_normal(self.conv.weight, in_channels * kernel_size**2)
        _zero_bias(self.conv)
        # None instead of nn.Identity, because calling an empty module takes as long as launching a small kernel.
        self.norm: nn.Module | None = nn.BatchNorm2d(groups * out_channels) if batch_norm else None
        self.activation: nn.Module | None = None if activation is None else make_activation(activation)

    def forward(self, maps: Tensor) -> Tensor:
        maps = self.conv(maps)
        if self.norm is not None:
            maps = self.norm(maps)
        return maps if self.activation is None else self.activation(maps)


def without_batch_norms(model: nn.Module) -> nn.Module:
    """A copy of a model in eval mode, in which each `ConvUnit` has its batch norm merged into its convolution.

    It is faster, having fewer passes over memory; its scores differ by rounding. Other batch norms stay, because only a
    `ConvUnit` is known to apply its norm right after its convolution. Norms in training mode stay too.
    """
    merged = copy.deepcopy(model)
    for unit in merged.modules():
        if not isinstance(unit, ConvUnit) or type(unit.conv) is not nn.Conv2d:
            continue  # a subclass of Conv2d may use its weights in another way
        norm, bias = unit.norm, unit.conv.bias
        if not isinstance(norm, nn.BatchNorm2d) or norm.training:
            continue
        assert bias is not None
        assert norm.running_mean is not None
        assert norm.running_var is not None
        with torch.no_grad():
            scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
            unit.conv.weight.mul_(scale[:, None, None, None])
            bias.sub_(norm.running_mean).mul_(scale).add_(norm.bias)
        unit.norm = None
    return merged


class ResidualUnit(nn.Module):
    """Two 3x3 convolutions in parallel with a shortcut; the activation is applied to their sum.

    The shortcut is the input itself, or a 1x1 convolution (with bias, without batch norm) when the unit
    changes the width or the size. Arguments as in `ConvUnit`.

    A shortcut with a stride first picks every `stride`-th pixel and then convolves without a stride. The result is the
    same. A strided convolution with fewer than 16 channels writes beyond its memory in its backward pass on a CPU
    (oneDNN issue 6035).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        stride: int = 1,
        batch_norm: bool = False,
        activation: str = "relu",
        groups: int = 1,
        shared_input: bool = False,
    ) -> None:
        super().__init__()
        self.repeats, self.stride = groups if shared_input else 1, stride
        self.first = ConvUnit(
            in_channels,
            out_channels,
            stride=stride,
            batch_norm=batch_norm,
            activation=activation,
            groups=groups,
            shared_input=shared_input,
        )
        self.second = ConvUnit(
            out_channels, out_channels, batch_norm=batch_norm, activation=None, groups=groups
        )
        self.shortcut: ConvUnit | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = ConvUnit(
                in_channels,
                out_channels,
                kernel_size=1,
                activation=None,
                groups=groups,
                shared_input=shared_input,
            )
        self.activation = make_activation(activation)

    def forward(self, maps: Tensor) -> Tensor:
        change: Tensor = self.second(self.first(maps))
        if self.shortcut is not None:
            kept = maps if self.stride == 1 else maps[:, :, :: self.stride, :: self.stride]
            summed = change + self.shortcut(kept)
        elif self.repeats == 1:
            summed = change + maps
        else:  # the shared input is added to every copy by broadcasting, without repeating it in memory
            summed = (torch.unflatten(change, 1, (self.repeats, -1)) + maps.unsqueeze(1)).flatten(1, 2)
        result: Tensor = self.activation(summed)
        return result


def unit_plan(depth: int, width: int) -> list[tuple[int, int, int]]:
    """(in_channels, out_channels, stride) of each residual unit of a ResNet: three stacks, each twice as wide.

    Args:
        depth: 6n + 2 for n units a stack: 8, 14, 20, 26, 32, ...
        width: channels of the stem and of the first stack.
    """
    check_count("depth (6n + 2, such as 20)", depth, least=8, most=MOST_OF_ANYTHING)
    if depth % 6 != 2:
        raise InputError(f"depth must be 6n + 2, such as 8, 14, 20 or 32, not {depth!r}.")
    check_count("width", width, most=MOST_OF_ANYTHING)
    plan, channels = [], width
    for stack in range(3):
        for unit in range((depth - 2) // 6):
            out_channels = width * 2**stack
            plan.append((channels, out_channels, 2 if stack > 0 and unit == 0 else 1))
            channels = out_channels
    return plan


class Trunk(nn.Module):
    """Stem and first residual units of a ResNet: images to maps (batch, groups * out_channels, h, w).

    ResNet-20's stem and first 8 units are the paper's shared trunk, tab:func (197,184 parameters for 3
    channels).

    Args:
        in_channels: of the images.
        num_units: how many units to keep; None keeps all (9 for depth 20, 15 for depth 32).
        groups: independent trunks, all reading the same images, side by side in the channel axis.

    Attributes:
        config: depth, width, batch_norm and activation, for the `config` of a network with this trunk.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_units: int | None = None,
        *,
        depth: int = 20,
        width: int = 16,
        batch_norm: bool = False,
        activation: str = "relu",
        groups: int = 1,
    ) -> None:
        super().__init__()
        check_count("in_channels", in_channels, most=MOST_OF_ANYTHING)
        plan = unit_plan(depth, width)
        self.config: dict[str, Any] = {
            "depth": depth,
            "width": width,
            "batch_norm": batch_norm,
            "activation": activation,
        }
        num_units = len(plan) if num_units is None else num_units
        check_count("num_units", num_units, most=len(plan))
        self.out_channels = plan[num_units - 1][1]
        self.stem = ConvUnit(
            in_channels,
            width,
            batch_norm=batch_norm,
            activation=activation,
            groups=groups,
            shared_input=True,
        )
        self.units = nn.Sequential(
            *(
                ResidualUnit(
                    before, after, stride=stride, batch_norm=batch_norm, activation=activation, groups=groups
                )
                for before, after, stride in plan[:num_units]
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.units(self.stem(images))
        return result


def make_trunk(name: str, in_channels: int, *, width: int, activation: str) -> nn.Module:
    """The trunk of that name, for use in place of a ResNet's.

    Args:
        name: "dense", two dense layers of `width` units for feature vectors (batch, in_channels, 1, 1); or
            "timm:NAME", the network of that name in timm up to its pooled features, with random weights.
        in_channels: of the images.
    """
    kind, _, own = name.partition(":")
    if name == DENSE:
        check_count("width", width, most=MOST_OF_ANYTHING)
        layers = [nn.Flatten(), nn.Linear(in_channels, width), make_activation(activation)]
        return nn.Sequential(*layers, nn.Linear(width, width), make_activation(activation))
    if kind == "timm" and own:
        return _timm_trunk(own, in_channels)
    raise InputError(f'trunk must be "{DENSE}" or "timm:NAME" such as timm:resnet18, not {name!r}.')


def _timm_trunk(name: str, in_channels: int) -> nn.Module:
    try:
        timm: Any = importlib.import_module("timm")
    except Exception as error:  # timm imports torchvision, which fails in many ways if it does not fit torch
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(
            f"a trunk timm:{name} needs the package timm, which cannot be imported ({reason}): pip install "
            "'ecnn[vision]'."
        ) from error
    known = timm.list_models()
    if name.partition(".")[0] not in known:
        raise InputError(f"timm has no network {name!r}{did_you_mean(name, known)}")
    # On the CPU even inside torch.device("meta"): some networks compute with their weights while they are built.
    with torch.device("cpu"):
        made: nn.Module = timm.create_model(name, pretrained=False, num_classes=0, in_chans=in_channels)
    return made


class ResNet(nn.Module):
    """An ordinary ResNet classifier, the baseline of an ECNN: pixels in [0, 1] to class scores (batch, class).

    Args:
        num_classes: scores per image.
        in_channels: of the images.
        depth: 6n + 2; 20 has 273,066 trainable parameters, 32 has 467,946 (ten classes, three channels).
        mean: subtracted from the images, see `Centre`.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        *,
        depth: int = 20,
        width: int = 16,
        batch_norm: bool = True,
        activation: str = "relu",
        mean: Mean | None = None,
    ) -> None:
        super().__init__()
        check_count("num_classes", num_classes, most=MOST_OF_ANYTHING)
        self.in_channels = in_channels
        self.centre = Centre(mean)
        self.trunk = Trunk(
            in_channels, depth=depth, width=width, batch_norm=batch_norm, activation=activation
        )
        sizes = {"num_classes": num_classes, "in_channels": in_channels}
        self.config: dict[str, Any] = {**sizes, **self.trunk.config}
        self.head = nn.Linear(self.trunk.out_channels, num_classes)
        init_he_normal(self.head.weight, self.trunk.out_channels)
        _zero_bias(self.head)

    def features(self, images: Tensor) -> Tensor:
        """(batch, 4 * width) input of the head: the trunk's maps averaged over the image."""
        check_images(images, self.in_channels)
        maps: Tensor = self.trunk(self.centre(images))
        return maps.mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return full_precision(self.head(self.features(images)))


def resnet20(num_classes: int = 10, in_channels: int = 3, **options: Any) -> ResNet:
    """`ResNet` of depth 20, with 9 residual units; options as in `ResNet`."""
    return ResNet(num_classes, in_channels, depth=20, **options)


def resnet32(num_classes: int = 10, in_channels: int = 3, **options: Any) -> ResNet:
    """`ResNet` of depth 32, with 15 residual units; options as in `ResNet`."""
    return ResNet(num_classes, in_channels, depth=32, **options)


def image_table(values: Mean, what: str) -> Tensor:
    """The values as a float32 tensor (channel, height, width); axes missing from the input have size 1."""
    try:
        table = values.detach().clone() if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
        table = table.to(torch.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} must be made of numbers: {error}.") from error
    if table.ndim not in (0, 1, 3) or table.numel() == 0:
        raise InputError(
            f"{what} must be a number, (channel,) or (channel, height, width), not of shape "
            f"{tuple(table.shape)}."
        )
    if not table.isfinite().all():
        raise InputError(f"{what} must be finite.")
    return table if table.ndim == 3 else table.reshape(-1, 1, 1)


def _check_table(table: Tensor, images: Tensor, what: str) -> None:
    """Raises InputError if the table cannot be broadcast to the images, or would change their shape."""
    if any(size not in (1, given) for size, given in zip(table.shape, images.shape[1:], strict=True)):
        raise InputError(
            f"the {what} has shape {tuple(table.shape)} but the images {tuple(images.shape[1:])}: give "
            f"images of the size that the {what} was made for."
        )


def _zero_bias(layer: nn.Conv2d | nn.Linear) -> None:
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
