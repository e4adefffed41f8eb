"""`ecnn report`: writes one HTML page on trained models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import ecnn
from ecnn.cli.options import NORM_HELP, Device, Root


def report(
    models: Annotated[list[str], typer.Argument(help="Run folders, or names of shipped models.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    format: Annotated[str, typer.Option(help="html.")] = "html",
    images: Annotated[
        int, typer.Option(help="Test images that curves and pictures are computed on; 0 computes nothing.")
    ] = 32,
    norm: Annotated[str | None, typer.Option(help=f"{NORM_HELP}  [default: the run's own]")] = None,
    eps: Annotated[
        str | None,
        typer.Option(help="Radius of these attacks, 0.04 or 8/255.  [default: the run's own]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same attacks.")] = 0,
    root: Root = Path("data"),
    device: Device = "auto",
) -> None:
    """Write one self-contained page: verdict, accuracy against eps, attacked images, members, code, training."""
    from ecnn import pipeline

    with ecnn.progress_bar("drawing") as progress:
        written = pipeline.write_report(
            models,
            out,
            format=format,
            images=images,
            norm=norm,
            eps=eps,
            seed=seed,
            root=root,
            device=device,
            progress=progress,
        )
    typer.echo(f"wrote {written}")
