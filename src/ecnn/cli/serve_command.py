"""`ecnn serve`: serves a model over HTTP, with a web page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ecnn.cli.options import Device, Root, SavedModel
from ecnn.errors import InputError

if TYPE_CHECKING:
    from ecnn.data import Split


def serve(
    model: SavedModel,
    port: Annotated[int, typer.Option(help="0 takes one that is free.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen at; any but a loopback one lets other machines in.")
    ] = "127.0.0.1",
    compare: Annotated[
        str | None,
        typer.Option(help="Another run or shipped model for the same images, to compare with."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A limit: limits.images=256. Repeatable; docs/serving.md lists them."),
    ] = None,
    root: Root = Path("data"),
    device: Device = "auto",
) -> None:
    """Serve a model: a page to try and to attack it at /, an HTTP API at /v1, its description at /docs."""
    from ecnn import pipeline, runs, serving
    from ecnn.checks import build
    from ecnn.spec import parse_settings_of

    limits = parse_settings_of("limits", settings or [])
    place = runs.find_device(device)
    subject = serving.load_subject(model, device=place)
    other = None if compare is None else serving.load_subject(compare, device=place)
    with pipeline.suitable_threads(subject.classifier.model, subject.blank()):
        serving.serve(
            subject,
            host=host,
            port=port,
            compare=other,
            examples=_examples(model, root),
            limits=build("the limits", serving.Limits, limits),
            on_ready=lambda address, is_local: _announce(model, address, is_local),
        )


def _announce(model: str, address: str, is_local: bool) -> None:
    if not is_local:
        typer.echo(
            "ecnn: other machines can use the model now, without a password: put a proxy that requires one in front of "
            "this server, or leave --host out.",
            err=True,
        )
    typer.echo(f"serving {model} at {address} (Ctrl-C ends it)", err=True)


def _examples(model: str, root: Path) -> Split | None:
    """Test images of the run, for the page; None if they cannot be loaded, with a message that says why."""
    from ecnn import pipeline, runs

    try:
        return pipeline.load_test_images(runs.read_spec(model), root)
    except InputError as error:
        typer.echo(f"ecnn: the page has no examples: {error}", err=True)
        return None
