"""Run: make campaign MINUTES=10, or PYTHONPATH=tools python -m campaign --help."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from campaign import scene as scenes

scenes.environment()  # before an import starts threads

from campaign import damage, growth, interruptions, misuse, options, table  # noqa: E402
from campaign.forks import Violation  # noqa: E402
from campaign.scene import Scene  # noqa: E402

Case = Callable[[Scene, int, random.Random], Iterator[tuple[str, list[Violation]]]]
#: The parts of the campaign, each with its share of the time.
PARTS: dict[str, tuple[Case, float]] = {
    "kills": (interruptions.try_kill, 0.3),
    "faults": (interruptions.try_fault, 0.15),
    "files": (damage.try_damage, 0.2),
    "options": (options.try_options, 0.2),
    "misuse": (misuse.try_misuse, 0.1),
    "growth": (growth.try_growth, 0.05),
}


def main() -> int:
    """Tries cases until the time is up, and prints the table; returns 1 if there was a violation."""
    arguments = _arguments()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as name:
        scene = scenes.make_scene(Path(name), few=arguments.few)
        print(f"prepared in {time.monotonic() - started:.0f} s", file=sys.stderr)
        if arguments.only:
            part, _, number = arguments.only.partition(":")
            return _try_one(scene, arguments.seed, part, int(number))
        tried: dict[str, int] = dict.fromkeys(arguments.parts, 0)
        violations: dict[str, list[Violation]] = {part: [] for part in tried}
        for part, number, case, found in _in_workers(scene, arguments, started):
            tried[part] += 1
            violations[part] += found
            for violation in found:
                print(f"{part}:{number} {case}: {violation.kind}: {violation.detail}", file=sys.stderr)
    text = table.markdown(tried, violations)
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text)
    return int(any(violations.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, preparation included")
    parser.add_argument(
        "--seed", type=int, default=0, help="same seed, same cases; how many depends on the time"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which")
    parser.add_argument("--few", action="store_true", help="without the slowest commands")
    parser.add_argument("--only", metavar="PART:NUMBER", help="one case again, with all it says")
    parser.add_argument("--out", type=Path, help="write the table there too")
    return parser.parse_args()


def _rng(seed: int, part: str, number: int) -> random.Random:
    return random.Random(f"{seed} {part} {number}")


def _try_one(scene: Scene, seed: int, part: str, number: int) -> int:
    is_broken = False
    for case, found in PARTS[part][0](scene, number, _rng(seed, part, number)):
        print(case)
        for violation in found:
            print(f"    {violation.kind}: {violation.detail}")
            is_broken = True
    return int(is_broken)


def _in_workers(
    scene: Scene, arguments: argparse.Namespace, started: float
) -> Iterator[tuple[str, int, str, list[Violation]]]:
    """Part, number, description and violations of every case, in the order in which the workers report them."""
    read_end, write_end = os.pipe()
    children = []
    for worker in range(arguments.jobs):
        if (child := os.fork()) == 0:
            os.close(read_end)
            try:
                _work(scene, arguments, started, worker, write_end)
            except BaseException as error:
                _report(
                    write_end, "campaign", -1, f"worker {worker} failed", [Violation("status", repr(error))]
                )
                raise
            finally:
                os._exit(0)
        children.append(child)
    os.close(write_end)
    with os.fdopen(read_end) as reports:
        for line in reports:
            part, number, case, found = json.loads(line)
            yield part, number, case, [Violation(*entry) for entry in found]
    for child in children:
        os.waitpid(child, 0)


def _work(scene: Scene, arguments: argparse.Namespace, started: float, worker: int, end: int) -> None:
    """Tries this worker's cases of every part, each part for its share of the time that is left."""
    stop = started + 60 * arguments.minutes
    shares = {part: PARTS[part][1] for part in arguments.parts}
    for part in arguments.parts:
        now = time.monotonic()
        until = now + (stop - now) * shares.pop(part) / (sum(shares.values()) + PARTS[part][1])
        number = worker
        while number == worker or time.monotonic() < until:  # each part at least once
            tried = False
            for case, found in PARTS[part][0](scene, number, _rng(arguments.seed, part, number)):
                _report(end, part, number, case, found)
                tried = True
            if not tried:  # the part has no more cases
                break
            number += arguments.jobs


def _report(end: int, part: str, number: int, case: str, found: list[Violation]) -> None:
    """Sends a case to the parent, as a line in a single write, so that the lines of two workers do not mix."""
    entries = [(violation.kind, violation.detail[:200]) for violation in found[:10]]
    os.write(end, (json.dumps([part, number, case[:300], entries]) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
