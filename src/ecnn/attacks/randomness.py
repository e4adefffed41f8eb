"""Random numbers that belong to an image, not to a batch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_FORKED: ContextVar[bool] = ContextVar("forked", default=False)
# Constants of SplitMix64 (Steele, Lea & Flood 2014), written as the signed numbers that torch has.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_AT_ONCE = 2**20  # numbers that are mixed together: what that takes on the way is many times as large


@dataclass(frozen=True)
class Draws:
    """Streams of random numbers, one per image, each a function of its key alone.

    Batch size, order, dropped rows, a resumed run and the number of processes therefore change no number, and the CPU
    draws what the GPU draws: only whole-number arithmetic is involved, up to the last cast.

    Attributes:
        keys: (batch,) int64, one per image; make them with `of` or `from_generator`.
    """

    keys: Tensor

    @classmethod
    def of(cls, seed: int, index: Tensor) -> Draws:
        """The streams of images with these positions in their dataset (batch,)."""
        return cls(_mix(_mix(index.to(torch.int64) + 1) ^ _mix_number(seed)))

    @classmethod
    def from_generator(cls, generator: torch.Generator, batch: int) -> Draws:
        """Streams for images that have no position; the keys come from the generator, on its device."""
        return cls(torch.randint(2**62, (batch,), generator=generator, device=generator.device))

    def fold(self, number: int) -> Draws:
        """Other streams of the same images: one for each number, so that every step or restart has its own."""
        return Draws(_mix(self.keys ^ _mix_number(number)))

    def take(self, rows: Tensor) -> Draws:
        """The streams of some of the images, by position or mask."""
        return Draws(self.keys[rows])

    def bits(self, *shape: int) -> Tensor:
        """(batch, *shape) int64, all 64 bits random. Asking twice gives the same; `fold` first for others."""
        return self._bits(0, math.prod(shape)).view(len(self.keys), *shape)

    def _bits(self, first: int, end: int) -> Tensor:
        counters = torch.arange(first + 1, end + 1, device=self.keys.device) * _GOLDEN
        return _mix(self.keys[:, None] + counters)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """(batch, *shape) in [0, 1), multiples of 2^-24, so that every dtype from float32 up has the same."""
        count, batch = math.prod(shape), len(self.keys)
        most = max(1, _AT_ONCE // max(1, batch))
        if count <= most:
            return (_shift(self.bits(*shape), 40).to(dtype)) * 2.0**-24
        values = torch.empty(batch, count, dtype=dtype, device=self.keys.device)
        for first in range(0, count, most):
            end = min(first + most, count)
            values[:, first:end] = _shift(self._bits(first, end), 40)
        return values.mul_(2.0**-24).view(batch, *shape)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """(batch, *shape) standard normal, by Box and Muller's method."""
        radius = (1 - self.fold(1).uniform(*shape, dtype=dtype)).log_().mul_(-2).sqrt_()
        return radius.mul_(self.fold(2).uniform(*shape, dtype=dtype).mul_(2 * math.pi).cos_())

    def integers(self, high: int | Tensor, *shape: int) -> Tensor:
        """(batch, *shape) int64 from 0 to high - 1."""
        whole: Tensor = (self.uniform(*shape, dtype=torch.float64) * high).to(torch.int64)
        return whole


@contextmanager
def forked_generators(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Torch's, NumPy's and Python's own generators are in the end what they were; meanwhile seeded, if a seed is given.

    Random models draw from them; attacks have `Draws`. Without a seed it does nothing inside of another: their stream
    goes on, and whoever began it puts it back.
    """
    if seed is None and _FORKED.get():
        yield
        return
    token = _FORKED.set(True)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if seed is not None:
                _seed_torch(seed % 2**63, device)
                np.random.seed(seed % 2**32)
                random.seed(seed)
            yield
    finally:
        _FORKED.reset(token)
        random.setstate(python)
        np.random.set_state(numpy)


def _seed_torch(seed: int, device: torch.device) -> None:
    """As `torch.manual_seed`, which also notes the seed for GPUs that nobody uses: half a millisecond each time."""
    if device.type == "cpu" and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _shift(values: Tensor, count: int) -> Tensor:
    """Right shift that fills with zeros; torch's keeps the sign."""
    shifted: Tensor = (values >> count) & (2 ** (64 - count) - 1)
    return shifted


def _mix(values: Tensor) -> Tensor:
    values = (values ^ _shift(values, 30)) * _FIRST
    values = (values ^ _shift(values, 27)) * _SECOND
    return values ^ _shift(values, 31)


def _mix_number(number: int) -> int:
    """A well spread 64-bit number, signed; small numbers in a row give unrelated ones."""
    value = (number * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    value ^= value >> 31
    return value - 2**64 if value >= 2**63 else value
