"""Replicas of one program that go on in place when processes die.

torch has no tutorial of it; torchft does it and continues with the gradient of the
remaining examples. Here each step's batch is divided over the live processes, so that
its gradient is always that of the whole batch. JAX's `live_devices` returns the live
devices, and its block raises an error on all processes if one dies within it; the step
is then repeated from the state before it. The process of rank 0 runs the coordinator
and must survive. `jax_enable_recoverability` is experimental.

    python examples/restart_in_place.py

starts three processes, of which two die in the middle of a step.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import ProcessFailureError, live_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist import data_parallel, optim

STEPS, BATCH = 12, 16
DEATHS = {2: 3, 1: 7}  # The step in which each rank dies.


def rows_of(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The whole batch of a step, `(BATCH, 3)` and `(BATCH,)`."""
    x = np.random.default_rng(step).normal(size=(BATCH, 3)).astype(np.float32)
    return x, np.tanh(x.sum(axis=1))


def losses_of(w: jax.Array, batch: Any) -> jax.Array:
    """The squared error of each example, `(examples,)`."""
    x, y = batch
    return (jnp.tanh(x @ w) - y) ** 2


def placed(step: int, mesh: Mesh) -> tuple[Any, jax.Array]:
    """Places a step's batch on the mesh; returns the batch and its weights.

    Each process contributes its own rows. All have equally many rows, of which padding
    has weight 0.
    """
    size = -(-BATCH // mesh.size)
    start = size * list(mesh.devices).index(jax.local_devices()[0])
    rows = np.arange(start, start + size)
    weights = (rows < BATCH).astype(np.float32)
    own = (*(x[np.minimum(rows, BATCH - 1)] for x in rows_of(step)), weights)
    split = NamedSharding(mesh, PartitionSpec("data"))
    x, y, counts = (jax.make_array_from_process_local_data(split, one) for one in own)
    return (x, y), counts


def train(dies_at: int | None) -> dict[int, float]:
    """Returns the losses by step; dies in the step `dies_at`."""
    optimizer = optim.adam(lr=0.05)
    w = jnp.asarray([0.3, -0.2, 0.1])
    kept = data_parallel.TrainState(jnp.int32(0), w, optimizer.init(w))
    found: dict[int, float] = {}
    present: Sequence[jax.Device] = ()
    while (number := len(found)) < STEPS:
        try:
            with live_devices(jax.devices()) as devices:
                # A change of the live devices needs a new mesh, and so a newly compiled
                # step.
                if devices != present:
                    present, mesh = devices, Mesh(np.array(devices), ("data",))
                    step = data_parallel.train_step(losses_of, optimizer, mesh)
                if number == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                same = NamedSharding(mesh, PartitionSpec())
                state, metrics = step(jax.device_put(kept, same), *placed(number, mesh))
                # A copy on the host: it survives the loss of devices, and `step` cannot
                # donate it.
                state, loss = jax.device_get((state, metrics.loss))
        except ProcessFailureError:
            # `kept` is still the state before the step.
            continue
        kept, found[number] = state, float(loss)
    return found


def work(rank: int, count: int, address: str) -> None:
    """Entry point of each process."""
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        address,
        count,
        rank,
        # The loopback interface only: JAX's coordinator does not authenticate its
        # clients.
        coordinator_bind_address=address,
        heartbeat_timeout_seconds=4,
    )
    losses = train(DEATHS.get(rank))
    print(json.dumps(losses), flush=True)


def main() -> None:
    """Starts the processes on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    count = 1 + len(DEATHS)
    started = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(count), address])
        for rank in range(count)
    ]
    print("ended with", [process.wait() for process in started])


if __name__ == "__main__":
    if sys.argv[1:]:
        work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    else:
        main()
