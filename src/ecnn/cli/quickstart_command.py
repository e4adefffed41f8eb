"""`ecnn quickstart`: designs a code, trains, attacks, audits and reports on the embedded digits."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import ecnn
from ecnn.cli.options import Device

if TYPE_CHECKING:
    from ecnn.pipeline import QuickstartRow


def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for the networks and report.html.")] = Path("out"),
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="One epoch and few images, to see that it works; the numbers mean nothing."
        ),
    ] = False,
    device: Device = "auto",
) -> None:
    """Design a code, train three networks on digits, attack and audit them, and write a report; about two minutes."""
    from ecnn import pipeline, runs

    with runs.kept_in(out):
        for step in pipeline.quickstart_steps(out, quick=quick, device=device):
            with ecnn.progress_bar(step.title) as progress:
                said = step.run(progress)
            typer.echo(said)
    typer.echo(f"\n{_table(pipeline.quickstart_rows(out))}\n\n{_next(out)}")


def _table(rows: list[QuickstartRow]) -> str:
    audit = rows[0].audit
    lines = [f"{audit.images} test images, {audit.norm.capitalize()} {audit.eps:g}"]
    lines.append(
        f"{'network':<10}{'clean':>8}{'as papers attack':>19}{'audited':>10}   95 % interval   verdict"
    )
    for row in rows:
        audit = row.audit
        low, high = (100 * bound for bound in audit.interval)
        lines.append(
            f"{row.name:<10}{100 * audit.clean_accuracy:>6.1f} %{100 * row.claim:>17.0f} %"
            f"{100 * audit.accuracy:>8.1f} %   {low:>4.1f} to {high:>4.1f} %   {audit.verdict}"
        )
    return "\n".join(lines)


def _next(out: Path) -> str:
    plain, code, mine, page = (
        shlex.quote(str(out / name)) for name in ("plain", "ecnn", "mine", "mine.html")
    )
    tries = {
        f"ecnn serve {code} --compare {plain}": "draw a digit, attack it, watch the members",
        f"ecnn evaluate {code} --attack pgd --eps 0.12 --steps 50 --step-size 0.02 --on members": "more care",
        f"ecnn train --data digits --eps 0.08 --attack-on members --out {mine}": "a network of your own",
        f"ecnn report {mine} --out {page}": "and its report",
    }
    lines = [
        f"Open {out}/report.html in a browser: the three networks beside each other, and which number to believe.",
        "Then try:",
        *(f"  {command}   # {what}" for command, what in tries.items()),
    ]
    return "\n".join(lines)
