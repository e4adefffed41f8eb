"""`ecnn data`: lists the dataset files that are present or absent, or checks a folder of images."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ecnn.cli.options import JsonFlag, Root
from ecnn.cli.statuses import MISTAKE

if TYPE_CHECKING:
    from ecnn.data.inventory import OwnImages


def data(
    folder: Annotated[
        str | None, typer.Argument(help="Look at this folder of images by class instead.")
    ] = None,
    root: Root = Path("data"),
    as_json: JsonFlag = False,
) -> int:
    """Say which datasets are there and which files are absent, or read all images of a folder of yours."""
    from ecnn.data.inventory import find_datasets, inspect_folder

    if folder is not None:
        own = inspect_folder(folder, root)
        sizes = [{"height": height, "width": width, "images": n} for (height, width), n in own.sizes.items()]
        typer.echo(json.dumps({**asdict(own), "sizes": sizes}) if as_json else _folder_as_text(own))
        for problem in own.problems:
            typer.echo(f"ecnn: {problem}", err=True)
        return MISTAKE if own.problems else 0
    found = find_datasets(root)
    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in found]))
        return 0
    for entry in found:
        lacks = f"absent: {', '.join(entry.missing)}" if entry.missing else f"there, {entry.where}"
        typer.echo(f"{entry.name:<13}{lacks}")
        for url in entry.fetch:
            typer.echo(f"{'':<13}from {url}")
    return 0


def _folder_as_text(own: OwnImages) -> str:
    from ecnn.data.sources import note_on_order

    total = sum(own.counts.values())
    lines = [f"{own.folder}: {total:,} images of {len(own.counts)} classes, {own.grey:,} of them grey"]
    lines += [f"{count:>9,}  {name}" for name, count in own.counts.items()]
    common = sorted(own.sizes, key=lambda size: -own.sizes[size])[:3]
    shown = ", ".join(f"{height} x {width} ({own.sizes[height, width]:,})" for height, width in common)
    more = f" and {len(own.sizes) - 3:,} other sizes" if len(own.sizes) > 3 else ""
    lines.append(f"height x width: {shown}{more}")
    if own.left_out:
        others = ", ".join(f"{count:,} {kind}" for kind, count in own.left_out.items())
        lines.append(f"not used: {others}")
    note = note_on_order(list(own.counts))
    if note is not None:
        lines.append(note)
    if own.untested:
        lines.append(f"classes with one image, for training, and none to test on: {', '.join(own.untested)}")
    return "\n".join(lines)
