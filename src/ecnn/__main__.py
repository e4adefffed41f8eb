"""`python -m ecnn` is the same as `ecnn`."""

import os
import signal
import sys


def main() -> None:
    """The command `ecnn`; until it has begun, Ctrl-C ends it without a word."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us: no file of ours must take its place
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ecnn.cli import app

    app()


if __name__ == "__main__":
    main()
