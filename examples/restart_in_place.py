"""Replicas of one program that go on in place when processes die.

torch has no tutorial of it; torchft does it, and goes on with the gradient of the
examples that are left. Here each step's batch is divided over the processes that are
there, so that its gradient is always that of the whole batch. JAX's `live_devices`
tells who is there, and its block ends in an error on all if one dies within: then the
step is taken again from the state before it. The process of rank 0 has the coordinator
and must stay. `jax_enable_recoverability` is experimental.

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
DEATHS = {2: 3, 1: 7}  # By rank: in which step.


def rows_of(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The whole batch of a step."""
    x = np.random.default_rng(step).normal(size=(BATCH, 3)).astype(np.float32)
    return x, np.tanh(x.sum(axis=1))


def losses_of(w: jax.Array, batch: Any) -> jax.Array:
    """One for each example."""
    x, y = batch
    return (jnp.tanh(x @ w) - y) ** 2


def placed(step: int, mesh: Mesh) -> tuple[Any, jax.Array]:
    """A step's batch over the mesh, of which this process gives its part; weights.

    All parts have as many rows. Those that fill one up count 0.
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
    """The losses by step; all steps but the first have the state of the one before."""
    optimizer = optim.adam(lr=0.05)
    w = jnp.asarray([0.3, -0.2, 0.1])
    kept = data_parallel.TrainState(jnp.int32(0), w, optimizer.init(w))
    found: dict[int, float] = {}
    present: Sequence[jax.Device] = ()
    while (number := len(found)) < STEPS:
        try:
            with live_devices(jax.devices()) as devices:
                if devices != present:
                    present, mesh = devices, Mesh(np.array(devices), ("data",))
                    step = data_parallel.train_step(losses_of, optimizer, mesh)
                if number == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                same = NamedSharding(mesh, PartitionSpec())
                state, metrics = step(jax.device_put(kept, same), *placed(number, mesh))
                # A copy that no device's loss can take, and that the step keeps.
                state, loss = jax.device_get((state, metrics.loss))
        except ProcessFailureError:
            continue
        kept, found[number] = state, float(loss)
    return found


def work(rank: int, count: int, address: str) -> None:
    """What each process does."""
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        address,
        count,
        rank,
        coordinator_bind_address=address,  # This machine only: nothing else is safe.
        heartbeat_timeout_seconds=4,
    )
    losses = train(DEATHS.get(rank))
    print(json.dumps(losses), flush=True)


def main() -> None:
    """Starts the processes."""
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
