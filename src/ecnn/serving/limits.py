"""Limits on what requests may ask of a server."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ecnn.checks import check_count, check_number


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Upper limits; a request beyond one of them is refused with one sentence.

    Attributes:
        request_bytes: size of a request's body.
        pixels: of all images of a request together, before they are resized.
        images: in one request.
        batch_images: once a batch for the model, made of several requests, has so many, no further request joins it.
        attack_steps: of an attack; also queries or samples of an attack without steps.
        requests: to classify, under way at the same time.
        attacks: under way at the same time, waiting ones included.
        upload_seconds: for the body of a request to arrive.
        seconds: for a request to be answered once its body has arrived, waiting included.
        connections: open at the same time.
    """

    request_bytes: int = 8 * 2**20
    pixels: int = 32_000_000
    images: int = 64
    batch_images: int = 256
    attack_steps: int = 1000
    requests: int = 64
    attacks: int = 4
    upload_seconds: float = 10.0
    seconds: float = 30.0
    connections: int = 256

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name.endswith("seconds"):
                check_number(f"limits.{entry.name}", value, above=True)
            else:
                check_count(f"limits.{entry.name}", value)
