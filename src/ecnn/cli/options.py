"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Root = Annotated[Path, typer.Option(help="Where dataset files are.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")]
ModelOrModule = Annotated[
    str | None, typer.Argument(help="A run folder or the name of a shipped model; or use --module.")
]
SavedModel = Annotated[str, typer.Argument(help="A run folder or the name of a shipped model.")]
Module = Annotated[
    str | None,
    typer.Option(
        help="file.py:name of a torch module from [0, 1] pixels to scores, or of a function that returns one. Runs "
        "the file's code."
    ),
]
TestData = Annotated[
    str | None, typer.Option(help="A dataset or a folder of images.  [default: what the run was trained on]")
]
ImageSize = Annotated[
    int | None,
    typer.Option(help="For --module with a folder of images: resize to this side length in pixels."),
]
Classes = Annotated[
    str | None, typer.Option(help="Only images of these classes: 3,5,7 or names.  [default: all]")
]
BatchSize = Annotated[
    int | None, typer.Option(help="Images at a time: more need more memory; results stay the same.")
]
Cluster = Annotated[
    str | None,
    typer.Option(
        help="ray: batches of images are tasks of the Ray cluster that RAY_ADDRESS names, or of a local one; the same "
        "outcomes."
    ),
]
OWN_ATTACK_HELP = "file.py:function of one of yours, (model, images, labels, *, norm, eps, seed) -> images."
NORM_HELP = "linf, l2 or l1."
VIEW_HELP = "What the attack follows: scores, linear, tempered, members."
Resume = Annotated[bool, typer.Option(help="Continue from what --out holds.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only try the model on one image and say what it would cost.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
