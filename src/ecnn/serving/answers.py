"""What is said of an image: the classes by name and, if asked for, every member's bit and every codeword's distance."""

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
    """How an answer comes about.

    Attributes:
        probabilities: of every class, decoded.
        bits: what each member says, a symbol of the code; None of a model without a code.
        certainties: how probable each member finds that symbol; likewise.
        distances: expected number of members that disagree with each codeword; likewise.
    """

    probabilities: list[float]
    bits: list[int] | None
    certainties: list[float] | None
    distances: list[float] | None


@dataclass(frozen=True)
class Answer(Prediction):
    """A prediction and, if they were asked for, its details.

    Attributes:
        details: None if not asked for, and where the model gives no answer.
        picture: with details, the image as the model takes it: a PNG, as base64.
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
        reading: what the model said of
        images: (image, channel, height, width), which have these
        names: for people.
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
    """(image, member, symbol) of member logits (image, member) or (image, member, symbol), as distances read them."""
    if member_logits.ndim == 3:
        return torch.softmax(member_logits, dim=2)
    return torch.stack([torch.sigmoid(-2 * member_logits), torch.sigmoid(2 * member_logits)], dim=2)
