"""`python -m ecnn` is the same as `ecnn`."""

from ecnn.cli import app

app()
