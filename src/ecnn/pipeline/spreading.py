"""Runs of experiments in several processes at a time: on one machine, one GPU each, or as tasks of a Ray cluster."""

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

#: Runs commands; each answers with its exit status and all that it wrote.
Runner = Callable[[Sequence[Sequence[str]]], list[tuple[int, str]]]


def run_tasks(
    tasks: Sequence[Task],
    sources: Mapping[str, str],
    *,
    jobs: int,
    arguments: Sequence[str],
    cluster: str | None = None,
) -> list[Task]:
    """Runs tasks in processes of their own, each with a log in its folder; returns those that failed.

    Args:
        sources: name or file of each experiment, by its name.
        jobs: processes at a time on this machine; where there are several GPUs, each sees one.
        arguments: of `ecnn reproduce`, beside the experiment, the arm and the seed.
        cluster: "ray" makes each process a task of the Ray cluster that RAY_ADDRESS names, or of a local one with so
            many jobs; where there are GPUs each task asks for one. All machines must see the same folders.
    """
    start: Runner = _ray_runner(jobs) if cluster == "ray" else lambda commands: _run_here(commands, jobs)
    failed = []
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
        for task, (status, said) in zip(wave, start(commands), strict=True):
            files.write_text(task.folder / "log.txt", said)
            failed += [task] if status and task not in failed else []
    return [task for task in tasks if task in failed]


def waves(tasks: Sequence[Task]) -> list[tuple[list[Task], list[str]]]:
    """Tasks in three waves, each with further arguments: networks that attacks are crafted on, the first arm of every
    network, and the arms that repeat a network, which they then find trained."""
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
    """Exit status of a process, and all that it wrote; it sees that GPU alone, if one is given."""
    return _finish(_start(command, gpu))


def _start(command: Sequence[str], gpu: int | None = None) -> subprocess.Popen[str]:
    """A process that runs a command, and sees that GPU alone, if one is given."""
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


def _run_here(commands: Sequence[Sequence[str]], jobs: int) -> list[tuple[int, str]]:
    """Runs commands, so many at a time; whatever ends this process but a kill ends those that run."""
    gpus = torch.cuda.device_count()
    running: list[subprocess.Popen[str]] = []
    guard = threading.Lock()
    is_over = False

    def run_one(command: Sequence[str], number: int) -> tuple[int, str]:
        with guard:
            if is_over:
                return 1, ""
            running.append(_start(command, number % gpus if gpus > 1 else None))
            process = running[-1]
        return _finish(process)

    with ThreadPoolExecutor(jobs) as pool, _ending_when_asked():
        try:
            return list(pool.map(run_one, commands, range(len(commands))))
        except BaseException:
            with guard:
                is_over = True
                for process in running:
                    process.terminate()
            raise


@contextmanager
def _ending_when_asked() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, so that it can end others first."""
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

    def start(commands: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
        results: list[tuple[int, str]] = ray.get([remote.remote(command) for command in commands])
        return results

    return start
