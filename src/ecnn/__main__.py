"""`python -m ecnn` is the same as `ecnn`."""

import os
import signal
import sys


def main() -> None:
    """Runs the command `ecnn`. Ctrl-C during its imports ends the process without a traceback."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # The parent process may have closed it: a file that we open must not get its number.
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ecnn.cli import app

    app()


if __name__ == "__main__":
    main()
