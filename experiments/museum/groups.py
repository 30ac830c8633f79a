"""A few processes that run functions together, as they are told."""

import atexit
import functools
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RANKS = 2
DEADLINE = 240.0
"""Seconds within which all processes must have answered."""

Join = Callable[[int, str, int], None]


class Group:
    """Processes that run one function after another, until this process ends."""

    def __init__(self, join: Join) -> None:
        """Starts the processes.

        Args:
          join: Called in each with its rank, a file that is not there yet and a free
            port, by both of which they can meet.
        """
        spawn = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory(prefix="museum-")
        store = str(Path(self.folder.name) / "store")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pipes = [spawn.Pipe() for _ in range(RANKS)]
        self.connections = [own for own, _ in pipes]
        for rank, (_, theirs) in enumerate(pipes):
            # Daemons end with this process, even if it fails.
            process = spawn.Process(
                target=_serve, args=(theirs, join, rank, store, port), daemon=True
            )
            process.start()
            # While this end is open, the death of a process would not close its pipe.
            theirs.close()
        # Before Python ends and awaits them: JAX's processes outlive a SIGTERM.
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the processes."""
        for connection in self.connections:
            connection.close()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function returns in each process.

        Args:
          function: A function of a module, called with the rank first.
          *arguments: Its further arguments.

        Raises:
          RuntimeError: A process raised, ended, or did not answer within `DEADLINE`.
        """
        for connection in self.connections:
            connection.send((function, arguments))
        answers = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(DEADLINE):
                raise RuntimeError(f"process {rank} did not answer in {DEADLINE:.0f} s")
            try:
                answers.append(connection.recv())
            except EOFError:
                text = f"process {rank} ended; its own error stands above"
                raise RuntimeError(text) from None
        return answers


def _serve(jobs: Connection, join: Join, rank: int, store: str, port: int) -> None:
    join(rank, store, port)
    with suppress(EOFError):
        while True:
            function, arguments = jobs.recv()
            jobs.send(function(rank, *arguments))
    # A peer may be gone already; there is nothing to say good-bye for.
    os._exit(0)


def join_gloo(rank: int, store: str, port: int) -> None:
    """Joins torch's default group over gloo."""
    from torch import distributed, set_num_threads

    set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=120),
    )  # fmt: skip


def join_jax(rank: int, store: str, port: int) -> None:
    """Joins `jax.distributed`, with three CPU devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 3)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", RANKS, rank)


@functools.cache
def gloo() -> Group:
    """The processes of torch. They are started once."""
    return Group(join_gloo)


@functools.cache
def jax_processes() -> Group:
    """The processes of `jax.distributed`. They are started once."""
    return Group(join_jax)
