"""`ecnn models`: lists the shipped models."""

from __future__ import annotations

import json

import typer

from ecnn.cli.options import JsonFlag


def models(as_json: JsonFlag = False) -> None:
    """List the models that come with the package."""
    from ecnn import runs

    found = {name: runs.describe_run(runs.zoo_folder(name)) for name in runs.models()}
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name, facts in found.items():
        trained = (
            f"adversarially trained at {facts['adversarial']}"
            if facts["adversarial"]
            else "no adversarial training"
        )
        typer.echo(f"{name:<22}{facts['data']:<10}test {100 * facts['test_accuracy']:.2f} %   {trained}")
