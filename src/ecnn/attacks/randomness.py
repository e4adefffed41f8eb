"""Random numbers per image, which do not depend on the batch that the image is in."""

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
# Constants of SplitMix64 (Steele, Lea & Flood 2014), as signed numbers: torch's int64 has a sign.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_AT_ONCE = 2**20  # numbers computed at a time: intermediate results take many times their memory


@dataclass(frozen=True)
class Draws:
    """Streams of random numbers, one per image. Each is a function of its key alone.

    So batch size, order, dropped rows, a resumed run and the number of processes change no number. CPU and GPU draw the
    same: the arithmetic is on integers, up to the last cast.

    Attributes:
        keys: (batch,) int64, one per image; made by `of` or `from_generator`.
    """

    keys: Tensor

    @classmethod
    def of(cls, seed: int, index: Tensor) -> Draws:
        """The streams of the images at these positions (batch,) of their dataset."""
        return cls(_mix(_mix(index.to(torch.int64) + 1) ^ _mix_number(seed)))

    @classmethod
    def from_generator(cls, generator: torch.Generator, batch: int) -> Draws:
        """New streams for images without a known position. The keys are drawn from the generator, on its device."""
        return cls(torch.randint(2**62, (batch,), generator=generator, device=generator.device))

    def fold(self, number: int) -> Draws:
        """Different streams for the same images, by number, so that every step or restart has its own."""
        return Draws(_mix(self.keys ^ _mix_number(number)))

    def take(self, rows: Tensor) -> Draws:
        """The streams of some of the images, by position or mask."""
        return Draws(self.keys[rows])

    def bits(self, *shape: int) -> Tensor:
        """(batch, *shape) int64, all 64 bits random. A second call gives the same numbers; `fold` first for others."""
        return self._bits(0, math.prod(shape)).view(len(self.keys), *shape)

    def _bits(self, first: int, end: int) -> Tensor:
        counters = torch.arange(first + 1, end + 1, device=self.keys.device) * _GOLDEN
        return _mix(self.keys[:, None] + counters)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """(batch, *shape) uniform in [0, 1), in multiples of 2^-24: the same numbers in float32 and float64."""
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
        """(batch, *shape) standard normal numbers, by the Box-Muller method."""
        radius = (1 - self.fold(1).uniform(*shape, dtype=dtype)).log_().mul_(-2).sqrt_()
        return radius.mul_(self.fold(2).uniform(*shape, dtype=dtype).mul_(2 * math.pi).cos_())

    def integers(self, high: int | Tensor, *shape: int) -> Tensor:
        """(batch, *shape) int64, uniform from 0 to high - 1."""
        whole: Tensor = (self.uniform(*shape, dtype=torch.float64) * high).to(torch.int64)
        return whole


@contextmanager
def forked_generators(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Restores the states of torch's, NumPy's and Python's global generators afterwards; seeds them first if asked.

    Random models draw from these generators; attacks use `Draws`. Without a seed, a context inside another one does
    nothing: the stream goes on, and the outer context restores the states.

    Args:
        device: whose generator is restored too, if it is a CUDA device.
        seed: None leaves the current states.
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
    """Like `torch.manual_seed`, but skips GPUs while CUDA is not in use, which saves half a millisecond each time."""
    if device.type == "cpu" and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _shift(values: Tensor, count: int) -> Tensor:
    """Right shift that fills with zeros; torch's `>>` keeps the sign."""
    shifted: Tensor = (values >> count) & (2 ** (64 - count) - 1)
    return shifted


def _mix(values: Tensor) -> Tensor:
    values = (values ^ _shift(values, 30)) * _FIRST
    values = (values ^ _shift(values, 27)) * _SECOND
    return values ^ _shift(values, 31)


def _mix_number(number: int) -> int:
    """A hash of the number as a signed 64-bit integer: consecutive numbers give unrelated results."""
    value = (number * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    value ^= value >> 31
    return value - 2**64 if value >= 2**63 else value
