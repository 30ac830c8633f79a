"""A process that judges layouts, which an abort or a hang of one of them may end."""

import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import jax

import jdist
from jdist import _compilation_cache
from jdist._errors import value_error
from jdist.verify.fuzzing.layout_judge import FaultyProblem, LayoutJudge
from jdist.verify.fuzzing.verdict import Verdict
from jdist.verify.processes.peers import TIMEOUT
from jdist.verify.tracing.report import Trace

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


class JudgingProcess:
    """A `LayoutJudge` in a process of its own, which is started again after an end.

    Args:
      judge: The judge, whose functions another process imports.
      axes: The values of each axis, which go to the process too.
      deadline: Seconds for each answer.

    Raises:
      ValueError: A function cannot be found by another process.
    """

    def __init__(
        self, judge: LayoutJudge, axes: Mapping[str, Any], deadline: float
    ) -> None:
        sent = {name: getattr(judge, name) for name in ("problem", "claim", "trainer")}
        for name, value in {**sent, "axes": dict(axes)}.items():
            try:
                pickle.dumps(value)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                rule = "must go to another process: functions by their module and name"
                remedy = "deadline=None judges in this process."
                raise value_error(f"fuzz({name}=...)", rule, value, remedy) from error
        self._work, self._deadline = pickle.dumps(judge), deadline
        self._process: Any = None
        self._connection: Any = None
        self._errors: Any = None

    def judge(self, layout: dict[str, Any]) -> Verdict:
        """As that of `LayoutJudge`; the end of its process is a verdict too.

        Raises:
          FaultyProblem: The problem or the claim cannot be judged.
          ValueError: The process cannot import the functions.
        """
        return self._asked("judge", layout)

    def trace(self, layout: dict[str, Any]) -> tuple[Trace | None, str]:
        """As that of `LayoutJudge`."""
        told = self._asked("trace", layout)
        return (None, told.why) if isinstance(told, Verdict) else told

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._connection.close()
            self._errors.close()
            self._process = None

    def _asked(self, question: str, layout: dict[str, Any]) -> Any:
        # It may also have ended after its last answer.
        if self._process is None or not self._process.is_alive():
            self.close()
            self._start(layout)
        self._connection.send((question, layout))
        answer = self._answer(layout, self._deadline)
        if isinstance(answer, FaultyProblem):
            raise answer
        return answer

    def _start(self, layout: dict[str, Any]) -> None:
        # Not fork, which would copy locks that JAX's threads hold.
        start = multiprocessing.get_context("spawn")
        self._connection, theirs = start.Pipe()
        self._errors = tempfile.NamedTemporaryFile(  # noqa: SIM115 - until `close`
            "r", prefix="jdist-fuzz-", errors="replace"
        )
        settings = {name: getattr(jax.config, name) for name in SETTINGS}
        given = theirs, self._work, settings, self._errors.name, self._deadline
        self._process = start.Process(target=_serve, args=given)
        self._process.start()
        theirs.close()
        ready = self._answer(layout, max(self._deadline, TIMEOUT))
        if ready is not True:
            self.close()
            argument = "fuzz(problem=..., claim=..., trainer=...)"
            rule = "must be functions that a new process can import"
            got = ready.details if isinstance(ready, Verdict) else ready
            remedy = (
                "Define them in a module; a script calls `fuzz` under "
                "`if __name__ == '__main__':`. deadline=None judges in this process."
            )
            raise value_error(argument, rule, got.strip(), remedy)

    def _answer(self, layout: dict[str, Any], seconds: float) -> Any:
        """The next message, or the verdict on a layout that there is none in time."""
        process = self._process
        came = wait([self._connection, process.sentinel], seconds)
        with suppress(EOFError, ConnectionError):
            if self._connection in came:
                return self._connection.recv()
        # It has ended, or is ended now.
        if not came:
            process.kill()
        process.join()
        details = self._errors.read()[-KEPT:]
        words = _end(process.exitcode) if came else f"no answer within {seconds:g} s"
        if fatal := _FATAL.search(details):
            words += f": {fatal[1]}"
        words += _own_frame(details)
        self.close()
        return Verdict(layout, "ended" if came else "hung", words, details=details)


def _end(status: int) -> str:
    if status < 0:
        return f"the process was ended by {signal.Signals(-status).name}"
    return f"the process ended with status {status}"


def _own_frame(text: str) -> str:
    """The innermost call in a stack that is of no library; empty if there is none."""
    for path, line, function in _FRAME.findall(text):
        if not path.startswith(("<", *_LIBRARIES)):
            return f", in {function} ({Path(path).name}:{line})"
    return ""


def _serve(
    connection: Connection,
    work: bytes,
    settings: dict[str, Any],
    errors: str,
    deadline: float,
) -> None:
    """The process: answers questions until its connection is closed."""
    # In a layout, which may take long, the connection is not read.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # XLA writes why it aborts to this file descriptor, and Python its stack.
    with open(errors, "ab") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    try:
        for name, value in settings.items():
            if getattr(jax.config, name) != value:
                jax.config.update(name, value)
        # What comes after this process, once it has ended, compiles nothing again.
        _compilation_cache.switch_on()
        judge = pickle.loads(work)
    except Exception as error:  # noqa: BLE001 - told by the process that asked
        connection.send("".join(traceback.format_exception_only(error)))
        return
    connection.send(True)
    with suppress(EOFError):
        while True:
            question, layout = connection.recv()
            # Shows where it hangs, before it is ended.
            faulthandler.dump_traceback_later(0.9 * deadline, file=2)
            try:
                answer = getattr(judge, question)(layout)
            except FaultyProblem as error:
                error.add_note("".join(traceback.format_exception(error.__cause__)))
                answer = error
            faulthandler.cancel_dump_traceback_later()
            connection.send(answer)


def _end_with_parent() -> None:
    """Ends this process once the one that started it has ended, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
