"""Threads that run a model: one classifies the images of several requests in batches, one runs attacks in turn."""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ecnn.predicting import Reading, ask_model

Work = TypeVar("Work")
Result = TypeVar("Result")


class OutOfTime(Exception):  # noqa: N818 what happened, not a fault
    """The deadline of a request passed before it was answered."""


class Ended(Exception):  # noqa: N818 what happened, not a fault
    """The server ended before a request was answered."""


class Worker(Generic[Work, Result]):
    """A thread with a queue of work. `submit` returns a future for the result.

    Work whose future is cancelled before its turn is skipped. An exception that work raises is set on its future, and
    the thread goes on.
    """

    def __init__(self, name: str) -> None:
        self.is_closed = False
        self._lock = threading.Lock()  # nothing is put into the queue behind the end
        self._queue: queue.SimpleQueue[tuple[Work, Future[Result]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs and has not been told to end."""
        return self._thread.is_alive() and not self.is_closed

    def submit(self, work: Work) -> Future[Result]:
        """Puts work into the queue, and returns the future of its result; after `end` it raises `Ended`."""
        future: Future[Result] = Future()
        with self._lock:
            if self.is_closed:
                future.set_exception(Ended())
            else:
                self._queue.put((work, future))
        return future

    def end(self) -> None:
        """Tells the thread to end after its current work; the futures of waiting work raise `Ended`."""
        with self._lock:
            self.is_closed = True
            self._queue.put(None)

    def close(self) -> None:
        """`end`, and waits for the thread: one that still runs when Python exits can crash the process."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            if not self.is_closed:
                self._serve(first)
            elif first[1].set_running_or_notify_cancel():
                first[1].set_exception(Ended())

    def _serve(self, first: tuple[Work, Future[Result]]) -> None:
        raise NotImplementedError


class BatchingWorker(Worker[Tensor, Reading]):
    """Passes images through a model. Requests that arrive while it is busy are batched into one forward pass.

    No request waits for others to fill a batch: a single one is answered at once, and the busier the server, the larger
    the batches.

    Args:
        model: used by no other thread.
        enough: a batch of so many images, or more, takes no further request.

    Attributes:
        passes: forward passes so far.
        largest: size of the largest batch so far, in images.
    """

    def __init__(self, model: nn.Module, enough: int) -> None:
        self.model, self.enough = model, enough
        self.passes, self.largest = 0, 0
        super().__init__("ecnn-predict")

    def _serve(self, first: tuple[Tensor, Future[Reading]]) -> None:
        alive = [entry for entry in self._gather(first) if entry[1].set_running_or_notify_cancel()]
        if not alive:
            return
        try:
            found, start = ask_model(self.model, torch.cat([images for images, _ in alive])), 0
            self.passes, self.largest = self.passes + 1, max(self.largest, len(found.scores))
            for images, future in alive:
                future.set_result(found.take(slice(start, start + len(images))))
                start += len(images)
        except BaseException as error:  # the thread must live
            for _, future in alive:
                if not future.done():
                    future.set_exception(error)

    def _gather(self, first: tuple[Tensor, Future[Reading]]) -> list[tuple[Tensor, Future[Reading]]]:
        """The first request and those waiting in the queue, until the batch has `enough` images."""
        batch = [first]
        while sum(len(images) for images, _ in batch) < self.enough:
            try:
                entry = self._queue.get_nowait()
            except queue.Empty:
                break
            if entry is None:
                self._queue.put(None)  # so that the thread ends after this batch
                break
            batch.append(entry)
        return batch


class TimedWorker(Worker[Callable[[nn.Module], Any], Any]):
    """Calls functions with a copy of a model, one at a time, each until its deadline.

    The time is checked whenever a module of the copy is called. So a function that takes too long is stopped with
    `OutOfTime`, and one that is running when the server ends with `Ended`.

    Args:
        model: is copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self._deadline = float("inf")
        for module in self.model.modules():
            module.register_forward_pre_hook(self._check_time)
        super().__init__("ecnn-attack")

    def run_until(self, deadline: float, function: Callable[[nn.Module], Any]) -> Future[Any]:
        """The future of the function's result for the model; the deadline is a value of `time.monotonic()`."""

        def timed(model: nn.Module) -> Any:
            self._deadline = deadline
            self._check_time()
            return function(model)

        return self.submit(timed)

    def _serve(self, first: tuple[Callable[[nn.Module], Any], Future[Any]]) -> None:
        function, future = first
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function(self.model))
        except BaseException as error:  # the thread must live
            future.set_exception(error)

    def _check_time(self, *_: Any) -> None:
        if self.is_closed:
            raise Ended
        if time.monotonic() > self._deadline:
            raise OutOfTime
