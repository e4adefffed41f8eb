"""Whether the audit tells falsely robust models from honest ones: the confusion table over `bench.SUBJECTS`.

Run: python benchmarks/audit.py [--budget quick] [--limit 360] [--only NAME] [--folder out/bench] [--resume]
[--quick: a few models and images, to out/quick, to see that everything runs]
Models are trained once and kept in the folder, with what is claimed of them; every run audits anew, unless --resume
says to go on with the rows that a run of the same code left there. A claim is false when it lies more than 5 points
above the lowest accuracy found, by the audit or by attackers who know how the model hides; a model is flagged unless
its verdict is "believable". With pyautoattack installed (`make peers`) its standard figure stands beside the honest
models. Networks small enough for an exact answer (tests/verifier.py) are audited too. Writes audit.json and audit.md
beside this file, or where --out says; with --only it writes nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ecnn
from ecnn import files, runs
from ecnn.auditing import audit
from ecnn.auditing.bench import SUBJECTS, VERSION, Subject
from ecnn.backbones import without_tf32
from ecnn.data import Dataset
from ecnn.errors import InputError

HERE = Path(__file__).parent
#: A claim this far above what attacks leave is false.
TOLERANCE = 0.05
#: One model that only looks robust and one that does not, for --quick.
QUICK = ["detached", "linear"]
Row = dict[str, Any]


def figures(
    subject: Subject, model: nn.Module, images: Tensor, labels: Tensor, folder: Path, *, peer: bool
) -> Row:
    """What is claimed of a model and what is known of it without the audit; kept in the folder."""
    path = folder / f"{subject.name}-{len(images)}.json"
    known: Row = files.read_json(path) if path.exists() else {}
    if known.get("version") != VERSION:
        with torch.no_grad():
            clean = float((model(images).argmax(dim=1) == labels).double().mean())
        known = {
            "version": VERSION,
            "clean": clean,
            "claim": subject.claimed(model, images, labels),
            "informed": subject.informed(model, images, labels),
        }
        files.write_json(path, known)
    if peer and subject.honest and "peer" not in known:
        known["peer"] = peer_accuracy(model, images, labels, subject.eps)
        files.write_json(path, known)
    return known


def peer_accuracy(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> float:
    """What the standard version of pyautoattack leaves."""
    peer = importlib.import_module("pyautoattack")
    suite = peer.AutoAttack(model, norm="Linf", eps=eps, seed=0, version="standard")
    points, _ = suite.run_standard_evaluation(images, labels, batch_size=len(images))
    with torch.no_grad(), without_tf32():
        right = (model(images).argmax(dim=1) == labels) & (model(points).argmax(dim=1) == labels)
    return float(right.double().mean())


def examine(subject: Subject, data: Dataset, *, limit: int, budget: str, folder: Path, peer: bool) -> Row:
    """One model's row of the table."""
    model = subject.build(data, folder)
    images, labels = data.test[:limit]
    known = figures(subject, model, images, labels, folder, peer=peer)
    torch.manual_seed(0)  # random models draw from torch's generator
    started = time.perf_counter()
    result = audit(
        model,
        data.test,
        norm="linf",
        eps=subject.eps,
        claim=known["claim"],
        limit=limit,
        budget=budget,
    )
    return {
        "name": subject.name,
        "honest": subject.honest,
        "group": subject.half,
        "why": subject.why,
        "protocol": subject.protocol,
        "eps": subject.eps,
        **{name: known.get(name) for name in ("clean", "claim", "informed", "peer")},
        "audited": result.accuracy,
        "interval": list(result.interval),
        "verdict": result.verdict,
        "false": known["claim"] - min(result.accuracy, known["informed"]) > TOLERANCE,
        "flagged": result.verdict != "believable",
        "alarms": [finding.name for finding in result.findings if finding.level == "alarm"],
        "broken_by": {stage.name: stage.broken for stage in result.stages if stage.broken},
        "seconds": time.perf_counter() - started,
    }


def truths(networks: int, count: int, budget: str) -> list[Row]:
    """The audit beside the exact answer, of networks that are small enough to have one."""
    sys.path.append(str(HERE.parent / "tests"))
    verifier = importlib.import_module("verifier")
    split, rows = verifier.small_digits()[1], []
    for name in list(verifier.CASES)[:networks]:
        model, eps = verifier.trained(name)
        truth = verifier.find_truth(model, *split[:count], eps)
        result = audit(model, split, norm="linf", eps=eps, limit=count, budget=budget)
        shares = {what: float(getattr(truth, what).mean()) for what in type(truth).__annotations__}
        rows.append({"network": name, "eps": eps, "images": count, **shares, "audited": result.accuracy})
    return rows


def confusion(rows: Iterable[Row]) -> list[Row]:
    """How many false and other claims were flagged, in each half and in all."""
    rows = list(rows)
    table = []
    for name in ("first", "second", "all"):
        part = [row for row in rows if name in (row["group"], "all")]
        false, rest = [row for row in part if row["false"]], [row for row in part if not row["false"]]
        table.append(
            {
                "group": name,
                "false": len(false),
                "false_flagged": sum(row["flagged"] for row in false),
                "true": len(rest),
                "true_flagged": sum(row["flagged"] for row in rest),
            }
        )
    return table


def markdown(result: Row) -> str:
    rows, environment = result["rows"], result["environment"]
    lines = [
        "# Audits of false and honest models",
        "",
        f"`python benchmarks/audit.py --budget {result['budget']} --limit {result['limit']}` on "
        f"{environment['device']}, torch {environment['torch']}:",
        f"{len(rows)} small networks on the embedded digits, Linf. A claim is false when it lies more than 5 points",
        'above the lowest accuracy found; a model is flagged unless the verdict is "believable". Names of models that',
        "only look robust are in italics. Thresholds may be chosen on the first half only.",
        "",
        "| half | false claims | flagged | other claims | flagged |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['group']} | {row['false']} | {row['false_flagged']} | {row['true']} | {row['true_flagged']} |"
        for row in result["confusion"]
    ]
    lines += [
        "",
        "`informed` is what attackers leave who know how a model hides, `peer` what pyautoattack's standard version",
        "leaves; accuracies in percent.",
        "",
        "| model | half | eps | claimed by | clean | claim | informed | peer | audited | verdict | alarms | seconds |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---|---|---:|",
    ]
    lines += [_line(row) for row in rows]
    lines += [
        "",
        f"Against truth: networks on digits of 4x4 pixels, {result['truths'][0]['images']} images. What is proven by",
        "bounds, the exact answer (branching with linear programs), and the audit.",
        "",
        "| network | eps | clean | by intervals | by CROWN | exact | audited |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["truths"]:
        names = ("right", "by_intervals", "by_crown", "robust", "audited")
        shown = " | ".join(f"{100 * row[name]:.1f}" for name in names)
        lines.append(f"| {row['network']} | {row['eps']:g} | {shown} |")
    lines += ["", "Why each looks robust, or is:", ""]
    lines += [f"- **{row['name']}**: {row['why']}." for row in rows]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    shown = ["" if row[name] is None else f"{100 * row[name]:.1f}" for name in ("clean", "claim", "informed")]
    shown += ["" if row["peer"] is None else f"{100 * row['peer']:.1f}", f"{100 * row['audited']:.1f}"]
    wrong = " (**wrong**)" if row["false"] != row["flagged"] else ""
    name = row["name"] if row["honest"] else f"*{row['name']}*"
    cells = [name, row["group"], f"{row['eps']:g}", row["protocol"], *shown, f"{row['verdict']}{wrong}"]
    return "| " + " | ".join([*cells, ", ".join(row["alarms"]), f"{row['seconds']:.0f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", default="quick")
    parser.add_argument("--limit", type=int, default=360, help="images, the first of the test split")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models")
    parser.add_argument("--folder", type=Path, default=Path("out/bench"), help="of weights and claims")
    parser.add_argument("--resume", action="store_true", help="keep the rows that an interrupted run left")
    parser.add_argument("--out", type=Path, default=HERE / "audit.json")
    parser.add_argument(
        "--quick", action="store_true", help="little of everything, to out/quick: does it run?"
    )
    options = parser.parse_args()
    names = options.only or list(SUBJECTS)
    if options.quick:
        names, options.limit = QUICK, 12
        options.folder, options.out = Path("out/quick/bench"), Path("out/quick/audit.json")
    unknown = [name for name in names if name not in SUBJECTS]
    if unknown:
        raise InputError(f"no model is called {unknown[0]!r}; known: {', '.join(SUBJECTS)}.")
    peer = importlib.util.find_spec("pyautoattack") is not None
    data, rows = ecnn.load_data("digits"), []
    for name in names:
        path = options.folder / f"{name}-{options.limit}-{options.budget}.json"
        if options.resume and path.exists():
            row = files.read_json(path)
        else:
            row = examine(
                SUBJECTS[name],
                data,
                limit=options.limit,
                budget=options.budget,
                folder=options.folder,
                peer=peer,
            )
            files.write_json(path, row)
        rows.append(row)
        sys.stdout.write(_line(row) + "\n")
        sys.stdout.flush()
    result: Row = {
        "environment": runs.environment(),
        "budget": options.budget,
        "limit": options.limit,
        "confusion": confusion(rows),
        "rows": rows,
    }
    if not options.only:
        result["truths"] = truths(*((1, 8) if options.quick else (4, 100)), options.budget)
        files.write_json(options.out, result)
        files.write_text(options.out.with_suffix(".md"), markdown(result))
    for part in result["confusion"]:
        sys.stdout.write(f"{part}\n")


if __name__ == "__main__":
    main()
