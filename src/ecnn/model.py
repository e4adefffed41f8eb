"""ECNN: centre, trunk, one branch per member, heads, decoder. Members are a tensor axis, not a list."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ecnn.asking import full_precision
from ecnn.backbones import (
    DENSE,
    MOST_OF_ANYTHING,
    Centre,
    ConvUnit,
    Mean,
    ResidualUnit,
    Trunk,
    check_images,
    init_he_normal,
    make_activation,
    make_trunk,
    unit_plan,
)
from ecnn.checks import check_choice, check_count, kind_of
from ecnn.codes import CodeMatrix
from ecnn.decoders import DEFAULT_DECODER, MemberOutput, check_member_output, make_decoder
from ecnn.errors import InputError
from ecnn.kinds import ModelKind

BRANCHES: tuple[str, ...] = ("conv", "residual", "linear")
IMAGE_SIZE = 32


class MemberDense(nn.Module):
    """One dense layer per member, all at once: (batch, member, in) to (batch, member, out)."""

    def __init__(self, num_members: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_members, in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(num_members, out_features))
        init_he_normal(self.weight, in_features)

    def forward(self, features: Tensor) -> Tensor:
        return torch.einsum("bmi,mio->bmo", features, self.weight) + self.bias


class Branches(nn.Module):
    """The layers that each member has for itself: trunk maps to features (batch, member, out_features).

    Usually all members read the same maps. Then their first convolutions are computed as one, with `num_members` times
    as many outputs. Later layers are grouped convolutions or one einsum.

    Args:
        kind: "conv", a 3x3 convolution to `width` channels, or "residual", a residual unit; then activation,
            average over the image, and a dense layer with activation. "linear" only averages.
        unit: (in_channels, out_channels, stride) of the residual unit; in_channels is what one trunk returns.
        shared_input: whether all members read the same maps; else each reads its own trunk's, side by side in the
            channel axis.
    """

    def __init__(
        self,
        kind: str,
        num_members: int,
        unit: tuple[int, int, int],
        feature_dim: int,
        *,
        width: int,
        batch_norm: bool,
        activation: str,
        shared_input: bool,
    ) -> None:
        super().__init__()
        in_channels, out_channels, stride = unit
        self.num_members = num_members
        self.body: nn.Module | None = None
        self.dense: MemberDense | None = None
        if kind == "linear":
            self.out_features = in_channels
            self.repeated = shared_input
            return
        self.repeated = False
        if kind == "conv":
            out_channels = width
            self.body = ConvUnit(
                in_channels,
                out_channels,
                batch_norm=batch_norm,
                activation=activation,
                groups=num_members,
                shared_input=shared_input,
            )
        else:
            self.body = ResidualUnit(
                in_channels,
                out_channels,
                stride=stride,
                batch_norm=batch_norm,
                activation=activation,
                groups=num_members,
                shared_input=shared_input,
            )
        self.dense = MemberDense(num_members, out_channels, feature_dim)
        self.activation = make_activation(activation)
        self.out_features = feature_dim

    def forward(self, maps: Tensor) -> Tensor:
        if self.body is not None:
            maps = self.body(maps)
        pooled = maps.mean(dim=(2, 3))
        if self.repeated:
            return pooled.unsqueeze(1).expand(-1, self.num_members, -1)
        pooled = torch.unflatten(pooled, 1, (self.num_members, -1))
        if self.dense is None:
            return pooled
        result: Tensor = self.activation(self.dense(pooled))
        return result


class ECNN(nn.Module):
    """Error-correcting network: pixels in [0, 1] to class scores (batch, class), with one member per task.

    The defaults are the network that the paper's parameter counts come from: ResNet-20's stem and first 8
    units as trunk, no batch norm, one head for all members. Weights are drawn from torch's global generator.

    Args:
        code: the codeword of each class.
        in_channels: of the images.
        member_output: "logit", one number per member of a binary code, or "symbols", one per symbol.
        branch: a member's own layers, see `Branches`. "linear" has none: each member is a linear map of the
            whole ResNet's features, and `feature_dim` is ignored.
        batch_norm: after every convolution but the shortcuts'.
        share_trunk: one trunk for all members, or one each (run as grouped convolutions).
        share_head: one head for all members, or one each; None shares it except for "linear", where members
            that share both trunk and head would all give the same logits.
        width: channels of the first stack, and of a "conv" branch.
        depth: of the ResNet that is cut in two, 6n + 2.
        trunk: any module from images to maps (batch, channel, h, w) or vectors (batch, channel), or the name of
            one (`backbones.make_trunk`), in place of the ResNet's. It is run once on zeros, in eval mode, to
            find its number of channels.
        feature_dim: length of a member's features.
        activation: a name of `ACTIVATIONS`.
        decoder: a name of `DECODERS`; None takes "tanh" for logit and "sigmoid" for symbols members.
        mean: subtracted from the images: a number, (channel,) or (channel, height, width); saved with the
            weights.

    Departs: tab:func names the residual unit Res_{2,2} as branch. The printed parameter counts, except those of the
        unshared network, are those of a 3x3 convolution to 16 channels, so the default is branch="conv".
    """

    code_symbols: Tensor

    def __init__(
        self,
        code: CodeMatrix,
        in_channels: int = 3,
        *,
        member_output: MemberOutput = "logit",
        branch: Literal["conv", "residual", "linear"] = "conv",
        batch_norm: bool = False,
        share_trunk: bool = True,
        share_head: bool | None = None,
        width: int = 16,
        depth: int = 20,
        trunk: nn.Module | str | None = None,
        feature_dim: int = 32,
        activation: str = "relu",
        decoder: str | None = None,
        mean: Mean | None = None,
    ) -> None:
        super().__init__()
        share_head = branch != "linear" if share_head is None else share_head
        _check_options(code, in_channels, feature_dim, member_output, branch, trunk, share_trunk, share_head)
        self.code = code
        self.in_channels = in_channels
        self.member_output = member_output
        self.share_trunk = share_trunk
        self.share_head = share_head
        self.register_buffer("code_symbols", torch.from_numpy(code.symbols.astype("int64")), persistent=False)
        self.decoder = make_decoder(code, member_output, decoder)
        self.centre = Centre(mean)
        if self.centre.mean.shape[0] not in (1, in_channels):
            raise InputError(f"the mean has {self.centre.mean.shape[0]} channels, the images {in_channels}.")
        layers: dict[str, Any] = {"batch_norm": batch_norm, "activation": activation}
        self.trunk, unit = self._make_trunk(trunk, branch, depth, width, layers)
        self.branches = Branches(
            branch, code.code_length, unit, feature_dim, width=width, shared_input=share_trunk, **layers
        )
        outputs = 1 if member_output == "logit" else code.arity
        self.head = _make_head(self.branches.out_features, outputs, None if share_head else code.code_length)
        self._config: dict[str, Any] | None = None
        if trunk is None or isinstance(trunk, str):
            named = {} if trunk is None else {"trunk": trunk}  # older specs lack the key
            self._config = {
                "in_channels": in_channels,
                "member_output": member_output,
                "branch": branch,
                "batch_norm": batch_norm,
                "share_trunk": share_trunk,
                "share_head": share_head,
                "width": width,
                "depth": depth,
                "feature_dim": feature_dim,
                "activation": activation,
                "decoder": DEFAULT_DECODER[member_output] if decoder is None else decoder,
                **named,
            }

    def _make_trunk(
        self, trunk: nn.Module | str | None, branch: str, depth: int, width: int, layers: dict[str, Any]
    ) -> tuple[nn.Module, tuple[int, int, int]]:
        """The trunk, and (in_channels, out_channels, stride) of the residual unit that could follow it."""
        if trunk is not None:
            own = (
                make_trunk(trunk, self.in_channels, width=width, activation=layers["activation"])
                if isinstance(trunk, str)
                else trunk
            )
            channels = width if trunk == DENSE else _trunk_channels(own, self.in_channels, self.centre.mean)
            return own, (channels, channels, 1)
        units = unit_plan(depth, width)
        count = len(units) if branch == "linear" else len(units) - 1
        groups = 1 if self.share_trunk else self.code.code_length
        made = Trunk(self.in_channels, count, depth=depth, width=width, groups=groups, **layers)
        return made, (made.out_channels, made.out_channels, 1) if branch == "linear" else units[-1]

    @property
    def config(self) -> dict[str, Any]:
        """Plain JSON values: `ECNN(code, **config)` builds the same network, without weights and mean.

        Raises InputError if the trunk is a module of your own.
        """
        if self._config is None:
            raise InputError(
                "a model with a trunk of your own cannot be described by names: rebuild the trunk yourself "
                "and load the state dict."
            )
        return dict(self._config)

    def features(self, images: Tensor) -> Tensor:
        """(batch, member, feature_dim) input of each member's head.

        Args:
            images: (batch, channel, height, width) in [0, 1]; values are not checked.
        """
        check_images(images, self.in_channels)
        maps: Tensor = self.trunk(self.centre(images))
        if maps.ndim == 2:
            maps = maps[:, :, None, None]
        result: Tensor = self.branches(maps)
        return result

    def apply_head(self, features: Tensor) -> Tensor:
        """Member logits of features, in float32 or better: (batch, member) or (batch, member, symbol)."""
        logits: Tensor = self.head(features)
        if self.member_output == "logit":
            logits = logits.squeeze(-1)
        return full_precision(logits)

    def member_logits(self, images: Tensor) -> Tensor:
        """Logits of the members for their tasks: (batch, member), or (batch, member, symbol)."""
        return self.apply_head(self.features(images))

    def decode(self, member_logits: Tensor) -> Tensor:
        """(batch, class) scores from member logits; their softmax gives probabilities, their argmax the class."""
        scores: Tensor = self.decoder(member_logits)
        return scores

    def forward(self, images: Tensor) -> Tensor:
        return self.decode(self.member_logits(images))


def _check_options(
    code: Any,
    in_channels: int,
    feature_dim: int,
    member_output: MemberOutput,
    branch: str,
    trunk: nn.Module | str | None,
    share_trunk: bool,
    share_head: bool,
) -> None:
    if not isinstance(code, CodeMatrix):
        raise InputError(
            f"code must be a CodeMatrix, not {type(code).__name__}: try load_code or CodeMatrix(symbols)."
        )
    check_member_output(code, member_output)
    check_count("in_channels", in_channels, most=MOST_OF_ANYTHING)
    check_count("feature_dim", feature_dim, most=MOST_OF_ANYTHING)
    check_choice("branch", branch, BRANCHES)
    if trunk is not None and not share_trunk:
        raise InputError("a trunk of your own cannot be copied for each member: use share_trunk=True.")
    if share_head and share_trunk and branch == "linear":
        raise InputError(
            'with branch="linear", a shared trunk and a shared head all members would give the same '
            "answer: use share_head=False."
        )


def _make_head(in_features: int, out_features: int, num_members: int | None) -> nn.Module:
    if num_members is not None:
        return MemberDense(num_members, in_features, out_features)
    head = nn.Linear(in_features, out_features)
    init_he_normal(head.weight, in_features)
    nn.init.zeros_(head.bias)
    return head


def _trunk_channels(trunk: nn.Module, in_channels: int, mean: Tensor) -> int:
    """Number of channels that the trunk returns, found on zeros; it and torch's random state stay unchanged."""
    if not isinstance(trunk, nn.Module):
        raise InputError(f"trunk must be a torch module, not {type(trunk).__name__}.")
    height, width = (IMAGE_SIZE, IMAGE_SIZE) if mean.shape[1:] == (1, 1) else mean.shape[1:]
    example = next(trunk.parameters(), torch.zeros(0))
    zeros = torch.zeros(2, in_channels, height, width, dtype=example.dtype, device=example.device)
    modes = [(module, module.training) for module in trunk.modules()]
    trunk.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[example.device] if example.is_cuda else []):
            maps = trunk(zeros)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"the trunk fails on zeros of shape {tuple(zeros.shape)}: {reason}") from error
    finally:
        for module, training in modes:
            module.training = training
    if not isinstance(maps, Tensor) or maps.ndim not in (2, 4) or len(maps) != 2:
        came = f"a tensor of shape {tuple(maps.shape)}" if isinstance(maps, Tensor) else kind_of(maps)
        raise InputError(
            "the trunk must return maps (batch, channel, height, width) or vectors (batch, channel), not "
            f"{came}."
        )
    return int(maps.shape[1])


KIND = ModelKind(
    name="ecnn",
    model=ECNN,
    objectives=("member_hinge", "member_cross_entropy", "cross_entropy", "trades"),
    needs_code=True,
)
