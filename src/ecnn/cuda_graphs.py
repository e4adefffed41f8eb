"""Recording of CUDA graphs: computations that are recorded once and replayed without Python in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def tuned() -> Iterator[None]:
    """Turns on cuDNN's benchmark mode inside: its search for the fastest kernels pays for graphs that are replayed."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def recording(graph: Any, pool: Any = None) -> Iterator[None]:
    """Records the CUDA operations inside into the graph; they run when the graph is replayed.

    Garbage collection is off meanwhile, because freeing an older graph would spoil the recording.

    Args:
        graph: an empty `torch.cuda.CUDAGraph`.
        pool: memory pool that it shares with other graphs; None for one of its own.
    """
    collects, stream = gc.isenabled(), torch.cuda.current_stream()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        torch.cuda.set_stream(stream)  # after a failed recording torch would stay on its stream
        if collects:
            gc.enable()
