"""Starting, watching and ending the processes of a run, for `spawn` and `launch`.

Three promises. The first process that fails ends the others. When the supervisor's own
process is gone, however it died, they are gone too (the lifeline, see trampoline.py).
When a process ends, whatever it started and left in its process group is ended with
it: no orphan and no zombie stays.
"""

import dataclasses
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.spawn import get_command_line
from pathlib import Path
from typing import IO, Self

from jdist.rpc.processes.process_settings import ResolvedSettings

_LOOK_SECONDS = 1.0
_TRAMPOLINE = Path(__file__).with_name("trampoline.py")


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended.

    Attributes:
      code: Its exit code, or minus the signal that killed it.
      moment: Time at which it ended, in `time.monotonic()` seconds.

    Example:
      >>> str(Ending(-9)), Ending(-9).status
      ('was killed by SIGKILL', 137)
    """

    code: int
    moment: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        """Whether its exit code is not 0."""
        return self.code != 0

    @property
    def status(self) -> int:
        """The exit status in a shell's convention: 128 + the number of the signal."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        """A predicate to follow the process's name."""
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"was killed by signal {-self.code}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessCommand:
    """A command with its environment and settings.

    Attributes:
      name: Name in messages and of threads.
      command: The executable and its arguments, or only the arguments of this Python.
      environment: All environment variables but those of the settings.
      settings: Its process settings.
      python: Whether this Python, with the options it was started with, is run.
      descriptors: Further file descriptors that it inherits.
      captured: Whether its output and errors go to pipes that the caller reads.
    """

    name: str
    command: Sequence[str]
    # Not in the representation, which may be logged: the cluster's key is among them.
    environment: Mapping[str, str] = dataclasses.field(repr=False)
    settings: ResolvedSettings
    python: bool = True
    descriptors: tuple[int, ...] = ()
    captured: bool = False


class Child:
    """One process that was started.

    Attributes:
      name: Name of the program.
      pid: Its process id, and that of its process group.
      output: Standard output, if captured.
      errors: Standard error, if captured.
      ending: How it ended; None while it runs.
    """

    def __init__(self, program: ProcessCommand) -> None:
        self.name = program.name
        self.ending: Ending | None = None
        # A lock, held until the process has ended, and not an event: Ctrl-C may leave
        # an event's inner lock taken.
        self._ended = threading.Lock()
        self._ended.acquire()
        far, near = os.pipe()
        self._lifeline = open(near, "wb", buffering=0)  # noqa: SIM115 - until it ends
        try:
            self._process = _start(program, far)
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            os.close(far)
        self.pid = self._process.pid
        self.output: IO[bytes] | None = self._process.stdout
        self.errors: IO[bytes] | None = self._process.stderr

    def await_end(self) -> None:
        """Blocks until it has ended; its id stays reserved until `bury`."""
        if hasattr(os, "waitid"):
            # No such child: this program ignores SIGCHLD, or waits for any child. How
            # it ended is then unknown and counts as 0, as in `subprocess`.
            with suppress(ChildProcessError):
                # Without reaping it: while its id is reserved, a signal to its group
                # cannot reach another process.
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()

    def bury(self) -> Ending:
        """Kills the rest of its process group and reaps it; after `await_end`."""
        self.send(signal.SIGKILL)
        self.ending = Ending(self._process.wait())
        self._ended.release()
        self._lifeline.close()
        return self.ending

    def wait(self, seconds: float) -> None:
        """Waits until it is buried, at most `seconds`."""
        # Not a condition: Ctrl-C may keep its `wait` from taking the lock again. This
        # lock it may leave taken, so that another waiter looks again after its seconds.
        if self.ending is None and self._ended.acquire(timeout=seconds):
            self._ended.release()

    def send(self, number: int) -> None:
        """Sends a signal to its process group."""
        # PermissionError: macOS answers so for a group of which only a zombie is left.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def _start(program: ProcessCommand, lifeline: int) -> subprocess.Popen[bytes]:
    settings = {
        "lifeline": lifeline,
        "batch": program.settings.batch,
        "cores": program.settings.cores,
    }
    # -I -S: nothing of the user's is imported before the program itself is started.
    python = _interpreter()
    first = [python[0], "-I", "-S", str(_TRAMPOLINE), json.dumps(settings)]
    command = [*python, *program.command] if program.python else program.command
    stream = subprocess.PIPE if program.captured else None
    return subprocess.Popen(
        [*first, *command],
        env={**program.environment, **program.settings.variables},
        stdin=subprocess.DEVNULL,
        stdout=stream,
        stderr=stream,
        pass_fds=(lifeline, *program.descriptors),
        process_group=0,
    )


def _interpreter() -> list[str]:
    """This Python with the options it was started with (-W, -X, -O and the like)."""
    # Everything before `-c ...`, which is what multiprocessing wants run.
    command = get_command_line()
    return [os.fsdecode(part) for part in command[: command.index("-c")]]


class Supervisor:
    """Owns the processes of one run; leaving its `with` block ends what still runs.

    Args:
      grace: Seconds between SIGTERM and SIGKILL.

    Attributes:
      children: The children, in the order in which they were started.
      failure: The first child that failed by itself; None if there is none.
    """

    def __init__(self, grace: float = 5.0) -> None:
        self.children: list[Child] = []
        self.failure: Child | None = None
        self._grace = grace
        self._ending = False
        # Ctrl-C leaves no lock taken that is entered by `with`; a condition it may.
        self._lock = threading.RLock()
        self._watchers: list[threading.Thread] = []

    def start(self, program: ProcessCommand) -> Child | None:
        """Starts a process; returns None once the others are being ended.

        Raises:
          OSError: The system cannot start another process.
        """
        with self._lock:
            if self._ending:
                return None
            child = Child(program)
            self.children.append(child)
        self._watch_all()
        return child

    def _watch_all(self) -> None:
        """Starts a thread for each unwatched child; idempotent."""
        with self._lock:
            for child in self.children[len(self._watchers) :]:
                watcher = threading.Thread(
                    target=self._watch,
                    args=(child,),
                    name=f"jdist-watch-{child.name}",
                    daemon=True,
                )
                watcher.start()
                # An interrupt in between gives it a second one, which does no harm.
                self._watchers.append(watcher)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until every process has ended; False if `timeout` seconds passed."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        self._watch_all()  # an interrupt may have left one without
        for child in self.children:
            while child.ending is None:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                child.wait(min(left, _LOOK_SECONDS))
        with self._lock:  # until it is noted which one failed first
            return True

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ends all processes: a signal first, SIGKILL after the grace period.

        May be called by any thread, any number of times. If it is interrupted, they
        are killed at once.
        """
        try:
            with self._lock:
                if not self._ending:
                    self._ending = True
                    self._signal_all(number)
            self.wait(self._grace)
        finally:
            with self._lock:
                self._signal_all(signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        """Ends running processes and joins the watching threads."""
        self.stop()
        for watcher in self._watchers:
            watcher.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _watch(self, child: Child) -> None:
        child.await_end()
        # Under the lock, so that no signal goes to an id that was given to another
        # process since.
        with self._lock:
            if child.ending is not None:
                return  # by a second watcher
            ending = child.bury()
            is_first = ending.failed and not self._ending
            if is_first:
                self.failure = child
        # Outside of the lock: it waits for the other watchers, which need it.
        if is_first:
            self.stop()

    def _signal_all(self, number: int) -> None:
        for child in self.children:
            if child.ending is None:
                child.send(number)
