"""Two ways to run passes faster: replay a recorded CUDA graph (GPU), or split the batch into pieces (CPU)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ecnn.cuda_graphs import recording, tuned

_ORDINARY_PASSES = 3
_MOST_RECORDINGS = 8
_LARGEST_PADDING = 1.3

# The feature maps of a larger batch do not fit into a CPU's caches.
_PIXELS_AT_ONCE = 128 * 3 * 32 * 32
_LEAST_ROWS_AT_ONCE = 16

Values = tuple[Tensor | None, ...]


class Recorder:
    """Runs a computation on rows. After three ordinary runs it records a CUDA graph and replays that.

    A recording also serves batches that are slightly smaller. Use it only for computations that always do the same: a
    recording repeats the kernels, not the Python code around them. If recording fails, all runs stay ordinary.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, int] = {}
        self._recordings: OrderedDict[tuple[Hashable, int], tuple[Any, Values, Values]] = OrderedDict()
        self._pool: Any = None
        self._gives_up = False

    def __call__(self, name: Hashable, compute: Callable[..., Values], *inputs: Tensor | None) -> Values:
        """The values of compute(*inputs), computed or replayed. The tensors are not overwritten by later calls.

        Args:
            name: of the computation; the same name must always mean the same computation.
            compute: a function of the inputs that returns tensors (batch, ...) or None.
            inputs: (batch, ...) each, or None.
        """
        kind = (name, *(None if value is None else (value.shape[1:], value.dtype) for value in inputs))
        rows = next(len(value) for value in inputs if value is not None)
        size = self._size_for(kind, rows)
        if size is None:
            self._seen[kind, rows] = self._seen.get((kind, rows), 0) + 1
            if self._gives_up or self._seen[kind, rows] <= _ORDINARY_PASSES:
                return compute(*inputs)
            try:
                self._record((kind, rows), compute, inputs)
            except RuntimeError:  # run it ordinarily: an error of the computation itself is then raised there
                self._gives_up = True
                torch.cuda.synchronize()
                return compute(*inputs)
            size = rows
        self._recordings.move_to_end((kind, size))
        graph, places, results = self._recordings[kind, size]
        for place, value in zip(places, inputs, strict=True):
            if place is not None and value is not None:
                place[:rows].copy_(value)
        graph.replay()
        return tuple(None if value is None else value[:rows].clone() for value in results)

    def _size_for(self, kind: Hashable, rows: int) -> int | None:
        """The smallest recorded batch size that holds these rows with at most 30 % padding, or None."""
        sizes = [size for known, size in self._recordings if known == kind]
        return min((size for size in sizes if rows <= size <= _LARGEST_PADDING * rows), default=None)

    def _record(
        self, key: tuple[Hashable, int], compute: Callable[..., Values], inputs: tuple[Tensor | None, ...]
    ) -> None:
        while len(self._recordings) >= _MOST_RECORDINGS:
            self._recordings.popitem(last=False)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        places = tuple(None if value is None else value.detach().clone() for value in inputs)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with tuned():
            with torch.cuda.stream(stream):  # warm-up: libraries initialise themselves per stream
                compute(*places)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with recording(graph, self._pool):
                results = compute(*places)
        self._recordings[key] = (graph, places, results)


def run_in_pieces(name: Hashable, compute: Callable[..., Values], *inputs: Tensor | None) -> Values:
    """The values of compute(*inputs), computed in pieces that fit a CPU's caches; same signature as `Recorder`."""
    rows, pixels = next((len(value), value[:1].numel()) for value in inputs if value is not None)
    pieces = math.ceil(rows / max(_LEAST_ROWS_AT_ONCE, _PIXELS_AT_ONCE // max(1, pixels)))
    if pieces < 2:
        return compute(*inputs)
    split = [[None] * pieces if value is None else value.tensor_split(pieces) for value in inputs]
    answers = [compute(*piece) for piece in zip(*split, strict=True)]
    return tuple(None if parts[0] is None else torch.cat(parts) for parts in zip(*answers, strict=True))
