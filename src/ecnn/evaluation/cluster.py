"""Batches of an evaluation as tasks of a Ray cluster: the same batches, hence the outcomes of one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from ecnn.checks import check_choice
from ecnn.errors import InputError

CLUSTERS = ("ray",)
#: Modules of files that a user named on the command line: no worker could import them.
OWN_MODULES = "_audited_"
Answer = TypeVar("Answer")
_HELD: dict[str, Any] = {}  # in a worker: what was sent last, so that it is not read again for every batch


def connect_ray(jobs: int | None = None) -> Any:
    """The module ray, connected to the cluster that RAY_ADDRESS names, or to a local one with so many CPUs."""
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
    """Calls of one function on a cluster, with something large that all of them need and that is sent once.

    For a model on a GPU each task has one. Otherwise each has as many CPUs as this process has threads, and computes
    with as many: another number could round otherwise.

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
        """A reference to a value that is kept by the cluster, to be given to `call`."""
        return self.ray.put(value)

    def call(
        self, function: Callable[..., Answer], shared: Any, arguments: Sequence[tuple[Any, ...]]
    ) -> Iterator[Answer]:
        """function(shared, *each) of all arguments at once; answers in their order. An error is raised in its turn.

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
    """What a worker does; modules are looked for where the calling process does."""
    import ray

    sys.path += [path for path in paths if path not in sys.path]
    torch.set_num_threads(threads)
    key = held[0].hex()
    if key not in _HELD:
        _HELD.clear()
        _HELD[key] = ray.get(held[0])
    function, each = ray.cloudpickle.loads(packed)
    return function(_HELD[key], *each)
