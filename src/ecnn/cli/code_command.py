"""`ecnn code`: designs a code, or shows one."""

from __future__ import annotations

import json
import math
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import ecnn
from ecnn import files
from ecnn.cli.options import JsonFlag
from ecnn.cli.statuses import INTERRUPTED
from ecnn.errors import InputError


class CodeObjective(StrEnum):
    energy = "energy"
    distance = "distance"


def code(
    classes: Annotated[int | None, typer.Option(help="Number of classes.")] = None,
    length: Annotated[int | None, typer.Option(help="Number of tasks, the members of the ensemble.")] = None,
    arity: Annotated[int, typer.Option(help="Symbols per task.")] = 2,
    objective: Annotated[
        CodeObjective, typer.Option(help="The paper's energy, or the largest row, then column distance.")
    ] = CodeObjective.energy,
    column_weight: Annotated[
        str, typer.Option(help='Weight of columns in the energy: "balanced" or a number.')
    ] = "balanced",
    chains: Annotated[int, typer.Option(help="Independent runs that share the steps.")] = 8,
    seed: Annotated[int, typer.Option(help="Same seed, same code.")] = 0,
    steps: Annotated[
        int | None, typer.Option(help="Proposals in all.  [default: 4 million, distance: 24 million]")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Stop after this long even if steps are left.")
    ] = None,
    init: Annotated[str | None, typer.Option(help="Start from this code: a file or a shipped name.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the code here as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the code here: .png, .pdf or .svg.")] = None,
    show: Annotated[str | None, typer.Option(help="Show a code instead: a file or a shipped name.")] = None,
    as_json: JsonFlag = False,
) -> int:
    """Design a code and print its distances beside the bounds, or show one (--show)."""
    from ecnn import files, plots
    from ecnn.annealing import kernel

    for path in filter(None, (out, plot)):
        files.check_writable(path)
    if plot:
        plots.check_figure_path(plot)
    elapsed = None
    if show is not None:
        if classes is not None or length is not None:
            raise InputError("--show shows an existing code, so it takes no --classes or --length.")
        found = ecnn.load_code(show)
    else:
        if classes is None or length is None:
            raise InputError(
                "give --classes and --length to design a code, or --show FILE or NAME to see one."
            )
        if not kernel.COMPILED:
            typer.echo(
                "designing without numba; with it (pip install numba) this is about 100 times faster",
                err=True,
            )
        started = time.monotonic()
        with ecnn.progress_bar("designing") as progress:
            found = ecnn.design_code(
                classes,
                length,
                arity=arity,
                objective=objective.value,
                column_weight=_column_weight(column_weight),
                chains=chains,
                steps=steps,
                seconds=seconds,
                seed=seed,
                init=ecnn.load_code(init) if init is not None else None,
                progress=progress,
            )
        elapsed = time.monotonic() - started
    is_cut = elapsed is not None and found.provenance["stopped_by"] == "interrupt"
    if is_cut:
        out, plot = _beside(out), _beside(plot)
    if out:
        found.save(out)
    if plot:
        plots.plot_code(found, plot)
    typer.echo(
        json.dumps(_code_as_json(found, elapsed)) if as_json else _code_as_text(found, elapsed, out, plot)
    )
    if not is_cut:
        return 0
    kept = f"kept in {out}: --init {out} goes on from it" if out else "printed: with --out it would be kept"
    typer.echo(f"ecnn: interrupted. The best code so far is {kept}.", err=True)
    return INTERRUPTED


def _beside(path: Path | None) -> Path | None:
    """The path for the result of an interrupted search; another name if the file exists, perhaps from a longer one."""
    if path is None or not files.exists(path):
        return path
    return path.with_name(f"{path.stem}-interrupted{path.suffix}")


def _column_weight(text: str) -> Any:
    try:
        return text if text == "balanced" else float(text)
    except ValueError:
        raise InputError(f'--column-weight must be "balanced" or a number, not {text!r}.') from None


def _code_as_json(found: ecnn.CodeMatrix, elapsed: float | None) -> dict[str, Any]:
    report = found.report(found.provenance.get("column_weight", "balanced"))
    values: dict[str, Any] = {**vars(report)}
    for key in ("objective", "seed", "steps", "proposals", "stopped_by"):
        values[key] = found.provenance.get(key)
    values.update(seconds=elapsed, hash=found.content_hash, symbols=found.symbols.tolist())
    # JSON has no infinity: the energy of a code that repeats a row or column, the column distance of a single column.
    return {key: None if value in (math.inf, -math.inf) else value for key, value in values.items()}


def _code_as_text(found: ecnn.CodeMatrix, elapsed: float | None, out: Path | None, plot: Path | None) -> str:
    lines = [str(found.report(found.provenance.get("column_weight", "balanced")))]
    if elapsed is not None:
        why = {
            "steps": "all steps used",
            "seconds": "stopped by --seconds",
            "interrupt": "interrupted",
            "bounds": "both bounds met, so nothing better exists",
        }[found.provenance["stopped_by"]]
        lines.append(
            f"{found.provenance['proposals']:,} proposals in {elapsed:.1f} s, seed {found.provenance['seed']}: {why}"
        )
    else:
        lines += (
            ["", *("".join(f"{symbol:x}" for symbol in row) for row in found.symbols)]
            if found.arity <= 16
            else []
        )
        lines += [""] + [f"{key}: {value}" for key, value in found.provenance.items()]
    lines += [f"wrote {path}" for path in (out, plot) if path]
    return "\n".join(lines)
