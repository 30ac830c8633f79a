"""Tells how far a long measurement is: a bar on a terminal, lines in a log."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Seconds between two lines of a log.
EVERY = 10.0

_log = logging.getLogger("jdist.verify")


@contextlib.contextmanager
def progress(text: str, total: int) -> Iterator[Callable[..., None]]:
    """Shows a bar while its block runs, if stderr is a terminal.

    The logger "jdist.verify" has a line every 10 s, of level INFO.

    Args:
      text: What is done.
      total: In how many runs; 0 shows nothing, for what is over before a bar is read.

    Yields:
      A function `advance(now_doing=None, runs=1)` to call after each run; also before
      one, with `runs=0` and a text, which says what is done now.
    """
    if not total:
        yield lambda now_doing=None, runs=1: None
        return
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    began = told = time.monotonic()
    done, shown = 0, text
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(text, total=total)

        def advance(now_doing: str | None = None, runs: int = 1) -> None:
            nonlocal done, told, shown
            done += runs
            shown = now_doing or shown
            bar.update(task, advance=runs, description=shown)
            now = time.monotonic()
            if done and now - told >= EVERY:
                told = now
                left = (now - began) / done * (total - done)
                _log.info("%s: %d of %d runs, %.0f s left", shown, done, total, left)

        yield advance
