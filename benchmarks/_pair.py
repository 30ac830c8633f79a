"""Two pinned processes that do jobs on command, so that contenders can take turns.

Several pairs share the same two cores; all but one wait in a socket meanwhile.
"""

import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Self

from jdist.rpc.process_settings import ProcessSettings
from jdist.rpc.spawn import spawn

Job = Callable[[int], float]
"""Does something so many times; returns seconds per time."""


class Pair:
    """Two processes, each on a core of its own.

    Args:
      prepare: Function of a module, `prepare(rank) -> {name: job}`; called in each.
      settings: What is set up in the processes before.
    """

    def __init__(
        self, prepare: Callable[[int], Any], settings: ProcessSettings | None
    ) -> None:
        key = secrets.token_bytes(16)
        with ExitStack() as stack:
            listener = stack.enter_context(Listener(("127.0.0.1", 0), authkey=key))
            stack.enter_context(
                spawn(
                    _serve,
                    args=(listener.address, key, prepare),
                    nprocs=2,
                    pin=1,
                    settings=settings,
                    join=False,
                )
            )
            self._connections = [
                stack.enter_context(listener.accept()) for _ in range(2)
            ]
            self._resources = stack.pop_all()
        self.jobs: list[str] = [each.recv() for each in self._connections][0]

    def run(self, job: str, calls: int) -> float:
        """Seconds per call of the slower process."""
        for connection in self._connections:
            connection.send((job, calls))
        return max(connection.recv() for connection in self._connections)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._resources.close()


def _serve(
    rank: int, address: Any, key: bytes, prepare: Callable[[int], Mapping[str, Job]]
) -> None:
    with Client(address, authkey=key) as connection:
        jobs = prepare(rank)
        connection.send(list(jobs))
        _obey(connection, jobs)


def _obey(connection: Connection, jobs: Mapping[str, Job]) -> None:
    while True:
        try:
            name, calls = connection.recv()
        except EOFError:
            return
        connection.send(jobs[name](calls))
