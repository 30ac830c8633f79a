"""The equivalence matrix's rows over two processes.

The judge runs in one process. The first row that is asked for has `jdist.launch` start
two others, which stay until this one ends: each is a replica, is sent loss, batch and
weights, and sends back loss and gradient. The bits of both must be the same.
"""

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdist._compat import double_precision
from jdist._errors import JdistError, Unavailable
from jdist._tree import examples_in
from jdist.data_parallel.data.process_group import process_group
from jdist.data_parallel.gradient.value_and_grad import value_and_grad
from jdist.data_parallel.replicas.shards import shard_batch

_SOCKET = "JDIST_STRATEGIES_SOCKET"
_PROGRAM = ("-m", "jdist.launch", "--nproc", "2", "-m", __name__)
_PATIENCE = 120.0
"""Seconds for two processes to start, and for one gradient."""

Build = Callable[[Callable[..., jax.Array], str], Callable[..., Any]]


def strategies() -> Mapping[str, Build]:
    """Rows by name: both methods, one replica in each of two processes."""
    methods = ("all_reduce", "all_gather")
    return {
        f"data_parallel {method} x2 processes": partial(_row, method)
        for method in methods
    }


def _row(
    method: str, loss_fn: Callable[..., jax.Array], reduction: str
) -> Callable[..., Any]:
    pair = _pair()

    def candidate(params: Any, batch: Any, weights: Any) -> Any:
        options = {"reduction": reduction, "method": method}
        arrays = jax.tree.map(np.asarray, (params, batch, weights))
        return pair.gradient((loss_fn, options, *arrays))

    return candidate


# --- in the judge's process ---


class Pair:
    """Two processes that compute gradients on request.

    They meet this one at a socket in a folder that only this user can enter. They end
    with it: when the socket closes, or with the launcher's lifeline.

    Raises:
      Unavailable: This system has no such sockets, or the processes did not start.
    """

    def __init__(self) -> None:
        if not hasattr(socket, "AF_UNIX"):
            raise Unavailable(f"{sys.platform} has no sockets between processes")
        self._folder = tempfile.mkdtemp(prefix="jdist-")
        self._output = Path(self._folder) / "output"
        path = str(Path(self._folder) / "judge")
        self._connections: dict[int, Connection] = {}
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path)
            door.listen()
            self._launcher = _launched(path, self._output)
            try:
                self._meet(door)
            except BaseException:
                self.close()
                raise

    def _meet(self, door: socket.socket) -> None:
        door.settimeout(0.5)
        deadline = time.monotonic() + _PATIENCE
        while len(self._connections) < 2:
            if self._launcher.poll() is not None or time.monotonic() > deadline:
                raise Unavailable(f"two processes did not start: {self._said()}")
            with suppress(TimeoutError):
                connection = Connection(door.accept()[0].detach())
                self._connections[connection.recv()] = connection

    def gradient(self, request: Any) -> Any:
        """Loss and gradient; raises what a process raised.

        Raises:
          JdistError: The processes disagree, or do not answer.
        """
        answers, wide = [], jnp.result_type(float) == jnp.float64
        try:
            for rank in range(2):
                self._connections[rank].send((wide, request))
            for rank in range(2):
                if not self._connections[rank].poll(_PATIENCE):
                    raise JdistError(f"rank {rank} did not answer in {_PATIENCE:g} s")
                answers.append(self._connections[rank].recv())
        except (EOFError, OSError) as error:
            raise JdistError(f"the two processes are gone: {self._said()}") from error
        for found in answers:
            if isinstance(found, Exception):
                raise found
        one, other = ([x.tobytes() for x in jax.tree.leaves(a)] for a in answers)
        if one != other:
            raise JdistError("the two processes have different bits")
        return answers[0]

    def close(self) -> None:
        """Ends both processes and their launcher."""
        for connection in self._connections.values():
            connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(5)
        self._launcher.terminate()
        self._launcher.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _said(self) -> str:
        return self._output.read_text(errors="replace")[-2000:]


def _launched(path: str, output: Path) -> "subprocess.Popen[bytes]":
    # One CPU device each, whatever devices the judge itself has.
    variables = {_SOCKET: path, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *_PROGRAM],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


@cache
def _pair() -> Pair:
    pair = Pair()
    atexit.register(pair.close)
    return pair


# --- in each of the two ---


def main() -> None:
    """Computes what it is sent, until the judge is gone."""
    with process_group() as mesh, Client(os.environ[_SOCKET]) as judge:
        judge.send(jax.process_index())
        while True:
            try:
                wide, request = judge.recv()
            except EOFError:
                return
            judge.send(_answer(mesh, wide, request))


def _answer(mesh: Mesh, wide: bool, request: Any) -> Any:
    try:
        if not wide:
            return _gradient(mesh, *request)
        with double_precision():
            return _gradient(mesh, *request)
    except Exception as error:  # noqa: BLE001 - the judge raises it again
        return error


def _gradient(
    mesh: Mesh,
    loss_fn: Callable[..., jax.Array],
    options: Any,
    params: Any,
    batch: Any,
    weights: np.ndarray,
) -> Any:
    """This process's part: the first has three quarters of the examples."""
    count = examples_in(batch, "candidate")
    cut = -(-3 * count // 4)
    own = slice(None, cut) if jax.process_index() == 0 else slice(cut, None)
    shards = shard_batch(
        jax.tree.map(lambda x: x[own], batch), mesh, weights=weights[own], rows=cut
    )
    found = value_and_grad(loss_fn, mesh, **options)(params, *shards)
    return jax.tree.map(np.asarray, found)


if __name__ == "__main__":
    main()
