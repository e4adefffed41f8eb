"""Feature squeezing (Xu et al. 2018): an image is suspect when simplifying it changes the answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ecnn.asking import eval_mode, full_precision
from ecnn.backbones import ResNet
from ecnn.checks import check_count, check_number
from ecnn.errors import InputError
from ecnn.kinds import ModelKind, Published, options_of
from ecnn.objectives import flagging_threshold

#: Most bits that float32 can be rounded to.
MAX_BITS = 16

#: The squeezers that Xu et al. join, and ours for digits of 17 levels, as options of `FeatureSqueezing`.
SQUEEZERS: dict[str, dict[str, int]] = {
    "cifar10": {"bits": 5, "window": 2},
    "mnist": {"bits": 1, "window": 2},
    "digits": {"bits": 2, "window": 2},
}


def reduce_bits(values: Tensor, bits: int) -> Tensor:
    """Values in [0, 1] rounded to the nearest of 2^bits equally spaced levels, 0 and 1 among them.

    Half way between two levels the even one is taken, as NumPy's rint does. The gradient is that of the values
    themselves (straight-through): the true one is zero almost everywhere and would tell an attack nothing.
    """
    levels = 2**bits - 1
    rounded = torch.round(values.detach() * levels) / levels
    # Added to an exact zero, the levels stay exact; values + (rounded - values) would not be.
    result: Tensor = rounded + (values - values.detach())
    return result


def smooth_by_median(images: Tensor, window: int) -> Tensor:
    """Each pixel replaced by the median of the window x window pixels around it, channel by channel.

    Equal to `scipy.ndimage.median_filter`, which the authors use: beyond the border the image is mirrored with its edge
    repeated; an even window reaches one pixel further up and left; of an even number of pixels the upper middle one is
    taken.

    Args:
        images: (batch, channel, height, width).
    """
    before, after = window // 2, window - 1 - window // 2
    rows = _mirrored(images.shape[2], before, after, images.device)
    columns = _mirrored(images.shape[3], before, after, images.device)
    windows = images[:, :, rows][:, :, :, columns].unfold(2, window, 1).unfold(3, window, 1).flatten(4)
    # Not kthvalue, which has no deterministic form on CUDA.
    return windows.sort(dim=4).values[..., window**2 // 2]


def _mirrored(length: int, before: int, after: int, device: torch.device) -> Tensor:
    """Indices from -before to length + after, folded back into the image."""
    folded = torch.arange(-before, length + after, device=device) % (2 * length)
    return torch.minimum(folded, 2 * length - 1 - folded)


@dataclass(frozen=True)
class Detection:
    """What a squeezing detector says of images.

    Attributes:
        scores: (batch, class) of the model on the images as they came.
        distance: (batch,) largest L1 distance between its probabilities for the image and for a squeezed copy; 0 to 2.
        flagged: (batch,) whether that is above the threshold.
    """

    scores: Tensor
    distance: Tensor
    flagged: Tensor


class FeatureSqueezing(nn.Module):
    """A detector around any model from pixels in [0, 1] to scores, which `forward` returns unchanged.

    One model sees the image, a copy with fewer bits and a copy smoothed by a median. It has no accuracy of its own
    under attack: an attack succeeds when the answer is wrong *and* not flagged. `distances` has gradients (through the
    rounding straight, through the median to the pixel chosen), so that an attack can hold it down; one that does not is
    no test of it (He et al. 2017). To attack the members of the model, attack `.model`.

    Args:
        model: the classifier.
        bits: how many the copy with fewer bits has; Xu et al. join 1 for MNIST and 5 for CIFAR-10 with a 2x2 median.
        window: side of the median's window, 2 or 3 there.
        threshold: above which an image is flagged; None until `fit_threshold` or saved weights set it.

    Departs: the ECNN paper speaks of three classifiers and of pairs of copies; in the original it is one, and every
        copy is compared with the image. Non-local means, a third squeezer for CIFAR-10 there, is left out.
    """

    threshold: Tensor

    def __init__(self, model: nn.Module, *, bits: int, window: int, threshold: float | None = None) -> None:
        super().__init__()
        check_count("bits", bits, most=MAX_BITS)
        check_count("window", window, least=2)
        if threshold is not None:
            check_number("threshold", threshold)
        self.model = model
        self.bits, self.window = bits, window
        # The threshold is no part of it: it travels with the weights.
        self.config: dict[str, Any] = {**getattr(model, "config", {}), "bits": bits, "window": window}
        first = next(model.parameters(), None)
        like = torch.zeros(()) if first is None else full_precision(first.detach())
        self.register_buffer("threshold", like.new_tensor(math.nan if threshold is None else threshold))

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.model(images)
        return result

    def squeeze(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The copies: with fewer bits, and smoothed."""
        return reduce_bits(images, self.bits), smooth_by_median(images, self.window)

    def distances(self, images: Tensor) -> Tensor:
        """(batch,) largest L1 distance between the probabilities of an image and of its copies; 0 to 2."""
        return self._distances(images, self.model(images))

    def _distances(self, images: Tensor, scores: Tensor) -> Tensor:
        own = _probs(scores)
        copies = [_probs(self.model(copy)) for copy in self.squeeze(images)]
        return torch.stack([(own - other).abs().sum(dim=1) for other in copies]).amax(dim=0)

    def detect(self, images: Tensor) -> Detection:
        """Scores, distance and flag of each image."""
        if bool(self.threshold.isnan()):
            raise InputError(
                "the detector has no threshold: call fit_threshold with clean validation images."
            )
        scores = self.model(images)
        distance = self._distances(images, scores)
        return Detection(scores=scores, distance=distance, flagged=distance > self.threshold)

    def flags(self, images: Tensor) -> Tensor:
        """(batch,) whether the image is suspect."""
        return self.detect(images).flagged

    def fit_threshold(
        self, images: Tensor, false_positive_rate: float = 0.05, *, batch_size: int = 256
    ) -> float:
        """Sets and returns the threshold above which that share of these clean images lies (`flagging_threshold`).

        Args:
            images: clean validation images, neither trained on nor tested on; on the model's device.
            false_positive_rate: from 0 to below 1; Xu et al. allow 5 %.
            batch_size: images at once.
        """
        check_number("false_positive_rate", false_positive_rate, most=1, below=True)
        check_count("batch_size", batch_size)
        with eval_mode(self), torch.no_grad():
            distances = torch.cat([self.distances(batch) for batch in torch.split(images, batch_size)])
        self.threshold.copy_(flagging_threshold(distances, false_positive_rate))
        return float(self.threshold)


def _probs(scores: Tensor) -> Tensor:
    return torch.softmax(full_precision(scores), dim=1)


def _detecting_resnet(
    num_classes: int, in_channels: int, *, bits: int, window: int, **options: Any
) -> FeatureSqueezing:
    return FeatureSqueezing(ResNet(num_classes, in_channels, **options), bits=bits, window=window)


KIND = ModelKind(
    name="feature_squeezing",
    model=_detecting_resnet,
    more_options=options_of(ResNet),
    objectives=("cross_entropy", "trades"),
    published={sort: Published(options=options) for sort, options in SQUEEZERS.items()},
)
