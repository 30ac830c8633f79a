"""Passing on what the workers write: to the terminal, to a file, and to memory.

Two threads per worker read its output and its errors line by line. Whatever happens to
the places that lines go to, reading goes on: a worker must never block because its
output is not taken.
"""

import io
import re
import select
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Self

from rich.console import Console

from jdist.rpc.extension import Child

__all__ = ["InterruptFolder", "Relay", "Sink", "last_traceback"]

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
# Enough for a traceback through JAX and its causes; the rest is not held in memory.
_KEPT_LINES = 400
_FEW_LINES = 20
# A worker that writes no line ends must not fill the memory of the launcher.
_LONGEST_LINE = 2**16
_PATIENCE = 5.0
_TRACEBACK = "Traceback (most recent call last):"
_INTERRUPTED = ("KeyboardInterrupt", "jdist.rpc.base.errors.WorkerLost:")
# gloo prints it for every group in which all is well, and has no setting for that.
_CONNECTED = re.compile(
    r"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. "
    r"Expected number of connected peer ranks is : \1"
)
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


class Sink:
    """Lines go to an unbuffered file for as long as it takes them.

    Attributes:
      name: For complaints.
      refusal: Why it takes no more; None while it does.
    """

    def __init__(self, name: str, file: io.FileIO) -> None:
        self.name = name
        self.refusal: OSError | ValueError | None = None
        self.file = file

    def write(self, data: bytes) -> None:
        """Writes everything, or remembers why it could not and never tries again."""
        while data and self.refusal is None:
            try:
                # Unbuffered files may take a part only.
                written = self.file.write(data)
                if written is None:  # a terminal that was set to non-blocking
                    select.select([], [self.file], [])
                data = data[written or 0 :]
            except (OSError, ValueError) as error:  # ValueError: it was closed.
                self.refusal = error


class Relay:
    """Gives every line of every worker its worker's name.

    Names are coloured on a terminal only. Carriage returns end a line too, so that
    progress bars are seen while they move.

    Args:
      folder: Where each worker gets a file `NAME.log`, without names before the lines;
        after a restart another one, `NAME.restart1.log`. None for no files. Files of an
        earlier run are overwritten.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        # The descriptors: `sys.stdout` would encode again, and could fail at exit when
        # it flushes to a closed pipe.
        self._output = Sink("standard output", _stream(1))
        self._errors = Sink("standard error", _stream(2))
        # One of the two may be a terminal and the other a file.
        self._consoles = Console(), Console(stderr=True)
        self._logs: dict[str, Sink] = {}
        # Logs of workers before a restart. They close at the end: a thread may still
        # read from a process that outlived its worker.
        self._earlier: list[Sink] = []
        self._kept: dict[str, deque[str]] = {}
        self._threads: list[threading.Thread] = []
        self._folding = False
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def follow(self, child: Child, restart: int = 0) -> None:
        """Begins to pass on what this worker writes.

        Args:
          child: The worker.
          restart: How often it was started before.

        Raises:
          OSError: Its log cannot be created.
        """
        kept = self._kept[child.name] = deque(maxlen=_KEPT_LINES)
        if self._folder is not None:
            if child.name in self._logs:
                self._earlier.append(self._logs[child.name])
            again = f".restart{restart}" if restart else ""
            path = self._folder / f"{child.name}{again}.log"
            self._logs[child.name] = Sink(str(path), io.FileIO(path, "w"))
        # By the first start, so that a worker keeps its colour after a restart.
        number = [*self._kept].index(child.name) + 1
        for pipe, sink, console, tail in (
            # Python writes tracebacks to standard error: the tail for
            # `repeat_last_words` is of that.
            (child.output, self._output, self._consoles[0], None),
            (child.errors, self._errors, self._consoles[1], kept),
        ):
            label = _label(console, child.name, _COLOURS[number % len(_COLOURS)])
            thread = threading.Thread(
                target=self._pass_on,
                args=(child.name, pipe, sink, label, tail),
                name=f"jdist-relay-{child.name}",
                # A process that left its group may hold the pipe open: this program
                # must end all the same.
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def fold_interrupts(self) -> None:
        """From now on shows no traceback of an interrupt; the logs keep them.

        Called before Ctrl-C is handed on: what each worker was doing just then is of no
        interest to the one who pressed it.
        """
        self._folding = True

    def repeat_last_words(self, child: Child) -> None:
        """Shows the end of a worker's errors again: its last traceback, if any."""
        words = last_traceback(self._kept.get(child.name, ()))
        with self._lock:
            self._errors.write("".join(f"{line}\n" for line in words).encode())

    def log_of(self, child: Child) -> str:
        """Where its log is; empty without one."""
        return self._logs[child.name].name if child.name in self._logs else ""

    def complaints(self) -> list[str]:
        """The files that could not be written to the end, and why."""
        logs = (*self._earlier, *self._logs.values())
        sinks = (self._output, self._errors, *logs)
        return [f"{sink.name}: {sink.refusal}" for sink in sinks if sink.refusal]

    def drain(self) -> None:
        """Waits until everything is passed on; after the workers have ended.

        A process that left its worker's group may hold the pipe open for ever, so the
        wait is bounded.
        """
        deadline = time.monotonic() + _PATIENCE
        while self._threads:
            self._threads.pop().join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.drain()
        with self._lock:
            for sink in (*self._earlier, *self._logs.values()):
                sink.file.close()

    def _pass_on(
        self,
        name: str,
        pipe: IO[bytes],
        sink: Sink,
        label: bytes,
        tail: deque[str] | None,
    ) -> None:
        log, folder = self._logs.get(name), InterruptFolder()

        def show(lines: Iterable[str]) -> None:
            for line in lines:
                if not _CONNECTED.fullmatch(line):
                    sink.write(label + line.encode() + b"\n")

        # Bytes that are no UTF-8 must not end this thread: the worker would block on
        # its full pipe. Without `newline`, a carriage return ends a line too.
        text = io.TextIOWrapper(pipe, encoding="utf-8", errors="backslashreplace")
        with text:
            while line := text.readline(_LONGEST_LINE):
                line = line.removesuffix("\n")
                with self._lock:
                    # One line at a time: the sinks are unbuffered, and all workers
                    # write to two of them.
                    show(folder.feed(line) if self._folding else [line])
                    if log:
                        log.write(line.encode() + b"\n")
                    if tail is not None:
                        tail.append(line)
        with self._lock:
            show(folder.end())


class InterruptFolder:
    """Leaves out the tracebacks that are consequences of a Ctrl-C.

    Those are the ones in whose chain every exception is a `KeyboardInterrupt`, or the
    loss of another worker, which was interrupted as well. What a program raises while
    it tidies up is shown, with all that led to it.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._consequence = True
        self._inside = False

    def feed(self, line: str) -> list[str]:
        """Takes the next line; the lines to show now."""
        if line == _TRACEBACK:
            self._held.append(line)
            self._inside = True
        elif not self._held:
            return [line]
        elif self._inside:
            self._held.append(line)
            # The first line that is not indented names the exception.
            self._inside = line.startswith(" ")
            if not self._inside:
                self._consequence &= line.startswith(_INTERRUPTED)
        elif not line or line in _LINKS:
            self._held.append(line)
        else:
            return [*self.end(), line]
        return []

    def end(self) -> list[str]:
        """No more lines belong to the traceback; what of it is to be shown."""
        # A traceback that broke off names no exception: it is shown.
        shown = [] if self._consequence and not self._inside else self._held
        self._held, self._consequence, self._inside = [], True, False
        return shown


def _stream(descriptor: int) -> io.FileIO:
    return io.FileIO(descriptor, "w", closefd=False)


def _label(console: Console, name: str, colour: str) -> bytes:
    # Rich knows whether this is a terminal, and what NO_COLOR says.
    with console.capture() as captured:
        console.print(f"[{name}]", style=colour, end=" ", markup=False, highlight=False)
    return captured.get().encode()


def last_traceback(lines: Iterable[str]) -> list[str]:
    """From the beginning of the last traceback on, its causes included.

    Args:
      lines: The end of what a program wrote to its standard error.

    Returns:
      The lines from there; the last few if there is no traceback.

    Example:
      >>> last_traceback(["x", "Traceback (most recent call last):", "E: 1"])
      ['Traceback (most recent call last):', 'E: 1']
    """
    lines = list(lines)
    start, linked = max(0, len(lines) - _FEW_LINES), False
    for number, line in enumerate(lines):
        # The traceback of an exception group has another first line, and is indented.
        is_group = line.startswith("  + Exception Group Traceback")
        if (line == _TRACEBACK or is_group) and not linked:
            start = number
        if line:
            linked = line in _LINKS
    return lines[start:]
