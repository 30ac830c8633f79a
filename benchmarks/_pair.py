"""Pinned processes, mostly two, that do jobs on command: contenders can take turns.

Several pairs share the same cores, and all but the one whose turn it is are stopped by
a signal. Blocking in a socket would not suffice: a thread of torch's rpc (TensorPipe's
reactor for shared memory) polls for messages on a core of its own as long as it lives.
"""

import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple, Self

from jdist.rpc import ProcessFailed, ProcessSettings, spawn

Job = Callable[[int], "Spent"]
"""Does something `calls` times and returns the time of one."""


class Spent(NamedTuple):
    """Seconds for each call of a job.

    Attributes:
      elapsed: Seconds of wall-clock time.
      processor: Seconds of user and system time of this process, which other programs
        on the machine affect little.
    """

    elapsed: float
    processor: float


def idle(calls: int) -> Spent:
    """The job of a process that only answers the other's calls."""
    return Spent(0.0, 0.0)


def timed(call: Callable[[], Any], finish: Callable[[Any], Any], calls: int) -> Spent:
    """Times `calls` calls and the wait for the last result."""
    start, processor = time.perf_counter(), time.process_time()
    for _ in range(calls):
        result = call()
    finish(result)
    return Spent(
        (time.perf_counter() - start) / calls,
        (time.process_time() - processor) / calls,
    )


Prepare = Callable[[int], AbstractContextManager[Mapping[str, Job]]]


class Pair:
    """Processes that do the same jobs together, each on a core of its own.

    Args:
      prepare: A module-level function; `prepare(rank)` is a context of jobs by name.
      settings: Settings of the processes; None for the defaults of the system.
      processes: The number of processes.
      pin: The number of cores that each process owns; 0 for no pinning.
    """

    def __init__(
        self,
        prepare: Prepare,
        settings: ProcessSettings | None,
        processes: int = 2,
        pin: int = 1,
    ) -> None:
        key = secrets.token_bytes(16)
        with ExitStack() as stack:
            listener = stack.enter_context(Listener(("127.0.0.1", 0), authkey=key))
            self._processes = spawn(
                _serve,
                args=(listener.address, key, prepare),
                nprocs=processes,
                pin=pin,
                settings=settings,
                join=False,
            )
            stack.enter_context(self._processes)
            self._connections = [
                stack.enter_context(listener.accept()) for _ in range(processes)
            ]
            self._resources = stack.pop_all()
        self.jobs: list[str] = min(each.recv() for each in self._connections)
        self._signal(signal.SIGSTOP)

    def run(self, job: str, calls: int) -> Spent:
        """The time per call of the slower process."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.send((job, calls))
        spent = [connection.recv() for connection in self._connections]
        self._signal(signal.SIGSTOP)
        return Spent(*map(max, zip(*spent, strict=True)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        with self._resources:
            # A stopped process would not see the message that ends it.
            self._signal(signal.SIGCONT)
            for connection in self._connections:
                connection.send(None)
            # All results are in; torch's gloo now and then aborts in its teardown.
            with suppress(ProcessFailed):
                self._processes.join(timeout=60)

    def _signal(self, number: int) -> None:
        for pid in self._processes.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _serve(rank: int, address: Any, key: bytes, prepare: Prepare) -> None:
    with Client(address, authkey=key) as connection, prepare(rank) as jobs:
        connection.send(list(jobs))
        _obey(connection, jobs)


def _obey(connection: Connection, jobs: Mapping[str, Job]) -> None:
    while told := connection.recv():
        name, calls = told
        connection.send(jobs[name](calls))
