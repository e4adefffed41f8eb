"""How every command ends: its exit status and, where something went wrong, one sentence on standard error."""

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

#: A mistake in the request; a fault of the machine or the model; Ctrl-C; nobody reads what is printed.
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
_LONGEST = 400  # characters of somebody else's message


def with_status(command: Callable[..., int | None]) -> Callable[..., None]:
    """The command with an option --debug; what it returns, or what it raises, decides its exit status.

    Only a returned status is a verdict: whatever a model raises, SystemExit too, is a fault.
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
    """All commands. What Typer prints by itself ends like a command: help, the version, a mistake on the command line.

    Left alone it ends with 1 where that cannot be written, the status of a model that is not believable.
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
        except SystemExit as end:  # of shell completion; or with 1, Typer's for an output that nobody reads
            return UNREAD if isinstance(end.__context__, BrokenPipeError) else int(end.code or 0)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise DiskError(f"cannot write what was asked for: {error.strerror or error}.") from error
        except Exception as error:
            # A mistake on the command line has it; some versions of Typer raise click's, some their own.
            show = getattr(error, "show", None)
            if show is None:
                raise
            with contextlib.suppress(OSError):  # nobody reads; the status says it
                show()
            return MISTAKE


@contextlib.contextmanager
def telling_if_finished(out: Path | None, result: str) -> Iterator[None]:
    """Says "already finished" if the work leaves the result in its folder as it found it: all was on the disk."""

    def read() -> bytes | None:
        return files.read_bytes(out / result) if out is not None and files.is_file(out / result) else None

    before = read()
    yield
    if before is not None and before == read():
        _say(f"already finished: this is what {out} holds")


@contextlib.contextmanager
def failing_alone(name: str, count: int) -> Iterator[list[int]]:
    """One of several pieces of work: what goes wrong with it is said, and the others go on.

    A full disk, Ctrl-C and what goes wrong with a single one end the command as usual.

    Args:
        name: of the piece.
        count: of all.

    Yields:
        A list that holds its exit status afterwards, if it failed.
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
    """What code of the user's prints goes to standard error, because standard output is for the result."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _run(command: Callable[[], int | None], debug: bool) -> int:
    """Runs the command, says what went wrong, and returns the exit status."""
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
    """What an output of another encoding cannot hold: bytes of names of files as they are, letters as \\u65e5."""
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    coded = [
        letter.encode("ascii", "surrogateescape" if "\udc80" <= letter <= "\udcff" else "backslashreplace")
        for letter in letters
    ]
    return b"".join(coded), error.end


def _explain(error: BaseException) -> tuple[int, str]:
    """The exit status of an error, and a sentence for a person; notes on the error say what is kept."""
    text = (str(error).strip().splitlines() or [""])[0]
    notes = getattr(error, "__notes__", [])
    if isinstance(error, InputError):
        return MISTAKE, str(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, " ".join(["interrupted.", *notes])
    if not type(error).__module__.startswith("ecnn."):  # ours are sentences already
        text = f"{text[:_LONGEST]}..." if len(text) > _LONGEST else text.rstrip(".")
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        text = f"the machine or the model failed: {text} (--debug shows where)."
    return FAULT, " ".join([text, *notes])


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads, or the disk is full; the status says it
        typer.echo(text, err=True)


def _let_go_of_outputs() -> None:
    """Points what can no longer be written at nothing: Python tries once more at its end, with a status of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
