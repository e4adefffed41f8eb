"""Which device a command runs on, and on how many threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ecnn.data import Split
from ecnn.errors import InputError

# Weights times pixels, which is at least the multiplications that an image takes. Below it an operation is over
# sooner than threads have met: on 8x8 digits (31 million) two threads gain nothing, on MNIST (384 million) they do.
_WORK_TO_SHARE = 100_000_000


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"the device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


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
