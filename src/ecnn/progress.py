"""Progress of long work: the callable by which it is reported, and a bar that shows it. No room prints by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

#: Called often, as progress(steps done, steps in all, results so far in a few words), so it should be fast.
Progress = Callable[[int, int, str], None]


class Milestone(str):
    """News at the end of an epoch or a stage, which is printed as a line where no bar is shown."""

    __slots__ = ()


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A bar on standard error, to be passed as `progress=`; a line per milestone if that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[news]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None, news="")

        def show(done: int, total: int, news: str) -> None:
            bar.update(task, completed=done, total=total, news=news)
            if not console.is_terminal and isinstance(news, Milestone):
                with suppress(OSError):  # nobody reads it any more: no reason to end the work
                    sys.stderr.write(f"{title}: {news}\n")
                    sys.stderr.flush()

        yield show
