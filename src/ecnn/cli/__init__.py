"""The command `ecnn`: arguments in, rooms called, results on standard output, all else on standard error."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Annotated, ParamSpec

import typer

import ecnn
from ecnn.cli.audit_command import audit
from ecnn.cli.code_command import code
from ecnn.cli.evaluate_command import evaluate
from ecnn.cli.models_command import models
from ecnn.cli.reproduce_command import reproduce
from ecnn.cli.train_command import train
from ecnn.errors import InputError

Arguments = ParamSpec("Arguments")

# Threads that wait for each other sleep. By default they spin, and beside other processes on the same cores work all
# but stops. Read when torch is loaded, so set before; whoever sets one of them decides for himself.
_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}

app = typer.Typer(
    name="ecnn",
    help="Error-correcting neural networks: design codes, train on them, attack them, audit the result.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def one_sentence_errors(command: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """The command with every InputError shown as a sentence and exit status 2."""

    @functools.wraps(command)
    def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except InputError as error:
            if kwargs.get("debug"):
                raise
            typer.echo(f"ecnn: {error}", err=True)
            raise typer.Exit(2) from None

    return guarded


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if not os.environ.keys() & {*_WAITING, "GOMP_SPINCOUNT"}:
        os.environ.update(_WAITING)
    if version:
        typer.echo(f"ecnn {ecnn.__version__}")
        raise typer.Exit


# In the order in which the help lists them.
for _command in (code, train, evaluate, audit, reproduce, models):
    app.command()(one_sentence_errors(_command))
