"""Random generators that datasets and loaders hold: seeded while the data are read, and restored afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

_MOST_PARTS = 1000  # most nested datasets, samplers and loaders that are searched


@contextmanager
def seeded_generators_of(data: Any) -> Iterator[None]:
    """Seeds the generators that a loader, its samplers and its datasets hold, and restores their states afterwards.

    Two readings of the data then give the same images, even if other code draws from the generators in between.
    """
    with ExitStack() as stack:
        for number, generator in enumerate(_generators_in(data)):
            stack.callback(_seed(generator, number))
        yield


def _generators_in(data: Any) -> list[Any]:
    """The generators among the attributes of the data and of the data they wrap: each once, in a fixed order."""
    parts, found, seen = [data], [], {id(data)}
    for part in parts:
        for held in _held_by(part):
            if id(held) in seen:
                continue
            seen.add(id(held))
            if isinstance(
                held, torch.Generator | np.random.Generator | np.random.RandomState | random.Random
            ):
                found.append(held)
            elif isinstance(held, DataLoader | Sampler | TorchDataset) and len(parts) < _MOST_PARTS:
                parts.append(held)
    return found


def _held_by(part: Any) -> Iterator[Any]:
    """Yields the attributes of an object; for a list of datasets or samplers, as in ConcatDataset, its elements."""
    for value in getattr(part, "__dict__", {}).values():
        is_list = (
            isinstance(value, list | tuple) and len(value) and isinstance(value[0], Sampler | TorchDataset)
        )
        yield from value if is_list else (value,)


def _seed(generator: Any, seed: int) -> Callable[[], object]:
    """Seeds a generator of torch, NumPy or Python. Returns a function that restores its state."""
    if isinstance(generator, torch.Generator):
        before = generator.get_state()
        generator.manual_seed(seed)
        return lambda: generator.set_state(before)
    if isinstance(generator, np.random.Generator):
        bits, kept = generator.bit_generator, generator.bit_generator.state
        bits.state = type(bits)(seed).state
        return lambda: setattr(bits, "state", kept)
    own = generator.getstate() if isinstance(generator, random.Random) else generator.get_state()
    put_back = generator.setstate if isinstance(generator, random.Random) else generator.set_state
    generator.seed(seed)
    return lambda: put_back(own)
