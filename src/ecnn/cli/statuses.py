"""Ends every command: with an exit status and, after an error, one sentence on standard error."""

from __future__ import annotations

import codecs
import contextlib
import functools
import inspect
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ecnn import files
from ecnn.errors import DiskError, InputError

#: A mistake in the request; a fault of the machine or the model; Ctrl-C; the reader of standard output has closed it.
MISTAKE, FAULT, INTERRUPTED, UNREAD = 2, 4, 130, 141
#: The end of every command's help.
STATUSES = (
    "Exit status: 0 done; 2 a mistake in the request; 4 a fault of the machine or the model; 130 Ctrl-C. The status of "
    "an audit is its verdict: 0 believable or trustworthy, 1 not believable or below the minimum, 3 inconclusive."
)
_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")],
)
_LONGEST = 400  # characters that are printed of an error message that is not ours


def with_status(command: Callable[..., int | None]) -> Callable[..., None]:
    """The command with an additional option --debug, and with an exit status from what it returns or raises.

    Only a returned status can be the verdict of an audit: anything that a model raises, SystemExit too, is a fault.
    """

    @functools.wraps(command)
    def ending(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        raise typer.Exit(_run(functools.partial(command, *args, **kwargs), debug))

    signature = inspect.signature(command, eval_str=True)
    parameters = [*signature.parameters.values(), _DEBUG]
    ending.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    ending.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return ending


class CommandGroup(TyperGroup):
    """The group of all commands; gives our exit statuses also to help, the version and mistakes on the command line.

    Typer itself exits with 1 if it cannot write these, and 1 is our status for a claim that is not believable.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        if not options.get("standalone_mode", True):
            return super().main(*args, **options)
        options["standalone_mode"] = False
        sys.exit(_run(functools.partial(self._status, *args, **options), debug=False))

    def _status(self, *args: Any, **options: Any) -> int:
        try:
            return super().main(*args, **options) or 0
        except typer.Abort:
            return INTERRUPTED
        except SystemExit as end:  # from shell completion; or 1 from Typer, for an output that was closed
            return UNREAD if isinstance(end.__context__, BrokenPipeError) else int(end.code or 0)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise DiskError(f"cannot write what was asked for: {error.strerror or error}.") from error
        except Exception as error:
            # Only errors on the command line have it. They are click's or Typer's own, depending on Typer's version.
            show = getattr(error, "show", None)
            if show is None:
                raise
            with contextlib.suppress(OSError):  # standard error is closed; the status is enough
                show()
            return MISTAKE


@contextlib.contextmanager
def telling_if_finished(out: Path | None, result: str) -> Iterator[None]:
    """Prints "already finished" if the block leaves the file `result` in the folder as it was: no work was left."""

    def read() -> bytes | None:
        return files.read_bytes(out / result) if out is not None and files.is_file(out / result) else None

    before = read()
    yield
    if before is not None and before == read():
        _say(f"already finished: this is what {out} holds")


@contextlib.contextmanager
def failing_alone(name: str, count: int) -> Iterator[list[int]]:
    """Runs one of several pieces of work; if it fails, prints why and lets the others go on.

    A full disk, Ctrl-C, and an error in the only piece of work end the command as usual.

    Args:
        name: of the piece of work.
        count: how many pieces there are.

    Yields:
        A list that holds the exit status afterwards, if this piece failed.
    """
    statuses: list[int] = []
    try:
        yield statuses
    except DiskError:
        raise
    except Exception as error:
        if count == 1:
            raise
        status, sentence = _explain(error)
        _say(f"ecnn: {name}: {sentence}")
        statuses.append(status)


@contextlib.contextmanager
def prints_aside() -> Iterator[None]:
    """Sends what the user's code prints to standard error, because standard output is for the result."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _run(command: Callable[[], int | None], debug: bool) -> int:
    """Runs the command, prints what went wrong, and returns the exit status."""
    is_own_process = signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # as `ecnn.__main__` left it
    if is_own_process:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("ecnn-print", _encode_anyway)
        sys.stdout.reconfigure(errors="ecnn-print")
    try:
        status = command() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        return UNREAD
    except BaseException as error:
        status, sentence = _explain(error)
        _say(("".join(traceback.format_exception(error)) if debug else "") + f"ecnn: {sentence}")
        return status
    finally:
        if is_own_process:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        _let_go_of_outputs()


def _encode_anyway(error: UnicodeError) -> tuple[bytes, int]:
    """Error handler for encoding standard output: bytes in file names stay as they are, letters become \\u65e5."""
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    coded = [
        letter.encode("ascii", "surrogateescape" if "\udc80" <= letter <= "\udcff" else "backslashreplace")
        for letter in letters
    ]
    return b"".join(coded), error.end


def _explain(error: BaseException) -> tuple[int, str]:
    """The exit status of an error, and a sentence for the user with the notes on the error, such as what is kept."""
    text = (str(error).strip().splitlines() or [""])[0]
    notes = getattr(error, "__notes__", [])
    if isinstance(error, InputError):
        return MISTAKE, str(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, " ".join(["interrupted.", *notes])
    if not type(error).__module__.startswith("ecnn."):  # our own messages are sentences already
        text = f"{text[:_LONGEST]}..." if len(text) > _LONGEST else text.rstrip(".")
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        text = f"the machine or the model failed: {text} (--debug shows where)."
    return FAULT, " ".join([text, *notes])


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # standard error is closed, or the disk is full; the status is enough
        typer.echo(text, err=True)


def _let_go_of_outputs() -> None:
    """Redirects an output that can no longer be written to the null device.

    Otherwise Python flushes it again at exit, fails, and replaces our exit status by its own.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
