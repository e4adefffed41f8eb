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

#: Most bits that values may be rounded to; float32 keeps 2^16 levels in [0, 1] well apart.
MAX_BITS = 16

#: The squeezers that Xu et al. combine, and ours for digits of 17 levels, as options of `FeatureSqueezing`.
SQUEEZERS: dict[str, dict[str, int]] = {
    "cifar10": {"bits": 5, "window": 2},
    "mnist": {"bits": 1, "window": 2},
    "digits": {"bits": 2, "window": 2},
}


def reduce_bits(values: Tensor, bits: int) -> Tensor:
    """Values in [0, 1] rounded to the nearest of 2^bits equally spaced levels, 0 and 1 among them.

    Half-way between two levels the even one is taken, as in NumPy's rint. The gradient is straight-through, 1 for every
    value: the true one is zero almost everywhere and would be useless to an attack.
    """
    levels = 2**bits - 1
    rounded = torch.round(values.detach() * levels) / levels
    # The second term is exactly zero, so the levels stay exact; values + (rounded - values) would round again.
    result: Tensor = rounded + (values - values.detach())
    return result


def smooth_by_median(images: Tensor, window: int) -> Tensor:
    """Each pixel replaced by the median of the window x window pixels around it, channel by channel.

    Equal to `scipy.ndimage.median_filter`, which the authors use: beyond the border the image is mirrored with its edge
    repeated; an even window reaches one pixel further up and left; of an even number of pixels the larger of the two
    middle ones is taken.

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
    """Indices from -before to length + after - 1, reflected into the image, 0 to length - 1."""
    folded = torch.arange(-before, length + after, device=device) % (2 * length)
    return torch.minimum(folded, 2 * length - 1 - folded)


@dataclass(frozen=True)
class Detection:
    """The output of a squeezing detector for a batch of images.

    Attributes:
        scores: (batch, class) scores of the model for the original images.
        distance: (batch,) largest L1 distance between its probabilities for the image and for a squeezed copy; 0 to 2.
        flagged: (batch,) whether the distance is above the threshold.
    """

    scores: Tensor
    distance: Tensor
    flagged: Tensor


class FeatureSqueezing(nn.Module):
    """A detector around any model from pixels in [0, 1] to scores; `forward` returns the model's scores unchanged.

    The same model classifies the image, a copy with fewer bits and a copy smoothed by a median. An attack on the
    detector succeeds only if the answer is wrong *and* not flagged. `distances` has gradients (straight-through for the
    rounding, to the chosen pixel for the median), so that an attack can keep it small; an attack that does not is no
    test of the detector (He et al. 2017). To attack the members of the model, attack `.model`.

    Args:
        model: the classifier.
        bits: bits per value of the rounded copy; Xu et al. combine 1 for MNIST and 5 for CIFAR-10 with a 2x2 median.
        window: side of the median's window in pixels; 2 or 3 in Xu et al.
        threshold: distance above which an image is flagged; with None, `fit_threshold` or saved weights must set it.

    Departs: the ECNN paper describes three classifiers and pairs of copies. In the original, as here, there is one
        classifier, and every copy is compared with the image. Non-local means, the original's third squeezer for
        CIFAR-10, is left out.
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
        # Without the threshold, which is a buffer and saved with the weights.
        self.config: dict[str, Any] = {**getattr(model, "config", {}), "bits": bits, "window": window}
        first = next(model.parameters(), None)
        like = torch.zeros(()) if first is None else full_precision(first.detach())
        self.register_buffer("threshold", like.new_tensor(math.nan if threshold is None else threshold))

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.model(images)
        return result

    def squeeze(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The two copies of the images: with fewer bits, and smoothed by a median."""
        return reduce_bits(images, self.bits), smooth_by_median(images, self.window)

    def distances(self, images: Tensor) -> Tensor:
        """(batch,) largest L1 distance between the probabilities of an image and of its copies; 0 to 2."""
        return self._distances(images, self.model(images))

    def _distances(self, images: Tensor, scores: Tensor) -> Tensor:
        own = _probs(scores)
        copies = [_probs(self.model(copy)) for copy in self.squeeze(images)]
        return torch.stack([(own - other).abs().sum(dim=1) for other in copies]).amax(dim=0)

    def detect(self, images: Tensor) -> Detection:
        """Scores, distance and flag of each image; needs a threshold."""
        if bool(self.threshold.isnan()):
            raise InputError(
                "the detector has no threshold: call fit_threshold with clean validation images."
            )
        scores = self.model(images)
        distance = self._distances(images, scores)
        return Detection(scores=scores, distance=distance, flagged=distance > self.threshold)

    def flags(self, images: Tensor) -> Tensor:
        """(batch,) whether the image is flagged; needs a threshold."""
        return self.detect(images).flagged

    def fit_threshold(
        self, images: Tensor, false_positive_rate: float = 0.05, *, batch_size: int = 256
    ) -> float:
        """Sets the threshold so that at most this share of images is flagged, and returns it (`flagging_threshold`).

        Args:
            images: clean validation images, neither trained on nor tested on; on the model's device.
            false_positive_rate: from 0 to below 1; Xu et al. allow 5 %.
            batch_size: images per forward pass.
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
