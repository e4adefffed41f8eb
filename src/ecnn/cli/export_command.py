"""`ecnn export`: writes a model as a file for other programs, or as a folder for a model hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ecnn.cli.options import JsonFlag, SavedModel


def export(
    model: SavedModel,
    out: Annotated[
        Path,
        typer.Option(help="The file, .onnx or .pt2, and a card, FILE.md, beside it; or the folder."),
    ],
    format: Annotated[
        str | None,
        typer.Option(
            help="onnx or torchexport for a file, huggingface or robustbench for a folder.  [default: by the ending of "
            "--out]"
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a model with the names of its classes and a card: as ONNX or torch.export, compared with the model; as a
    folder for the Hugging Face hub; or as an entry in RobustBench's manner, which quotes the run's audit."""
    from ecnn.checks import check_choice
    from ecnn.exporting import FORMATS, export_model
    from ecnn.hub import FOLDERS, export_folder

    if format is not None:
        check_choice("format", format, [*FORMATS.values(), *FOLDERS])
    if format in FOLDERS:
        folder = export_folder(model, out, format=format)
        facts, note = vars(folder), folder.format
    else:
        file = export_model(model, out, format=format)
        apart = "not compared with the model: install onnxruntime"
        if file.difference is not None:
            apart = f"{file.difference:.1g} of the largest score apart from the model"
        facts, note = vars(file), f"{file.format}, {apart}"
    facts = {**facts, "path": str(facts["path"]), "card": str(facts["card"])}
    typer.echo(json.dumps(facts) if as_json else f"wrote {facts['path']} ({note})\nwrote {facts['card']}")
