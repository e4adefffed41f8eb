"""Answers on an image: its classes by name and, if asked for, each member's bit and the distance of each codeword."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ecnn.predicting import Classifier, Prediction, Reading
from ecnn.serving.pictures import to_png


@dataclass(frozen=True)
class Details:
    """The parts that an answer is made of. Those of members are None for a model without a code.

    Attributes:
        probabilities: softmax of the scores: those of the classes first, then of codewords that no class has.
        bits: the symbol of the code that each member predicts.
        certainties: the probability that each member gives its symbol.
        distances: expected number of members that disagree with each codeword.
    """

    probabilities: list[float]
    bits: list[int] | None
    certainties: list[float] | None
    distances: list[float] | None


@dataclass(frozen=True)
class Answer(Prediction):
    """A prediction for one image and, if they were asked for, its details.

    Attributes:
        details: None if they were not asked for, or if the model gives no answer.
        picture: with details, the image as the model receives it: base64 of a PNG.
    """

    details: Details | None = None
    picture: str | None = None


def answer(
    classifier: Classifier,
    reading: Reading,
    images: Tensor,
    names: Sequence[str],
    *,
    top: int,
    reject: float | None,
    details: bool,
) -> list[Answer]:
    """One answer per image.

    Args:
        classifier: names the classes.
        reading: the outputs of the model for the images.
        images: (image, channel, height, width) in [0, 1].
        names: of the images.
        top: how many classes to name.
        reject: images further than this from every codeword are marked; None marks none.
        details: whether to add details and pictures.
    """
    found = []
    for row, prediction in enumerate(classifier.describe(reading, top, reject)):
        facts: dict[str, Any] = {**vars(prediction), "image": names[row]}
        if details:
            facts["picture"] = to_png(images[row])
            if prediction.error is None:
                facts["details"] = _details(reading.take(slice(row, row + 1)))
        found.append(Answer(**facts))
    return found


def _details(reading: Reading) -> Details:
    probabilities = torch.softmax(reading.scores[0].double(), dim=0).tolist()
    if reading.member_logits is None or reading.distances is None:
        return Details(probabilities, None, None, None)
    certainties, bits = symbol_probabilities(reading.member_logits)[0].max(dim=1)
    return Details(probabilities, bits.tolist(), certainties.tolist(), reading.distances[0].tolist())


def symbol_probabilities(member_logits: Tensor) -> Tensor:
    """(image, member, symbol) probabilities from member logits (image, member) or (image, member, symbol).

    They are those from which the distances to codewords are computed.
    """
    if member_logits.ndim == 3:
        return torch.softmax(member_logits, dim=2)
    return torch.stack([torch.sigmoid(-2 * member_logits), torch.sigmoid(2 * member_logits)], dim=2)
