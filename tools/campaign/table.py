"""The results of a campaign as a Markdown table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from campaign.forks import Violation

#: Kinds of violations, with their titles in the table.
KINDS = {
    "lost": "lost results",
    "corrupt": "corrupt files",
    "temporary": "temporaries left",
    "traceback": "tracebacks",
    "hang": "hangs above 20 s",
    "memory": "above 2 GB",
    "silent": "damage accepted",
    "status": "other statuses",
    "growth": "growth",
}


def markdown(tried: Mapping[str, int], violations: Mapping[str, Sequence[Violation]]) -> str:
    """A table with a row per part: how many cases were tried, and how many violations of each kind there were."""
    lines = ["| | tried | " + " | ".join(KINDS.values()) + " |", "|---|" + "---:|" * (1 + len(KINDS))]
    total: Counter[str] = Counter()
    for part, count in tried.items():
        counts = Counter(violation.kind for violation in violations.get(part, ()))
        total += counts
        lines.append(_line(part, count, counts))
    return "\n".join([*lines, _line("all", sum(tried.values()), total)]) + "\n"


def _line(name: str, tried: int, counts: Counter[str]) -> str:
    return f"| {name} | {tried:,} | " + " | ".join(str(counts[kind]) for kind in KINDS) + " |"
