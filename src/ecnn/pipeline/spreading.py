"""Runs experiments in several processes at once: on one machine, with a GPU each, or as tasks of a Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from ecnn import files
from ecnn.evaluation.cluster import CLUSTERS as CLUSTERS
from ecnn.evaluation.cluster import connect_ray
from ecnn.pipeline.reproducing import Task

#: Is told the number of a command that has ended, its exit status and its whole output.
Ended = Callable[[int, int, str], None]
#: Runs commands and tells of each when it ends.
Runner = Callable[[Sequence[Sequence[str]], Ended], None]


def run_tasks(
    tasks: Sequence[Task],
    sources: Mapping[str, str],
    *,
    jobs: int,
    arguments: Sequence[str],
    cluster: str | None = None,
) -> list[Task]:
    """Runs each task in a process of its own, with log.txt in its folder; returns the tasks that failed.

    Args:
        tasks: the runs.
        sources: what `ecnn reproduce` is given for each experiment, a name or a file, by the experiment's name.
        jobs: how many processes at a time on this machine; with several GPUs, each process sees one of them.
        arguments: of `ecnn reproduce`, besides the experiment, the arm and the seed.
        cluster: "ray" makes each process a task of the Ray cluster that RAY_ADDRESS names, or of a local one with
            `jobs` CPUs. If the cluster has GPUs, each task asks for one. All machines must see the same folders.
    """
    start: Runner = (
        _ray_runner(jobs) if cluster == "ray" else lambda commands, ended: _run_here(commands, jobs, ended)
    )
    failed: list[Task] = []
    for wave, more in waves(tasks):
        ecnn = [sys.executable, "-m", "ecnn", "reproduce"]
        commands = [
            [
                *ecnn,
                sources[task.experiment.name],
                *arguments,
                "--arm",
                task.arm.name,
                "--seed",
                str(task.seed),
                *more,
            ]
            for task in wave
        ]

        def ended(number: int, status: int, said: str, wave: Sequence[Task] = wave) -> None:
            files.write_text(wave[number].folder / "log.txt", said)
            if status and wave[number] not in failed:
                failed.append(wave[number])

        start(commands, ended)
    return [task for task in tasks if task in failed]


def waves(tasks: Sequence[Task]) -> list[tuple[list[Task], list[str]]]:
    """Groups of tasks to run one after the other, each with further arguments for its commands; at most three groups.

    The first group only trains the untrained networks that attacks are crafted on. The second has one task per network.
    The third has the other tasks of these networks, and finds them trained.
    """
    sources = {task.folder: task for one in tasks for task in one.sources if not task.is_trained()}
    known: set[str] = set()
    firsts: list[Task] = []
    repeats: list[Task] = []
    for task in tasks:
        network = task.network.content_hash
        (repeats if network in known else firsts).append(task)
        known.add(network)
    found: list[tuple[list[Task], list[str]]] = [
        (list(sources.values()), ["--stage", "train"]),
        (firsts, []),
        (repeats, []),
    ]
    return [(wave, more) for wave, more in found if wave]


def run_command(command: Sequence[str], gpu: int | None = None) -> tuple[int, str]:
    """Runs a command, and returns its exit status and output; if `gpu` is given, it sees that GPU alone."""
    return _finish(_start(command, gpu))


def _start(command: Sequence[str], gpu: int | None = None) -> subprocess.Popen[str]:
    """Starts a command; if `gpu` is given, its process sees that GPU alone."""
    chosen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return subprocess.Popen(  # noqa: S603 our own command
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **chosen},
    )


def _finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, complained = process.communicate()
    return process.returncode, said + complained


def _run_here(commands: Sequence[Sequence[str]], jobs: int, ended: Ended) -> None:
    """Runs commands, `jobs` at a time; an exception here, as from Ctrl-C or SIGTERM, terminates those that run."""
    gpus = torch.cuda.device_count()
    running: list[subprocess.Popen[str]] = []
    guard = threading.Lock()
    is_over = False

    def run_one(command: Sequence[str], number: int) -> None:
        with guard:
            if is_over:
                return
            running.append(_start(command, number % gpus if gpus > 1 else None))
            process = running[-1]
        ended(number, *_finish(process))

    with ThreadPoolExecutor(jobs) as pool, _ending_when_asked():
        try:
            list(pool.map(run_one, commands, range(len(commands))))
        except BaseException:
            with guard:
                is_over = True
                for process in running:
                    process.terminate()
            raise


@contextmanager
def _ending_when_asked() -> Iterator[None]:
    """While the block runs, SIGTERM raises KeyboardInterrupt as Ctrl-C does, so that other processes are ended first.

    Outside the main thread it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ray_runner(jobs: int) -> Runner:
    ray = connect_ray(jobs)
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    remote = ray.remote(num_cpus=1, num_gpus=1 if has_gpus else 0)(run_command)

    def start(commands: Sequence[Sequence[str]], ended: Ended) -> None:
        numbers = {remote.remote(command): number for number, command in enumerate(commands)}
        waiting = list(numbers)
        while waiting:
            done, waiting = ray.wait(waiting)
            for one in done:
                ended(numbers[one], *ray.get(one))

    return start
