"""Which tools detect falsely robust models: every tool of `bench.TOOLS` on every model of `bench.SUBJECTS`.

Run: python benchmarks/audit.py [--budget standard] [--limit 360] [--jobs 16] [--tools NAME ...] [--half first]
[--only NAME ...] [--folder out/bench] [--anew] [--quick: a few models and images, to out/quick, to see that it runs]
Models are trained once and kept in the folder, with the accuracy that is claimed for each. Each answer of a tool for a
model is written to a file of its own, so that a killed run can go on (--anew asks all again). Tools that are not
installed are left out (`make peers` installs them). A claim is false if it lies more than 5 points above the truth. The
truth is the lowest accuracy found by any tool, or by attackers who know how the model hides its weakness. Networks that
are small enough for an exact answer (tests/verifier.py) are audited too. Writes audit.json and audit.md beside this
file, or to --out, with all rows in the folder; with --only or --half it writes neither.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import ecnn
from ecnn import files, runs
from ecnn.auditing import AUDIT_VERSION, BUDGETS, audit, bench
from ecnn.auditing.bench import table
from ecnn.checks import check_choice

HERE = Path(__file__).parent
#: For --quick: one model that only looks robust and one that does not, and the tools that are run on them.
QUICK, QUICK_TOOLS = ["scaled_logits", "linear"], ["audit-quick", "pgd-40"]
Row = dict[str, Any]


class _Stopped(BaseException):
    """Raised in a tool that ran out of time; not an Exception, since a tool may catch those as its own failures."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raises a TimeoutError if the block takes longer than so many seconds."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    except _Stopped as stopped:
        raise TimeoutError(f"stopped after {seconds} s") from stopped
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def prepare() -> None:
    torch.set_num_threads(1)  # networks so small are slower on several threads


def learn(name: str, limit: int, folder: Path) -> Row:
    """Builds a model, and measures its clean and claimed accuracy and that under informed attackers."""
    return table.know(bench.SUBJECTS[name], ecnn.load_data("digits"), limit=limit, folder=folder)


def ask(tool: str, name: str, limit: int, folder: Path, seconds: int) -> Row:
    """The row of one tool's answer for one model; an error row if the tool takes longer than `seconds`."""
    chosen = bench.TOOLS[tool]

    def run(question: bench.Question) -> Any:
        with at_most(seconds):
            return chosen.run(question)

    limited = dataclasses.replace(chosen, run=run)
    return table.examine(limited, bench.SUBJECTS[name], ecnn.load_data("digits"), limit=limit, folder=folder)


def compare(network: str, count: int, budget: str, folder: Path) -> Row:
    """A row with the audited and the exact robust accuracy of a small network; it is kept in the folder."""
    path = folder / "exact" / f"{network.replace(' ', '_')}-{count}-{budget}.json"
    kept: Row = files.read_json(path) if path.exists() else {}
    if kept.get("audit_version") == AUDIT_VERSION:
        return kept
    verifier = _verifier()
    split = verifier.small_digits()[1]
    model, eps = verifier.trained(network)
    truth = verifier.find_truth(model, *split[:count], eps)
    result = audit(model, split, norm="linf", eps=eps, limit=count, budget=budget)
    shares = {what: float(getattr(truth, what).mean()) for what in type(truth).__annotations__}
    found = {"audited": result.accuracy, "audit_version": AUDIT_VERSION}
    row: Row = {"network": network, "eps": eps, "images": count, **shares, **found}
    files.write_json(path, row)
    return row


def _verifier() -> Any:
    sys.path.append(str(HERE.parent / "tests"))
    return importlib.import_module("verifier")


def work(
    names: Sequence[str], tools: Sequence[str], networks: Sequence[str], options: argparse.Namespace
) -> list[Row]:
    """Runs every tool on every model, our audits first because they take longest; prints a line for each answer.

    Answers are kept in the folder; those that are there already are not asked for again, except with --anew.

    Args:
        names: of the models.
        tools: by name.
        networks: small networks that have an exact answer.
        options: of the command line.

    Returns:
        A row of `compare` for each of the networks.
    """
    limit, folder = options.limit, options.folder
    count, budget = (8, "quick") if options.quick else (100, "standard")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context, initializer=prepare) as pool:
        asking: list[Future[Row]] = []

        def submit(tool: str, name: str) -> None:
            kept = table.kept_row(tool, bench.SUBJECTS[name], limit=limit, folder=folder)
            if options.anew or kept is None:
                asking.append(pool.submit(ask, tool, name, limit, folder, options.seconds))

        learning = {pool.submit(learn, name, limit, folder): name for name in names}
        comparing = [pool.submit(compare, network, count, budget, folder) for network in networks]
        ours = [tool for tool in tools if tool.startswith("audit-")]
        learnt = []
        for done in as_completed(learning):
            name = learning[done]
            if done.exception() is not None:
                _say(f"{name}: cannot be built or claimed of: {done.exception()!r}")
                continue
            learnt.append(name)
            known = done.result()
            left = f"informed attackers leave {_percent(known['informed'])}"
            _say(f"{name}: claim {_percent(known['claim'])}, {left}")
            for tool in ours:
                submit(tool, name)
        for tool in tools:
            for name in learnt if tool not in ours else ():
                submit(tool, name)
        for done in as_completed(asking):
            row = done.result()
            found = row.get("error") or f"{_percent(row['accuracy'])}, {row['verdict']}"
            _say(f"{row['name']}, {row['tool']}: {found}, {row['seconds']:.0f} s")
        return [done.result() for done in comparing]


def markdown(result: Row) -> str:
    rows, environment, tools = result["rows"], result["environment"], list(result["tools"])
    counted = [row for row in rows if row["detectable"]]
    families = {row["family"] for row in counted if not row["honest"]}
    lines = [
        "# Who tells false claims from true ones",
        "",
        f"`python benchmarks/audit.py --budget {' '.join(result['budgets'])} --limit {result['limit']}` on "
        f"{environment['device']}, torch {environment['torch']}:",
        f"{len(rows)} small networks on the embedded digits (`ecnn.auditing.bench`), Linf; those that only look robust",
        f"are of {len(families)} families. A claim is false when it lies more than 5 points above the truth, the",
        "lowest accuracy that any tool found or attackers who know how the model hides. A tool without verdicts flags",
        "a claim that lies more than a point above its number, and above the 95 % interval of that. The first half of",
        "the models was built before the attacks of the audit were changed for them, the second is drawn from the",
        "literature. Planted secrets, which nobody can find, are listed and not counted. `excess` is the median of",
        "the points by which numbers lie above the truth on false claims, `above 5` the per cent of them above five.",
        "",
    ]
    for name, what in result["tools"].items():
        without = [row["name"] for row in rows if name not in row["tools"]]
        lines.append(f"- **{name}**: {what}." + (f" No answer yet: {', '.join(without)}." if without else ""))
    for title, part in _parts(rows):
        lines += ["", f"## {title}", "", *_tool_table(part, tools)]
    lines += ["", "## Every model", ""]
    lines += [
        "Accuracies in percent. `informed` is what attackers leave who know how a model hides. A number of a tool that",
        "flags the claim is bold, one that it calls inconclusive has a question mark; a dash is a crash.",
        "",
        f"| model | family | half | eps | claimed by | clean | claim | informed | truth | {' | '.join(tools)} |",
        "|---|---|---|---:|---|" + "---:|" * (4 + len(tools)),
    ]
    lines += [_line(row, tools) for row in rows]
    lines += _truth_table(result["truths"])
    ours = [name for name in tools if name.startswith("audit-")][-1:]
    for tool in ours:
        lines += ["", f"What `{tool}` was alarmed by, and how long it took:", ""]
        lines += ["| model | alarms | broken by | seconds |", "|---|---|---|---:|"]
        lines += [_evidence(row, tool) for row in rows if tool in row["tools"]]
    lines += ["", "Why each looks robust, or is:", ""]
    lines += [f"- **{row['name']}**: {row['why']}." for row in rows]
    return "\n".join(lines) + "\n"


def _parts(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    parts = [(f"The {half} half", [row for row in rows if row["half"] == half]) for half in bench.HALVES]
    return [("All models", list(rows)), *(part for part in parts if part[1])]


def _tool_table(rows: Sequence[Row], tools: Sequence[str]) -> list[str]:
    """A table with a row per tool: verdicts on false claims, excess over the truth, verdicts on true ones, seconds."""
    lines = [
        "| tool | false flagged | unsure | missed | crashed | excess | above 5 | true flagged | unsure | crashed "
        "| seconds |",
        "|---|" + "---:|" * 10,
    ]
    for tool in tools:
        made = table.summarize(rows, tool)
        cells = [f"{made['false_flagged']} of {made['false']}"]
        cells += [made[f"false_{end}"] for end in ("inconclusive", "believed", "raised")]
        cells += [_percent(made[f"false_excess_{end}"]) for end in ("median", "above")]
        cells.append(f"{made['true_flagged']} of {made['true']}")
        cells += [made[f"true_{end}"] for end in ("inconclusive", "raised")]
        lines.append("| " + " | ".join(map(str, [tool, *cells, f"{made['seconds']:.0f}"])) + " |")
    return lines


def _line(row: Row, tools: Sequence[str]) -> str:
    name = row["name"] if row["honest"] else f"*{row['name']}*"
    cells = [name, row["family"], row["half"], f"{row['eps']:g}", row["protocol"]]
    cells += [_percent(row[what]) for what in ("clean", "claim", "informed", "truth")]
    for tool in tools:
        said = row["tools"].get(tool)
        number = "" if said is None else _percent(said.get("accuracy"))
        marks = {"flagged": f"**{number}**", "inconclusive": f"{number}?"}
        cells.append(number if said is None else marks.get(said["verdict"], number))
    return "| " + " | ".join(cells) + " |"


def _evidence(row: Row, tool: str) -> str:
    said = row["tools"][tool]
    broken = ", ".join(f"{name} {count:.4g}" for name, count in said.get("broken_by", {}).items())
    alarms = said.get("error") or ", ".join(said.get("alarms", []))
    return f"| {row['name']} | {alarms} | {broken} | {said['seconds']:.0f} |"


def _truth_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "",
        "## Against the exact answer",
        "",
        f"Networks on digits of 4x4 pixels, {rows[0]['images']} images: what is proven by bounds, the exact answer",
        "(branching with linear programs), and our audit.",
        "",
        "| network | eps | clean | by intervals | by CROWN | exact | audited |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        names = ("right", "by_intervals", "by_crown", "robust", "audited")
        shown = " | ".join(_percent(row[name]) for name in names)
        lines.append(f"| {row['network']} | {row['eps']:g} | {shown} |")
    return lines


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget", nargs="+", default=["standard"], help="of our audit; several are compared"
    )
    parser.add_argument("--limit", type=int, default=360, help="images, the first of the test split")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one core each")
    parser.add_argument("--tools", nargs="*", metavar="NAME", help="these, instead of all that are installed")
    parser.add_argument("--half", choices=bench.HALVES, help="models of this half alone")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models")
    parser.add_argument("--folder", type=Path, default=Path("out/bench"), help="of weights, claims and rows")
    parser.add_argument("--anew", action="store_true", help="ask again where the folder has a row")
    parser.add_argument("--seconds", type=int, default=1800, help="that one tool may take for one model")
    parser.add_argument("--out", type=Path, default=HERE / "audit.json")
    parser.add_argument(
        "--quick", action="store_true", help="little of everything, to out/quick: does it run?"
    )
    options = parser.parse_args()
    names = options.only or [
        name for name, subject in bench.SUBJECTS.items() if options.half in (None, subject.half)
    ]
    ours = [f"audit-{budget}" for budget in options.budget]
    others = [name for name in bench.TOOLS if not name.startswith("audit-")]
    tools = [*ours, *others] if options.tools is None else options.tools
    if options.quick:
        names, tools, options.limit = QUICK, QUICK_TOOLS, 12
        options.folder, options.out = Path("out/quick/bench"), Path("out/quick/audit.json")
    for budget in options.budget:
        check_choice("--budget", budget, BUDGETS)
    for name in names:
        check_choice("--only", name, bench.SUBJECTS)
    for tool in tools:
        check_choice("--tools", tool, bench.TOOLS)
    tools = [tool for tool in tools if bench.TOOLS[tool].is_installed]
    networks = [] if options.only or options.half else list(_verifier().CASES)[: 1 if options.quick else 4]
    truths = work(names, tools, networks, options)
    subjects = [bench.SUBJECTS[name] for name in names]
    rows = table.gather(subjects, bench.TOOLS, limit=options.limit, folder=options.folder)
    shown = [tool for tool in bench.TOOLS if any(tool in row["tools"] for row in rows)]
    for tool in shown:
        _say("\n".join([f"{tool}:", *(f"  {line}" for line in table.goals(rows, tool))]))
    if options.only or options.half:
        return
    result: Row = {
        "environment": runs.environment(),
        "budgets": [tool.removeprefix("audit-") for tool in shown if tool.startswith("audit-")],
        "limit": options.limit,
        "tools": {tool: bench.TOOLS[tool].what for tool in shown},
        "summary": {title: [table.summarize(part, tool) for tool in shown] for title, part in _parts(rows)},
        "rows": rows,
        "truths": truths,
    }
    files.write_text(options.out, row_by_row(result))
    files.write_text(options.out.with_suffix(".md"), markdown(result))


def row_by_row(result: Row) -> str:
    """The result as JSON with one line per model, since indented JSON would be a third longer."""
    tight = (",", ":")
    rows = ",\n".join(json.dumps(row, allow_nan=False, separators=tight) for row in result["rows"])
    head = json.dumps({**result, "rows": []}, allow_nan=False, separators=tight)
    return head.replace('"rows":[]', f'"rows":[\n{rows}\n]') + "\n"


if __name__ == "__main__":
    main()
