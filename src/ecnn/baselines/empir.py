"""EMPIR (Sen et al. 2020): a majority vote of networks of different numerical precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ecnn.asking import full_precision
from ecnn.backbones import ConvUnit, Mean, ResidualUnit, ResNet
from ecnn.baselines.adp import log_mean_probs, sum_of_cross_entropies
from ecnn.baselines.squeezing import MAX_BITS, reduce_bits
from ecnn.checks import check_count, check_has
from ecnn.errors import InputError
from ecnn.kinds import ModelKind

#: This number of bits means that nothing is quantised, as in the paper.
FULL_PRECISION = 32

#: (activation bits, weight bits) of each member.
EMPIR_PRECISIONS = ((32, 32), (2, 4), (2, 2))


def quantise_weights(weights: Tensor, bits: int) -> Tensor:
    """Weights on 2^bits equally spaced levels from -1 to 1, as in DoReFa-Net (Zhou et al. 2016).

    2 q(tanh(w) / (2 max|tanh w|) + 1/2) - 1, with q rounding to the levels in [0, 1]. The gradient is that of the same
    formula without the rounding, the maximum included.

    Args:
        weights: of one layer, any shape; the largest |tanh w| of all of them is the scale.
        bits: from 2 up; DoReFa has another rule for one bit.
    """
    check_count("bits", bits, least=2, most=MAX_BITS)
    bent = torch.tanh(weights)
    sizes = bent.abs().flatten()
    # Not amax: its gradient looks for elements equal to the maximum, and compiled bfloat16 code, which computes in
    # float32, finds none and divides by zero. Without the floor a layer of zeros would be divided by zero.
    largest = sizes.gather(0, sizes.argmax(dim=0, keepdim=True))
    scale = largest.clamp_min(torch.finfo(bent.dtype).tiny)
    return 2 * reduce_bits(bent / (2 * scale) + 0.5, bits) - 1


def quantise_activations(activations: Tensor, bits: int) -> Tensor:
    """Activations clamped to [0, 1] and rounded to 2^bits equally spaced levels there.

    The gradient is 1 inside [0, 1] and 0 outside: that of the clamp, straight through the rounding.
    """
    check_count("bits", bits, most=MAX_BITS)
    return reduce_bits(activations.clamp(0, 1), bits)


class QuantisedConv(nn.Conv2d):
    """A convolution that quantises its kernels in every forward pass; it trains and saves the unquantised kernels."""

    def __init__(self, conv: nn.Conv2d, bits: int) -> None:
        super().__init__(
            conv.in_channels,
            conv.out_channels,
            (conv.kernel_size[0], conv.kernel_size[1]),
            stride=(conv.stride[0], conv.stride[1]),
            padding=conv.padding if isinstance(conv.padding, str) else (conv.padding[0], conv.padding[1]),
            groups=conv.groups,
        )
        self.bits = bits
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, maps: Tensor) -> Tensor:
        result: Tensor = self._conv_forward(maps, quantise_weights(self.weight, self.bits), self.bias)
        return result


class QuantisedActivation(nn.Module):
    """`quantise_activations` as a module, in place of a ReLU."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def forward(self, maps: Tensor) -> Tensor:
        return quantise_activations(maps, self.bits)


def quantise_resnet(network: ResNet, *, activation_bits: int, weight_bits: int) -> ResNet:
    """Changes the network in place and returns it: all convolutions but the first get quantised kernels and inputs.

    The first convolution (stem) and the last layer (head) keep full precision in weights and inputs, as in DoReFa-Net;
    so do biases, batch norms and the sums of residual units before their activation. Names and number of parameters
    stay those of the ResNet. 32 bits leave weights or activations unchanged.
    """
    units = [unit for unit in network.trunk.units if isinstance(unit, ResidualUnit)]
    if weight_bits != FULL_PRECISION:
        check_count("weight_bits", weight_bits, least=2, most=MAX_BITS)
        for unit in units:
            for part in unit.modules():
                if isinstance(part, ConvUnit):
                    part.conv = QuantisedConv(part.conv, weight_bits)
    if activation_bits != FULL_PRECISION:
        check_count("activation_bits", activation_bits, most=MAX_BITS)
        network.trunk.stem.activation = QuantisedActivation(activation_bits)
        for unit in units:
            unit.first.activation = QuantisedActivation(activation_bits)
        for unit in units[:-1]:  # the head reads the last unit in full precision
            unit.activation = QuantisedActivation(activation_bits)
    return network


class EMPIR(nn.Module):
    """ResNets of different precision that vote: pixels in [0, 1] to scores whose argmax is the vote.

    The class with most votes wins. When all three differ, the full-precision member decides, as in the authors' program
    (in general: of equally frequent classes the one that the earliest member votes for). Scores (batch, class) are the
    logarithm of the averaged probabilities of the members that voted for the winner; their gradient is one of those
    that the authors' attacks follow. Outvoted members have no gradient there, and scores jump where a vote changes. So
    attack `mean_scores` too: Tramer et al. (2020) break EMPIR by the mean of all members.

    Three ResNet-20 have 819,198 parameters for three channels, 818,334 for one.

    Args:
        num_classes, in_channels, depth, width, mean: as in `ResNet`, which has batch norm, to scale the activations,
            and ReLU where nothing is quantised.
        precisions: (activation bits, weight bits) of each member; 32 for full precision.

    Departs: the authors use small networks for CIFAR-10 and MNIST, and AlexNet; ours is the ResNet of the other
        baselines.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        *,
        precisions: Sequence[Sequence[int]] = EMPIR_PRECISIONS,
        depth: int = 20,
        width: int = 16,
        mean: Mean | None = None,
    ) -> None:
        super().__init__()
        check_count("num_classes", num_classes, least=2)
        if len(precisions) == 0 or any(len(pair) != 2 for pair in precisions):
            raise InputError(f"precisions are pairs (activation bits, weight bits), not {precisions!r}.")
        self.config: dict[str, Any] = {
            "num_classes": num_classes,
            "in_channels": in_channels,
            "precisions": [list(pair) for pair in precisions],
            "depth": depth,
            "width": width,
        }
        self.in_channels = in_channels
        self.members = nn.ModuleList(
            quantise_resnet(
                ResNet(num_classes, in_channels, depth=depth, width=width, mean=mean),
                activation_bits=activation_bits,
                weight_bits=weight_bits,
            )
            for activation_bits, weight_bits in precisions
        )

    def member_scores(self, images: Tensor) -> Tensor:
        """(batch, member, class) logits of each network."""
        return torch.stack([member(images) for member in self.members], dim=1)

    def mean_scores(self, images: Tensor) -> Tensor:
        """(batch, class) logarithm of the mean of all members' probabilities; its argmax need not be the vote."""
        return log_mean_probs(self.member_scores(images))

    def forward(self, images: Tensor) -> Tensor:
        return majority_scores(self.member_scores(images))


def majority_vote(member_scores: Tensor) -> Tensor:
    """(batch,) class with most votes; of equally frequent ones the earliest member's.

    Args:
        member_scores: (batch, member, class); a member votes for its highest score, the first if tied.
    """
    votes = member_scores.argmax(dim=2)
    supporters = (votes[:, :, None] == votes[:, None, :]).sum(dim=2)
    return votes.gather(1, supporters.argmax(dim=1, keepdim=True)).squeeze(1)


def majority_scores(member_scores: Tensor) -> Tensor:
    """(batch, class) log of the mean probabilities of the members that voted for the winner, which scores highest.

    Each of these members gives the winner its highest probability, so their mean does too. If rounding lifts another
    class to the winner's score or above, that class is set to the next float below it.
    """
    member_scores = full_precision(member_scores)
    winners = majority_vote(member_scores)[:, None]
    in_majority = member_scores.argmax(dim=2) == winners
    logs = torch.log_softmax(member_scores, dim=2).masked_fill(~in_majority[:, :, None], -math.inf)
    scores = torch.logsumexp(logs, dim=1) - in_majority.sum(dim=1, keepdim=True).to(logs.dtype).log()
    top = scores.gather(1, winners)
    is_winner = torch.arange(scores.shape[1], device=scores.device) == winners
    below = torch.nextafter(top.detach(), torch.full_like(top, -math.inf))
    return torch.where(is_winner | (scores < top), scores, below)


@dataclass(frozen=True)
class EMPIRObjective:
    """Sum of the members' mean cross entropies; members share no weights, so each is trained as if alone."""

    def __call__(self, model: Any, images: Tensor, labels: Tensor) -> Tensor:
        check_has("EMPIR", model, "member_scores")
        return sum_of_cross_entropies(model.member_scores(images), labels).mean()


KIND = ModelKind(
    name="empir",
    model=EMPIR,
    objectives=("empir", "cross_entropy", "trades"),
    own_objectives={"empir": EMPIRObjective},
)
