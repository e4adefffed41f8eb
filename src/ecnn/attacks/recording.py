"""Passes through the model recorded as CUDA graphs: a small network spends most of its time being launched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

_ORDINARY_PASSES = 3
_MOST_GRAPHS = 6

Values = tuple[Tensor | None, ...]


class Recorder:
    """Runs a computation, and after a few times with the same shapes replays a recording of it instead.

    Only for computations that always do the same: a recording repeats the kernels, not the Python around them.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, int] = {}
        self._recordings: OrderedDict[Hashable, tuple[Any, Values, Values]] = OrderedDict()
        self._pool: Any = None

    def __call__(self, name: Hashable, compute: Callable[..., Values], *inputs: Tensor | None) -> Values:
        """compute(*inputs), computed or replayed; results are the caller's own."""
        key = (name, *(None if value is None else (value.shape, value.dtype) for value in inputs))
        self._seen[key] = self._seen.get(key, 0) + 1
        if key not in self._recordings:
            if self._seen[key] <= _ORDINARY_PASSES:
                return compute(*inputs)
            self._record(key, compute, inputs)
        self._recordings.move_to_end(key)
        graph, places, results = self._recordings[key]
        for place, value in zip(places, inputs, strict=True):
            if place is not None and value is not None:
                place.copy_(value)
        graph.replay()
        return tuple(None if value is None else value.clone() for value in results)

    def _record(self, key: Hashable, compute: Callable[..., Values], inputs: Values) -> None:
        while len(self._recordings) >= _MOST_GRAPHS:
            self._recordings.popitem(last=False)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        places = tuple(None if value is None else value.detach().clone() for value in inputs)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once on the side: libraries set themselves up per stream
            compute(*places)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = compute(*places)
        self._recordings[key] = (graph, places, results)
