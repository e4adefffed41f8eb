"""The rows of the benchmark, one for each tool and model, and summaries of a tool's rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ecnn import files
from ecnn.auditing.bench.subject import VERSION, Subject
from ecnn.auditing.bench.tools import Question, Tool
from ecnn.auditing.report import AUDIT_VERSION
from ecnn.data import Dataset
from ecnn.objectives import predicted_classes

#: A claim is false if it lies more than this above the truth; a tool's accuracy is then counted as too high.
TOLERANCE = 0.05
_SHOWN = 300  # characters kept of a tool's error message
Row = dict[str, Any]


def know(subject: Subject, data: Dataset, *, limit: int, folder: Path) -> Row:
    """Facts of a model on the first `limit` test images: clean, claimed and informed accuracy, and seconds to build.

    They are read from the folder if it has them, else computed and saved there.
    """
    path = folder / "facts" / f"{subject.name}-{limit}.json"
    known: Row = files.read_json(path) if files.exists(path) else {}
    if known.get("version") == VERSION:
        return known
    started = time.perf_counter()
    model = subject.build(data, folder / "weights")
    built = time.perf_counter() - started
    images, labels = data.test[:limit]
    with torch.no_grad():
        clean = float(
            (predicted_classes(subject.build(data, folder / "weights")(images)) == labels).double().mean()
        )
    known = {
        "version": VERSION,
        "name": subject.name,
        "clean": clean,
        "claim": subject.claimed(model, images, labels),
        "informed": subject.informed(model, images, labels),
        "build_seconds": built,
    }
    files.write_json(path, known)
    return known


def row_path(tool: str, subject: Subject, *, limit: int, folder: Path) -> Path:
    return folder / "rows" / tool / f"{subject.name}-{limit}.json"


def kept_row(tool: str, subject: Subject, *, limit: int, folder: Path) -> Row | None:
    """The row that an earlier run saved; None without one, or if the model (or our audit) has changed since."""
    path = row_path(tool, subject, limit=limit, folder=folder)
    row: Row = files.read_json(path) if files.exists(path) else {}
    is_same_tool = not tool.startswith("audit-") or row.get("audit_version") == AUDIT_VERSION
    return row if row.get("version") == VERSION and is_same_tool else None


def examine(tool: Tool, subject: Subject, data: Dataset, *, limit: int, folder: Path) -> Row:
    """The row of one tool on one model, saved in the folder; an error that the tool raises is written into it."""
    known = know(subject, data, limit=limit, folder=folder)
    images, labels = data.test[:limit]
    question = Question(
        model=subject.build(data, folder / "weights"),
        images=images,
        labels=labels,
        eps=subject.eps,
        claim=known["claim"],
        split=data.test,
    )
    row: Row = {
        "version": VERSION,
        "audit_version": AUDIT_VERSION,
        "tool": tool.name,
        "name": subject.name,
        "claim": known["claim"],
    }
    started = time.perf_counter()
    try:
        answer = tool.answer(question)
    except Exception as error:
        row |= {"verdict": "raised", "error": f"{type(error).__name__}: {error}"[:_SHOWN]}
    else:
        row |= vars(answer)
    row["seconds"] = time.perf_counter() - started
    files.write_json(row_path(tool.name, subject, limit=limit, folder=folder), row)
    return row


def gather(subjects: Iterable[Subject], tools: Iterable[str], *, limit: int, folder: Path) -> list[Row]:
    """One row for each model whose facts are in the folder: the facts, the truth, and the answer of each tool.

    The truth is the lowest accuracy that informed attackers or any tool found, verified on fresh copies.
    """
    rows = []
    for subject in subjects:
        path = folder / "facts" / f"{subject.name}-{limit}.json"
        known: Row = files.read_json(path) if files.exists(path) else {}
        if known.get("version") != VERSION:
            continue
        kept = {tool: kept_row(tool, subject, limit=limit, folder=folder) for tool in tools}
        said = {tool: row for tool, row in kept.items() if row is not None}
        found = [known["informed"], *(row["verified"] for row in said.values() if "verified" in row)]
        rows.append(
            {
                "name": subject.name,
                "family": subject.family,
                "half": subject.half,
                "honest": subject.honest,
                "detectable": subject.is_detectable,
                "why": subject.why,
                "protocol": subject.protocol,
                "eps": subject.eps,
                **{name: known[name] for name in ("clean", "claim", "informed", "build_seconds")},
                "truth": min(found),
                "false": known["claim"] - min(found) > TOLERANCE,
                "tools": {tool: _said(row) for tool, row in said.items()},
            }
        )
    return rows


def _said(row: Row) -> Row:
    """The fields of a row that belong into the table, without empty ones."""
    kept = ("accuracy", "verified", "verdict", "alarms", "broken_by", "error", "seconds")
    said = {name: row[name] for name in kept if row.get(name) not in (None, [], {})}
    return said | {"seconds": round(row["seconds"], 2)}


def summarize(rows: Sequence[Row], tool: str) -> Row:
    """Summary of a tool's answers on these models; models with planted secrets do not count.

    Returns:
        Counts of false and true claims, and of each verdict on them ("raised" for an error); for the false claims and
        for all, the median excess of the tool's accuracy over the truth and the share that lies more than 5 points
        above it; seconds in all, and of the slowest model.
    """
    counted = [row for row in rows if row["detectable"] and tool in row["tools"]]
    verdicts = {
        is_false: [row["tools"][tool]["verdict"] for row in counted if row["false"] is is_false]
        for is_false in (True, False)
    }
    summary: Row = {"tool": tool, "models": len(counted)}
    for is_false, kind in ((True, "false"), (False, "true")):
        summary[kind] = len(verdicts[is_false])
        for verdict in ("flagged", "inconclusive", "believed", "raised"):
            summary[f"{kind}_{verdict}"] = verdicts[is_false].count(verdict)
    for kind, part in (("false", [row for row in counted if row["false"]]), ("all", counted)):
        answers = [(row["truth"], row["tools"][tool]) for row in part]
        excess = [said["accuracy"] - truth for truth, said in answers if "accuracy" in said]
        summary[f"{kind}_excess_median"] = statistics.median(excess) if excess else None
        above = sum(value > TOLERANCE for value in excess)
        summary[f"{kind}_excess_above"] = above / len(excess) if excess else None
    summary["seconds"] = sum(row["tools"][tool]["seconds"] for row in counted)
    summary["slowest"] = max((row["tools"][tool]["seconds"] for row in counted), default=0.0)
    return summary


def goals(rows: Sequence[Row], tool: str) -> list[str]:
    """How a tool does on each goal that was set for our audit, one sentence each.

    Further sentences name the honest models on which its accuracy is below a proof or above pyautoattack's.
    """
    summary = summarize(rows, tool)

    def share(part: str, whole: str) -> str:
        count, total = summary[part], summary[whole]
        return f"{count} of {total}" + (f" ({100 * count / total:.1f} %)" if total else "")

    def points(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}"

    lines = [
        f"false claims flagged: {share('false_flagged', 'false')}; asked: 95 %",
        f"true claims flagged: {share('true_flagged', 'true')}; asked: 0",
        f"true claims inconclusive: {share('true_inconclusive', 'true')}; asked: at most 10 %",
        f"excess over the truth, median: {points(summary['false_excess_median'])} points; asked: at most 2",
        f"more than 5 points above it: {points(summary['false_excess_above'])} %; asked: at most 10 %",
        f"crashes: {summary['false_raised'] + summary['true_raised']}; asked: 0",
    ]
    for row in rows:
        said, peer = row["tools"].get(tool, {}), row["tools"].get("pyautoattack", {})
        if not row["honest"] or "accuracy" not in said:
            continue
        if row["protocol"] in ("closed form", "interval bounds") and said["accuracy"] < row["claim"] - 1e-9:
            lines.append(
                f"{row['name']}: {points(said['accuracy'])} is below the proven {points(row['claim'])}"
            )
        if "verified" in peer and said["accuracy"] > peer["verified"] + 0.005 + 1e-9:
            lines.append(
                f"{row['name']}: {points(said['accuracy'])} is above pyautoattack's {points(peer['verified'])}"
            )
    return lines
