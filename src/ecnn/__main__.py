"""`python -m ecnn` is the same as `ecnn`."""

import signal


def main() -> None:
    """The command `ecnn`; until it has begun, Ctrl-C ends it without a word."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ecnn.cli import app

    app()


if __name__ == "__main__":
    main()
