"""Computations recorded once as a CUDA graph, to be replayed without Python in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def tuned() -> Iterator[None]:
    """Inside, cuDNN looks for its fastest kernels: worth it for what is recorded and replayed."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def recording(graph: Any, pool: Any = None) -> Iterator[None]:
    """What CUDA is asked for inside becomes the graph.

    Python collects no garbage meanwhile: an older graph that is freed while this one is recorded spoils it.

    Args:
        graph: a `torch.cuda.CUDAGraph` without content.
        pool: memory that it shares with other graphs.
    """
    collects, stream = gc.isenabled(), torch.cuda.current_stream()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        torch.cuda.set_stream(stream)  # torch stays on its own where a recording fails
        if collects:
            gc.enable()
