"""A process that judges layouts, which an abort or a hang of one of them may end."""

import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jdist
from jdist import _compilation_cache
from jdist._errors import requirement
from jdist.verify.fuzzing.layout_judge import FaultyProblem, LayoutJudge
from jdist.verify.fuzzing.verdict import Outcome
from jdist.verify.processes import TIMEOUT

SETTINGS = (
    "jax_num_cpu_devices", "jax_platforms", "jax_enable_x64",
    "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion",
    "jax_default_matmul_precision", "jax_default_prng_impl",
    "jax_threefry_partitionable",
)  # fmt: skip
"""JAX's settings that the process has from the one that starts it."""

KEPT = 4000
"""Characters that are kept of what a process wrote before its end."""

# The libraries' own frames, among which the trainer's is looked for.
_LIBRARIES = (sys.prefix, sys.base_prefix, os.path.dirname(jdist.__file__))
_FRAME = re.compile(r'^ *File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_FATAL = re.compile(r"^F\d{4} .*?\] (.*)$", re.MULTILINE)


class Ended(NamedTuple):
    """The end of a process in the place of an answer.

    Attributes:
      outcome: "ended" or "hung".
      why: The reason, in words.
      details: What the process wrote last.
    """

    outcome: Outcome
    why: str
    details: str


class JudgingProcess:
    """A `LayoutJudge` in a process of its own, which is started again after an end.

    Args:
      functions: The problem, the claim and the trainer, which another process imports.
      options: The other arguments of a `LayoutJudge`.
      deadline: Seconds for each answer.

    Raises:
      ValueError: A function cannot be found by another process.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        options: Mapping[str, Any],
        deadline: float,
    ) -> None:
        for name, fn in functions.items():
            check_sent(name, fn)
        self._work = pickle.dumps((functions, options))
        self._deadline = deadline
        self._process: Any = None
        self._connection: Any = None
        self._errors = Path()

    def ask(self, question: str, layout: dict[str, Any]) -> Any:
        """Calls a method of the `LayoutJudge` with a layout.

        Returns:
          What it returns, or an `Ended`.

        Raises:
          FaultyProblem: The problem or the claim cannot be judged.
          ValueError: The process cannot import the functions.
        """
        if self._process is None:
            self._start()
        self._connection.send((question, layout))
        answer = self._answer(self._deadline)
        if isinstance(answer, FaultyProblem):
            raise answer
        return answer

    def close(self) -> None:
        """Ends the process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.join()
        self._process.close()
        self._connection.close()
        self._errors.unlink(missing_ok=True)
        self._process = None

    def _start(self) -> None:
        # Not fork, which would copy locks that JAX's threads hold.
        start = multiprocessing.get_context("spawn")
        self._connection, theirs = start.Pipe()
        file, path = tempfile.mkstemp(prefix="jdist-fuzz-", suffix=".txt")
        os.close(file)
        self._errors = Path(path)
        settings = {name: getattr(jax.config, name) for name in SETTINGS}
        given = theirs, self._work, settings, path, self._deadline
        self._process = start.Process(target=_serve, args=given)
        self._process.start()
        theirs.close()
        ready = self._answer(max(self._deadline, TIMEOUT))
        if ready is not True:
            rule = "must be functions that a new process can import"
            got = ready.details if isinstance(ready, Ended) else ready
            remedy = (
                "Define them in a module; a script calls `fuzz` under "
                "`if __name__ == '__main__':`. deadline=None judges in this process."
            )
            self.close()
            argument = "fuzz(problem=..., claim=..., trainer=...)"
            raise ValueError(requirement(argument, rule, got.strip(), remedy))

    def _answer(self, seconds: float) -> Any:
        """The next message; an `Ended` if there is none in time."""
        process, connection = self._process, self._connection
        came = wait([connection, process.sentinel], seconds)
        try:
            if connection in came:
                return connection.recv()
        except (EOFError, ConnectionError):
            pass
        # It has ended, or is ended now.
        hung = not came
        if hung:
            process.kill()
        process.join()
        details = self._errors.read_text(errors="replace")[-KEPT:]
        words = f"no answer within {seconds:g} s" if hung else _end(process.exitcode)
        fatal = None if hung else _FATAL.search(details)
        words += f": {fatal[1]}" if fatal else ""
        place = _own_frame(details)
        words += f", in {place}" if place else ""
        self.close()
        return Ended("hung" if hung else "ended", words, details)


def check_sent(name: str, value: object) -> None:
    """Raises a ValueError unless an argument of `fuzz` can go to another process."""
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        rule = "must go to another process: functions by their module and name"
        remedy = "deadline=None judges in this process."
        argument = f"fuzz({name}=...)"
        raise ValueError(requirement(argument, rule, value, remedy)) from error


def _end(status: int) -> str:
    if status < 0:
        return f"the process was ended by {signal.Signals(-status).name}"
    return f"the process ended with status {status}"


def _own_frame(text: str) -> str:
    """The innermost call in a stack that is of no library; empty if there is none."""
    for path, line, function in _FRAME.findall(text):
        if not path.startswith(("<", *_LIBRARIES)):
            return f"{function} ({Path(path).name}:{line})"
    return ""


def _serve(
    connection: Connection,
    work: bytes,
    settings: dict[str, Any],
    errors: str,
    deadline: float,
) -> None:
    """The process: answers questions until its connection is closed."""
    # XLA writes why it aborts to this file descriptor, and Python its stack.
    file = os.open(errors, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable(2)
    try:
        for name, value in settings.items():
            if getattr(jax.config, name) != value:
                jax.config.update(name, value)
        # What comes after this process, once it has ended, compiles nothing again.
        _compilation_cache.switch_on()
        functions, options = pickle.loads(work)
    except Exception as error:  # noqa: BLE001 - told by the process that asked
        connection.send("".join(traceback.format_exception_only(error)))
        return
    judge = LayoutJudge(**functions, **options)
    connection.send(True)
    while True:
        try:
            question, layout = connection.recv()
        except EOFError:
            return
        # Shows where it hangs, before it is ended.
        faulthandler.dump_traceback_later(0.9 * deadline, file=2)
        try:
            answer = getattr(judge, question)(layout)
        except FaultyProblem as error:
            cause = "".join(traceback.format_exception(error.__cause__))
            error.add_note(cause)
            answer = error
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)
