"""What a server takes at most: everything that a stranger could ask too much of."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ecnn.checks import check_count, check_number


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most of everything; a request beyond it is refused with one sentence.

    Attributes:
        request_bytes: of the body of a request.
        pixels: of all images of a request together, before they are resized.
        images: of one request.
        batch_images: that go through the model at a time, from several requests.
        attack_steps: of an attack; queries or samples of one that has no steps.
        requests: to classify, that are read or waiting at the same time.
        attacks: that are waiting or under way at the same time.
        upload_seconds: until a body has arrived.
        seconds: until a request is answered, the waiting included.
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
