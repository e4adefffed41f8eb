"""What batching of concurrent requests gains: a server with and one without batching, with one client and with many.

Run: python benchmarks/serving.py. The server is a process of its own (`ecnn serve`), and the clients are threads of
this process, on the same machine. It writes the figures and a table to serving.json and serving.md beside this file, or
into --out. The server without batching is the same one with limits.batch_images=1; the two are measured in turns. With
--quick it only shows, in seconds, that everything runs, and writes to out/quick.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pages import page, table
from PIL import Image

from ecnn import files

HERE = Path(__file__).parent
MODELS = ("cifar10-ecnn30", "cifar10-resnet20-at")


@contextmanager
def served(model: str, *options: str) -> Iterator[tuple[str, int, int]]:
    """Runs a server for the model while the context is open; yields its host, port and process id."""
    command = [sys.executable, "-m", "ecnn", "serve", model, "--port", "0", "--device", "cpu", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603 our own command
        try:
            assert process.stderr is not None
            found = None
            while found is None and (line := process.stderr.readline()):
                found = re.search(r"http://([\d.]+):(\d+)", line)
            assert found is not None, "the server did not start"
            yield found[1], int(found[2]), process.pid
        finally:
            process.terminate()


def picture(seed: int) -> bytes:
    """The body of a request with one image: a form with a random PNG of CIFAR-10's size."""
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, format="PNG")
    head = b'--edge\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n'
    return head + written.getvalue() + b"\r\n--edge--\r\n"


def cpu_seconds(process: int) -> float:
    """Processor time of all threads of a process so far, in seconds; NaN where there is no /proc, as on macOS."""
    path = Path(f"/proc/{process}/stat")
    if not path.exists():
        return math.nan
    user, system = path.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(address: tuple[str, int, int], clients: int, seconds: float) -> dict[str, float]:
    """Requests per second with so many clients, and per request its latency and the server's processor time.

    The latency is given as the median and the 95th percentile, all times in milliseconds.

    Args:
        address: host, port and process id of the server.
        clients: how many send requests at the same time.
        seconds: how long to measure.
    """
    host, port, process = address
    waits: list[float] = []
    start = threading.Barrier(clients + 1)
    stop = threading.Event()

    def ask(number: int) -> None:
        connection, body = http.client.HTTPConnection(host, port, timeout=60), picture(number)
        headers = {"Content-Type": "multipart/form-data; boundary=edge"}
        start.wait()
        while not stop.is_set():
            began = time.perf_counter()
            connection.request("POST", "/v1/predict", body, headers)
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                raise RuntimeError(content.decode())
            waits.append(time.perf_counter() - began)
        connection.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    start.wait()
    began, worked = time.perf_counter(), cpu_seconds(process)
    time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    taken, worked = time.perf_counter() - began, cpu_seconds(process) - worked
    ranked = sorted(waits)
    return {
        "per_second": len(waits) / taken,
        "median_ms": 1000 * statistics.median(ranked),
        "p95_ms": 1000 * ranked[int(0.95 * (len(ranked) - 1))],
        "cpu_ms": 1000 * worked / len(waits),
    }


def compare(model: str, counts: list[int], seconds: float, rounds: int) -> list[dict[str, Any]]:
    """A row per number of clients: both servers are measured in turns, and the median round of each is kept."""
    rows = []
    with served(model) as batching, served(model, "--set", "limits.batch_images=1") as single:
        for address in (batching, single):
            measure(address, 2, min(1.0, seconds))
        for clients in counts:
            found: dict[str, list[dict[str, float]]] = {"batched": [], "single": []}
            for _ in range(rounds):
                found["batched"].append(measure(batching, clients, seconds))
                found["single"].append(measure(single, clients, seconds))
            middle = {name: sorted(all_, key=_speed)[len(all_) // 2] for name, all_ in found.items()}
            ratios = [b["cpu_ms"] / a["cpu_ms"] for a, b in zip(*found.values(), strict=True)]
            rows.append({"model": model, "clients": clients, **middle, "ratio": statistics.median(ratios)})
            print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def _speed(found: dict[str, float]) -> float:
    return found["per_second"]


def markdown(rows: list[dict[str, Any]], machine: str) -> str:
    about = f"""
`python benchmarks/serving.py` on {machine}, which the server shares with its clients and with
other work. A request is a form with one PNG of 32 x 32 pixels; clients ask again as soon as answered.
One by one is the same server with limits.batch_images=1, measured in turns with the other. Work is processor
time of the server: its ratio says how many times as many requests the same processor answers, whatever else
runs there.
"""
    head = (
        "model | clients | work per request: batched | one by one | ratio | requests/s: batched | one by one "
        "| median: batched | one by one"
    )
    cells = []
    for row in rows:
        both = (row["batched"], row["single"])
        work = [f"{found['cpu_ms']:.1f} ms" for found in both]
        rates = [f"{found['per_second']:.0f}" for found in both]
        medians = [f"{found['median_ms']:.0f} ms" for found in both]
        cells.append([row["model"], row["clients"], *work, f"{row['ratio']:.2f}", *rates, *medians])
    return page("Serving: requests answered together, and one by one", about, table(head, cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median is kept")
    parser.add_argument("--out", type=Path, help="folder for the figures")
    options = parser.parse_args()
    out = options.out or (Path("out/quick") if options.quick else HERE)
    seconds, rounds = (0.3, 1) if options.quick else (options.seconds, options.rounds)
    models, counts = (MODELS[1:], [1, 4]) if options.quick else (MODELS, [1, 4, 16, 64])
    rows = [row for model in models for row in compare(model, counts, seconds, rounds)]
    machine = f"{os.cpu_count()} cores ({platform.machine()})"
    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / "serving.json", {"machine": machine, "rows": rows})
    files.write_text(out / "serving.md", markdown(rows, machine))
    print((out / "serving.md").read_text())


if __name__ == "__main__":
    main()
