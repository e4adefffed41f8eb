"""`ecnn export`: a trained model as a file that other programs run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ecnn.cli.options import JsonFlag, SavedModel


def export(
    model: SavedModel,
    out: Annotated[
        Path, typer.Option(help="The file, .onnx or .pt2; a card, FILE.md, is written beside it.")
    ],
    format: Annotated[
        str | None, typer.Option(help="onnx or torchexport.  [default: by the ending of --out]")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a model as ONNX or torch.export with the names of its classes, compare the two, and write a card."""
    from ecnn.exporting import export_model

    found = export_model(model, out, format=format)
    if as_json:
        typer.echo(json.dumps({**vars(found), "path": str(found.path), "card": str(found.card)}))
        return
    apart = "not compared with the model: install onnxruntime"
    if found.difference is not None:
        apart = f"{found.difference:.1g} of the largest score apart from the model"
    typer.echo(f"wrote {found.path} ({found.format}, {apart})\nwrote {found.card}")
