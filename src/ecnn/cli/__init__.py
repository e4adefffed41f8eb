"""The command `ecnn`: parses arguments and calls the rooms; prints results to stdout, and everything else to stderr."""

from __future__ import annotations

import os
from typing import Annotated

import typer

import ecnn
from ecnn.cli.audit_command import audit
from ecnn.cli.code_command import code
from ecnn.cli.data_command import data
from ecnn.cli.doctor_command import doctor
from ecnn.cli.evaluate_command import evaluate
from ecnn.cli.export_command import export
from ecnn.cli.models_command import models
from ecnn.cli.predict_command import predict
from ecnn.cli.quickstart_command import quickstart
from ecnn.cli.report_command import report
from ecnn.cli.reproduce_command import reproduce
from ecnn.cli.serve_command import serve
from ecnn.cli.statuses import STATUSES, CommandGroup, with_status
from ecnn.cli.train_command import train

# Makes OpenMP threads sleep while they wait for each other. By default they spin, and with other processes on the same
# cores the work almost stops. OpenMP reads these when torch is loaded, so they are set before. If the user has set one
# of them, nothing is changed.
_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}

app = typer.Typer(
    name="ecnn",
    cls=CommandGroup,
    help="Error-correcting neural networks: design codes, train on them, attack them, audit the result.",
    epilog=STATUSES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if not os.environ.keys() & {*_WAITING, "GOMP_SPINCOUNT"}:
        os.environ.update(_WAITING)
    if version:
        typer.echo(f"ecnn {ecnn.__version__}")
        raise typer.Exit


# The help lists them in this order.
_COMMANDS = (
    *(quickstart, code, train, predict, serve, evaluate, audit, report, export),
    *(reproduce, models, data, doctor),
)
for _command in _COMMANDS:
    app.command(epilog=STATUSES)(with_status(_command))
