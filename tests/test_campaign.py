"""A short campaign (`make campaign` is the long one), and that its table can show what it is there for."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import run

from ecnn import files

TOOLS = Path(__file__).parents[1] / "tools"
START = "import runpy\nrunpy.run_module('campaign', run_name='__main__')\n"
sys.path.insert(0, str(TOOLS))

from campaign import table, writes  # noqa: E402
from campaign.forks import Violation, in_child  # noqa: E402


@pytest.mark.slow
def test_a_short_campaign_finds_nothing(tmp_path: Path) -> None:
    """Each part tries some of its cases; `make campaign MINUTES=10` tries thousands."""
    words = ["--minutes", "0.1", "--few", "--jobs", "1", "--out", str(tmp_path / "table.md")]
    program = tmp_path / "campaign.py"  # `python -m campaign`, by a process that has loaded torch
    program.write_text(f"import sys\nsys.path.insert(0, {str(TOOLS)!r})\n{START}")
    done = run(*words, program=program)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert done.stdout.splitlines() == lines
    for part in ("kills", "faults", "files", "options", "misuse", "growth", "all"):
        (line,) = (line for line in lines if line.startswith(f"| {part} |"))
        tried, *broken = (int(cell.replace(",", "")) for cell in line.split("|")[2:-1])
        assert tried > 0
        assert broken == [0] * len(table.KINDS)


def test_a_child_shows_hangs_memory_tracebacks_and_statuses(tmp_path: Path) -> None:
    def fails() -> Iterator[int]:
        yield 7
        raise KeyError("a mistake")

    def grows() -> None:
        bytearray(5 * 2**30)

    def waits() -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "pipe").read_bytes()

    ended = in_child(fails, folder=tmp_path)
    assert (ended.status, ended.answers) == (1, [7])
    assert [one.kind for one in ended.violations()] == ["traceback"]
    assert {one.kind for one in in_child(grows, folder=tmp_path).violations()} == {"traceback", "memory"}
    assert [one.kind for one in in_child(waits, folder=tmp_path, seconds=0.3).violations()] == ["hang"]
    assert [one.kind for one in in_child(lambda: sys.exit(7), folder=tmp_path).violations()] == ["status"]
    assert in_child(lambda: sys.exit(3), folder=tmp_path).violations() == []


@pytest.mark.parametrize("behind", [False, True])
def test_a_kill_comes_at_the_write_event_that_was_asked_for(behind: bool, tmp_path: Path) -> None:
    """Of a file written all or nothing: killed at its last event it is there, and before that it is not."""

    def counted() -> Iterator[list[str]]:
        seen: list[str] = []
        writes.watch(tmp_path, lambda number, name, path: seen.append(name))
        files.write_text(tmp_path / "old", "x")
        yield seen

    moved = in_child(counted, folder=tmp_path).answers[0].index("replace") + 1

    def killed() -> None:
        writes.watch(tmp_path, *writes.die_at(moved, behind=behind))
        files.write_text(tmp_path / "new", "x")

    assert in_child(killed, folder=tmp_path).status == -signal.SIGKILL
    assert (tmp_path / "new").exists() is behind


def test_a_fault_is_raised_once_or_from_then_on(tmp_path: Path) -> None:
    def asked(lasting: bool) -> Iterator[list[str]]:
        writes.watch(tmp_path, writes.fail_at(1, "ENOSPC", from_then_on=lasting))
        said = []
        for name in ("a", "b"):
            try:
                (tmp_path / name).write_text("x")
                said.append("written")
            except OSError as error:
                said.append(str(error.strerror))
        yield said

    assert in_child(lambda: asked(False), folder=tmp_path).answers == [["No space left on device", "written"]]
    assert in_child(lambda: asked(True), folder=tmp_path).answers == [["No space left on device"] * 2]


def test_the_table_counts_by_part_and_kind() -> None:
    text = table.markdown(
        {"kills": 1200, "files": 3}, {"files": [Violation("hang", "x"), Violation("hang", "y")]}
    )
    kills, damaged, total = (line.split(" | ") for line in text.splitlines()[2:])
    assert kills[1] == "1,200"
    assert damaged[1 + list(table.KINDS).index("hang") + 1] == "2"
    assert total[1] == "1,203"
