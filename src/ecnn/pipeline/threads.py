"""On how many threads a command runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ecnn.data import Split

# Weights times pixels, which is at least the multiplications that an image takes. On 8x8 digits (31 million) two
# threads gain nothing (measured); the limit lies between them and MNIST (384 million), where nothing was measured.
_WORK_TO_SHARE = 100_000_000


@contextmanager
def suitable_threads(model: nn.Module, split: Split) -> Iterator[None]:
    """One thread inside where the model's work on an image is too small to share; the user's OMP_NUM_THREADS wins."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    is_small = weights * split.images[:1, 0].numel() < _WORK_TO_SHARE
    before = torch.get_num_threads()
    if is_small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
