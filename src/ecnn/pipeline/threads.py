"""Chooses the number of threads that torch computes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ecnn.data import Split

# In weights times pixels, an upper bound of the multiplications per image. On 8x8 digits (31 million) two threads gain
# nothing (measured). The limit lies between these and MNIST (384 million), where nothing was measured.
_WORK_TO_SHARE = 100_000_000


@contextmanager
def suitable_threads(model: nn.Module, split: Split) -> Iterator[None]:
    """Runs the block on one thread if the model is too small for more, unless the user has set OMP_NUM_THREADS."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    is_small = weights * split.images[:1, 0].numel() < _WORK_TO_SHARE
    before = torch.get_num_threads()
    if is_small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
