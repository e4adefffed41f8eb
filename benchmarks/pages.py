"""Makes the Markdown of benchmarks: tables, and pages with a section for each device that was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def table(head: str, rows: Iterable[Sequence[object]], *, words: int = 1) -> list[str]:
    """The lines of a table.

    Args:
        head: names of the columns, separated by " | ".
        rows: cells of each row.
        words: how many columns, from the left, hold words and are left-aligned; the others hold numbers.
    """
    numbers = len(head.split(" | ")) - words
    lines = [f"| {head} |", "|" + "---|" * words + "---:|" * numbers]
    return lines + [f"| {' | '.join(map(str, cells))} |" for cells in rows]


def page(title: str, about: str, lines: Sequence[str]) -> str:
    """A page with a title, a paragraph on what was measured, and lines of results."""
    return "\n".join([f"# {title}", "", about.strip(), "", *lines]) + "\n"


def page_by_device(
    title: str,
    about: str,
    everything: Mapping[str, Any],
    show: Callable[[str, dict[str, Any]], list[str]],
) -> str:
    """A page with a section for each device.

    Args:
        title, about: as in `page`.
        everything: results by type of device, such as "cuda", each with its "environment".
        show: returns the lines of a section, given the type of device and its results.
    """
    sections = []
    for device, result in everything.items():
        facts = result["environment"]
        sections.append(f"## {facts['device']} ({device}), torch {facts['torch']}")
        sections += ["", *show(device, result), ""]
    return page(title, about, sections[:-1])
