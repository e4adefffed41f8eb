"""Commands and programs in processes of their own that need not load torch again: a server loads it once and forks."""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Started:
    """A command that is running: a process with its own memory, signals, folder, environment and output."""

    words: tuple[str, ...]
    pid: int
    folder: tempfile.TemporaryDirectory[str]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        os.kill(self.pid, signal.SIGINT)

    def first_line(self) -> str:
        """Of its standard error, as soon as it is there, or what is after a minute and a half."""
        deadline = time.monotonic() + 90
        path = Path(self.folder.name) / "err"
        while time.monotonic() < deadline:
            line, ended, _ = (path.read_text() if path.exists() else "").partition("\n")
            if ended:
                return line
            time.sleep(0.005)
        return line

    def wait(self) -> subprocess.CompletedProcess[str]:
        """What it printed and its exit status, -9 if it was killed."""
        status = int(_ask({"wait": self.pid}))
        out, err = ((Path(self.folder.name) / name).read_text() for name in ("out", "err"))
        self.folder.cleanup()
        return subprocess.CompletedProcess(self.words, status, out, err)


def start(
    *words: str,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    program: Path | None = None,
) -> Started:
    """`ecnn`, or a Python file, with these words begins, in a folder, with more environment variables; one thread."""
    folder = tempfile.TemporaryDirectory()
    request = {
        "words": words,
        "cwd": str(cwd or Path.cwd()),
        "variables": {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
        "folder": folder.name,
        "program": None if program is None else str(program),
    }
    return Started(words, int(_ask(request)), folder)


def run(
    *words: str, cwd: Path | None = None, program: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`ecnn`, or a Python file, with these words, in a folder, to its end."""
    return start(*words, cwd=cwd, program=program).wait()


def wait_for(path: Path) -> None:
    """Until there is such a file, or a minute and a half."""
    deadline = time.monotonic() + 90
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _ask(request: object) -> str:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return server.stdout.readline()


def _serve() -> None:
    """Forks for every request, and ends with the input: when the tests do."""
    # So that the forks need not: what every command loads, what torch's optimizers load, what reads the digits.
    import pydantic  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch._dynamo  # noqa: F401

    import ecnn.cli
    import ecnn.pipeline  # noqa: F401

    os.fsync = lambda fd: None  # as in tests/conftest.py
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork() or _become(**request)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _become(words: list[str], cwd: str, variables: dict[str, str], folder: str, program: str | None) -> int:
    """What `python -m ecnn`, or `python program`, does, in the child; never returns."""
    from ecnn.__main__ import main

    files: tuple[str | Path, ...] = (os.devnull, Path(folder, "out"), Path(folder, "err"))
    for number, path in enumerate(files):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may be deaf to it
    sys.argv = ["ecnn", *words]
    status: object = 0
    try:
        main() if program is None else runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    _serve()
