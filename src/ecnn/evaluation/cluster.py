"""Batches of an evaluation as tasks of a Ray cluster; the batches, and so the outcomes, are those of one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from ecnn.checks import check_choice
from ecnn.errors import InputError

CLUSTERS = ("ray",)
#: Prefix of modules loaded from files that a user named on the command line; workers cannot import them.
OWN_MODULES = "_audited_"
Answer = TypeVar("Answer")
_HELD: dict[str, Any] = {}  # in a worker: the value that was sent last, so that it is read only once


def connect_ray(jobs: int | None = None) -> Any:
    """The module ray, connected to the cluster at RAY_ADDRESS, or without that to a local one with `jobs` CPUs.

    Raises InputError if Ray is not installed. An existing connection is used as it is.
    """
    try:
        import ray
    except ImportError as error:
        raise InputError('a cluster needs Ray: pip install "ecnn[cluster]".') from error
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS")
        local = {} if address else {"num_cpus": jobs, "include_dashboard": False}
        ray.init(address=address, log_to_driver=False, **local)
    return ray


class RayTasks:
    """Runs calls of a function on a cluster. A large value that all calls share is sent only once.

    For a model on a GPU each task gets one GPU. Otherwise each task gets as many CPUs as this process has threads (or
    as the largest node has), and computes with as many threads: another number could round differently.

    Args:
        name: a name of `CLUSTERS`.
        device: where the model is.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        check_choice("cluster", name, CLUSTERS)
        self.ray = connect_ray()
        for title, module in list(sys.modules.items()):
            if title.startswith(OWN_MODULES):
                self.ray.cloudpickle.register_pickle_by_value(module)
        self.threads = torch.get_num_threads()
        most = max([1, *(int(node["Resources"].get("CPU", 1)) for node in self.ray.nodes())])
        gpus = 1 if device.type == "cuda" else 0
        options = {"num_cpus": 1 if gpus else min(self.threads, most), "num_gpus": gpus, "max_retries": 2}
        self.task = self.ray.remote(**options)(_call)

    def send(self, value: Any) -> Any:
        """Stores a value in the cluster and returns a reference to it, for `call`."""
        return self.ray.put(value)

    def call(
        self, function: Callable[..., Answer], shared: Any, arguments: Sequence[tuple[Any, ...]]
    ) -> Iterator[Answer]:
        """Runs function(shared, *each) for all arguments in parallel and yields the results in their order.

        An error is raised when its result is due. Tasks whose results are not taken are cancelled.

        Args:
            shared: a reference from `send`.
        """
        pack, place = self.ray.cloudpickle.dumps, list(sys.path)
        waiting = [
            self.task.remote(place, self.threads, [shared], pack((function, each))) for each in arguments
        ]
        try:
            for reference in list(waiting):
                try:
                    answer: Answer = self.ray.get(reference)
                except self.ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                waiting.remove(reference)
                yield answer
        finally:
            for reference in waiting:
                self.ray.cancel(reference, force=False)


def _call(paths: Sequence[str], threads: int, held: list[Any], packed: bytes) -> Any:
    """Runs one call in a worker, with the module search path and the number of threads of the calling process."""
    import ray

    sys.path += [path for path in paths if path not in sys.path]
    torch.set_num_threads(threads)
    key = held[0].hex()
    if key not in _HELD:
        _HELD.clear()
        _HELD[key] = ray.get(held[0])
    function, each = ray.cloudpickle.loads(packed)
    return function(_HELD[key], *each)
