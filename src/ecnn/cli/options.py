"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Root = Annotated[Path, typer.Option(help="Where dataset files are.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")]
SavedModel = Annotated[str, typer.Argument(help="A run folder or the name of a shipped model.")]
NORM_HELP = "linf, l2 or l1."
Resume = Annotated[bool, typer.Option(help="Go on with what --out holds.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only try the model on one image and say what it would cost.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
