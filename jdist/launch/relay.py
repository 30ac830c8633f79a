"""Passing on what the workers write: to the terminal, to a file, and to memory.

Two threads per worker read its output and its errors line by line. They continue to
read even if a destination fails: a worker must never block because its output is not
read.
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

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
# Enough for a traceback through JAX with its causes; earlier lines are dropped.
_KEPT_LINES = 400
_FEW_LINES = 20
# A worker that never ends a line must not exhaust the memory of the launcher.
_LONGEST_LINE = 2**16
_PATIENCE = 5.0
_TRACEBACK = "Traceback (most recent call last):"
# gloo prints it for every group without problems, and has no setting to stop it.
_CONNECTED = re.compile(
    r"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. "
    r"Expected number of connected peer ranks is : \1"
)
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


class Sink:
    """An unbuffered file that receives lines until it fails.

    Attributes:
      name: The name in messages.
      refusal: The error that stopped it; None while it works.
    """

    def __init__(self, name: str, file: io.FileIO) -> None:
        self.name = name
        self.refusal: OSError | ValueError | None = None
        self.file = file

    def write(self, data: bytes) -> None:
        """Writes all of the data, or stores the error and never tries again."""
        while data and self.refusal is None:
            try:
                # An unbuffered file may accept only a part of the data.
                written = self.file.write(data)
                if written is None:  # a terminal that was set to non-blocking
                    select.select([], [self.file], [])
                data = data[written or 0 :]
            except (OSError, ValueError) as error:  # ValueError: it was closed.
                self.refusal = error


class Relay:
    """Forwards every line of every worker, prefixed by the worker's name.

    Names are coloured on a terminal only. A carriage return also ends a line, so that
    progress bars are shown while they move.

    Args:
      folder: The folder of the log files, `NAME.log` for each worker, without prefixes;
        after a restart `NAME.restart1.log`. Files of an earlier run are overwritten.
        None for no files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        # File descriptors: `sys.stdout` would encode again, and could fail at exit when
        # it flushes to a closed pipe.
        self._output = Sink("standard output", _stream(1))
        self._errors = Sink("standard error", _stream(2))
        # One of them may be a terminal and the other a file.
        self._consoles = Console(), Console(stderr=True)
        self._logs: dict[str, Sink] = {}
        # Logs of workers before a restart. They are closed at the end, because a thread
        # may still read from a process that outlived its worker.
        self._earlier: list[Sink] = []
        self._kept: dict[str, deque[str]] = {}
        self._threads: list[threading.Thread] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def follow(
        self,
        name: str,
        output: IO[bytes] | None,
        errors: IO[bytes] | None,
        restart: int = 0,
    ) -> None:
        """Starts to forward the output of a worker.

        Args:
          name: Name of the worker.
          output: The pipe of its standard output.
          errors: That of its standard error.
          restart: The number of restarts before this start.

        Raises:
          OSError: Its log cannot be created.
        """
        kept = self._kept[name] = deque(maxlen=_KEPT_LINES)
        if self._folder is not None:
            if name in self._logs:
                self._earlier.append(self._logs[name])
            again = f".restart{restart}" if restart else ""
            path = self._folder / f"{name}{again}.log"
            self._logs[name] = Sink(str(path), io.FileIO(path, "w"))
        # The index of its first start, so that a worker keeps its colour after a
        # restart.
        number = [*self._kept].index(name) + 1
        for pipe, sink, console, tail in (
            # Python writes tracebacks to standard error, so that only this tail is kept
            # for `repeat_last_words`.
            (output, self._output, self._consoles[0], None),
            (errors, self._errors, self._consoles[1], kept),
        ):
            label = _label(console, name, _COLOURS[number % len(_COLOURS)])
            thread = threading.Thread(
                target=self._pass_on,
                args=(name, pipe, sink, label, tail),
                name=f"jdist-relay-{name}",
                # A process that left its group may keep the pipe open; the launcher
                # must end nevertheless.
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def repeat_last_words(self, name: str) -> None:
        """Prints the last traceback of a worker again, or its last lines of errors."""
        words = last_traceback(self._kept.get(name, ()))
        with self._lock:
            self._errors.write("".join(f"{line}\n" for line in words).encode())

    def log_of(self, name: str) -> str:
        """The path of a worker's log; empty without one."""
        return self._logs[name].name if name in self._logs else ""

    def complaints(self) -> list[str]:
        """Descriptions of the files that could not be written completely."""
        logs = (*self._earlier, *self._logs.values())
        sinks = (self._output, self._errors, *logs)
        return [f"{sink.name}: {sink.refusal}" for sink in sinks if sink.refusal]

    def drain(self) -> None:
        """Waits until all output is forwarded; called after the workers have ended."""
        # Bounded: a process that left its worker's group may keep the pipe open for
        # ever.
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
        log = self._logs.get(name)
        # Invalid UTF-8 must not end this thread: the worker would block on its full
        # pipe. Without `newline`, a carriage return also ends a line.
        text = io.TextIOWrapper(pipe, encoding="utf-8", errors="backslashreplace")
        with text:
            while line := text.readline(_LONGEST_LINE):
                line = line.removesuffix("\n")
                with self._lock:
                    # One line at a time: the sinks are unbuffered and shared by all
                    # workers.
                    if not _CONNECTED.fullmatch(line):
                        sink.write(label + line.encode() + b"\n")
                    if log:
                        log.write(line.encode() + b"\n")
                    if tail is not None:
                        tail.append(line)


def _stream(descriptor: int) -> io.FileIO:
    return io.FileIO(descriptor, "w", closefd=False)


def _label(console: Console, name: str, colour: str) -> bytes:
    # Rich knows whether this is a terminal, and respects NO_COLOR.
    with console.capture() as captured:
        console.print(f"[{name}]", style=colour, end=" ", markup=False, highlight=False)
    return captured.get().encode()


def last_traceback(lines: Iterable[str]) -> list[str]:
    """The last traceback in `lines`, including its causes.

    Args:
      lines: The end of what a program wrote to its standard error.

    Returns:
      The lines from its start on; the last few lines if there is no traceback.

    Example:
      >>> last_traceback(["x", "Traceback (most recent call last):", "E: 1"])
      ['Traceback (most recent call last):', 'E: 1']
    """
    lines = list(lines)
    start, linked = max(0, len(lines) - _FEW_LINES), False
    for number, line in enumerate(lines):
        # The traceback of an exception group is indented and has another first line.
        is_group = line.startswith("  + Exception Group Traceback")
        if (line == _TRACEBACK or is_group) and not linked:
            start = number
        if line:
            linked = line in _LINKS
    return lines[start:]
