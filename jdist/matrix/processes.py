"""Rows over two processes, each of which is a replica.

The judge runs in one process. For the first row that it computes, `rpc.spawn` starts
two others, which stay until the judge ends. For every gradient the three become workers
of one group: the judge calls the other two, which sum over `jax.distributed`.
"""

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdist import rpc
from jdist._compat import double_precision
from jdist._errors import JdistError, Unavailable
from jdist._tree import PyTree, examples_in
from jdist.data_parallel import process_group, shard_batch, value_and_grad
from jdist.matrix.row import Candidate, LossFn, Result, Row

_PATIENCE = 120.0
"""Seconds for the two processes to start, and for each gradient."""

_ATTEMPT = 2.0
"""Seconds to wait for them before the next check that they still run."""

_ALLOWED = [f"{__name__}:answer"]


def rows() -> dict[str, Row]:
    """Both methods, one replica in each of two processes."""
    named = {
        method: partial(_gradient, method) for method in ("all_reduce", "all_gather")
    }
    return {f"data_parallel {name} x2 processes": row for name, row in named.items()}


def _gradient(method: str, loss_fn: LossFn, reduction: str) -> Candidate:
    pair = _pair()
    options = {"reduction": reduction, "method": method}

    def candidate(params: PyTree, batch: PyTree, weights: jax.Array | None) -> Result:
        arrays = jax.tree.map(np.asarray, (params, batch, weights))
        return pair.gradient(loss_fn, options, *arrays)

    return candidate


# --- in the judge's process ---


class ReplicaPair:
    """Two processes that compute gradients on request, until they are closed.

    Args:
      serving: What both run, `serving(rank)`.

    Attributes:
      pids: Their process ids, by rank.

    Raises:
      Unavailable: The processes did not start, or cannot be started on this system.
    """

    def __init__(self, serving: Callable[[int], None] | None = None) -> None:
        # No grace: the processes have no work to finish when the judge ends.
        self._processes = rpc.spawn(serving or serve, nprocs=2, grace=0.0, join=False)
        self.pids = self._processes.pids
        try:
            # Between two gradients this process is no worker: other rows create workers
            # in it.
            self._join()
            rpc.shutdown()
        except (rpc.RpcError, OSError) as error:
            raise Unavailable(
                f"two processes did not start: {self._said(error)}"
            ) from error

    def gradient(self, *request: PyTree) -> PyTree:
        """Computes loss and gradient; raises what a process raised.

        Args:
          request: The loss, options of `value_and_grad`, parameters, batch, weights.

        Raises:
          JdistError: The processes disagree, or do not answer.
        """
        # x64 is a setting of this thread: the processes have to be told.
        wide = jnp.result_type(float) == jnp.float64
        try:
            self._join()
            calls = [
                rpc.rpc_async(
                    f"worker{rank}", answer, (wide, *request), timeout=_PATIENCE
                )
                for rank in range(2)
            ]
            try:
                answers = [call.wait() for call in calls]
            finally:
                rpc.shutdown()
        except (rpc.RpcTimeout, rpc.WorkerLost) as error:
            said = self._said(error)
            raise JdistError(f"the two processes are gone: {said}") from error
        # Bytes: as numbers NaN would differ from itself, and 0 equal -0.
        one, other = ([x.tobytes() for x in jax.tree.leaves(a)] for a in answers)
        if one != other:
            raise JdistError("the two processes have different bits")
        return answers[0]

    def close(self) -> None:
        """Ends both processes."""
        self._processes.close()

    def _join(self) -> None:
        """Makes this process a worker of one group with the two others."""
        deadline = time.monotonic() + _PATIENCE
        options = _options(key=self._processes.key, join_timeout=_ATTEMPT)
        while True:
            try:
                rpc.init_rpc(
                    "judge",
                    rank=2,
                    world_size=3,
                    coordinator=self._processes.coordinator,
                    allow=_ALLOWED,
                    options=options,
                )
                return
            except rpc.RpcTimeout:
                if not self._processes.running or time.monotonic() > deadline:
                    raise

    def _said(self, error: BaseException) -> str:
        """An error's text, with the reason the processes ended if they have ended."""
        try:
            self._processes.join(timeout=5.0)
        except (rpc.ProcessFailed, rpc.RpcTimeout, rpc.RpcError) as ending:
            return f"{error} {ending}"
        return str(error)


def _options(**options: Any) -> rpc.RpcOptions:
    # rpc sends functions by name, and pickles a loss that it cannot name. The processes
    # are children of the judge, so pickles from it are trusted.
    return rpc.RpcOptions(allow_pickle=True, **options)


@cache
def _pair() -> ReplicaPair:
    pair = ReplicaPair()
    atexit.register(pair.close)
    return pair


# --- in each of the two ---


def serve(rank: int) -> None:
    """Joins groups with the judge, one after another, until the process is killed."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    _silence()
    with process_group() as mesh:
        _meshes.append(mesh)
        while True:
            # The judge gave up, or lost the other process: it may form another group.
            with suppress(rpc.RpcError):
                rpc.init_rpc(
                    f"worker{rank}",
                    world_size=3,
                    allow=_ALLOWED,
                    options=_options(join_timeout=0.0),
                )
                rpc.shutdown()


_meshes: list[Mesh] = []


def _silence() -> None:
    """Discards the output of gloo and XLA; errors are raised in the judge's process."""
    # By file descriptor, since they write from C++.
    with open(os.devnull, "wb") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere.fileno(), stream.fileno())


def answer(wide: bool, *request: PyTree) -> PyTree:
    """This process's loss and gradient, in double precision if `wide`."""
    if not wide:
        return _own_gradient(_meshes[0], *request)
    with double_precision():
        return _own_gradient(_meshes[0], *request)


def _own_gradient(
    mesh: Mesh,
    loss_fn: LossFn,
    options: Mapping[str, Any],
    params: PyTree,
    batch: PyTree,
    weights: np.ndarray,
) -> tuple[np.ndarray, PyTree]:
    """Loss and gradient; the first process has three quarters of the examples."""
    count = examples_in(batch, "candidate")
    cut = -(-3 * count // 4)
    own = slice(None, cut) if jax.process_index() == 0 else slice(cut, None)
    shards = shard_batch(
        jax.tree.map(lambda x: x[own], batch), mesh, weights=weights[own], rows=cut
    )
    found = value_and_grad(loss_fn, mesh, **options)(params, *shards)
    return jax.tree.map(np.asarray, found)
