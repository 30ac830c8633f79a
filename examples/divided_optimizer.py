"""Adam with its state divided over the replicas, and with the whole of it on each.

torch: "Shard Optimizer States with ZeroRedundancyOptimizer" (the recipe
zero_redundancy_optimizer). There ranks own whole parameters; here each array of the
state is divided, so that a single large one is divided as well.

    python examples/divided_optimizer.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdist import data_parallel, optim, rpc

WIDTH, LAYERS, ROWS = 64, 4, 20


def initial_weights() -> list[jax.Array]:
    """Random weights of `LAYERS` linear layers."""
    rng = np.random.default_rng(0)
    shape = (WIDTH, WIDTH)
    return [jnp.asarray(rng.normal(size=shape)) / WIDTH**0.5 for _ in range(LAYERS)]


def squared_errors(net: Any, batch: Any) -> jax.Array:
    """The squared error of each example, `(examples,)`."""
    x, labels = batch
    for w in net:
        x = x @ w
    return ((x - labels) ** 2).mean(axis=1)


def examples(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and labels of one process."""
    rng = np.random.default_rng((rank, 1))
    return rng.normal(size=(ROWS, WIDTH)), rng.normal(size=(ROWS, WIDTH))


def train(mesh: Mesh, own: Any, use_zero: bool) -> tuple[float, int]:
    """Takes two steps; returns the parameters' sum and the state's bytes per device."""
    opt = optim.adam(lr=0.01)
    if use_zero:
        opt = data_parallel.zero(opt, mesh)
    step = data_parallel.train_step(squared_errors, opt, mesh)
    state = step.init(initial_weights())
    for _ in range(2):
        state, _ = step(state, *data_parallel.shard_batch(own, mesh, rows=ROWS))
    total = sum(float(w.sum()) for w in state.params)
    arrays = jax.tree.leaves(state.opt_state)
    return total, sum(x.addressable_shards[0].data.nbytes for x in arrays)


def work(rank: int) -> list[tuple[float, int]]:
    """Entry point of each process; trains with `zero` and without."""
    with data_parallel.process_group() as mesh:
        return [train(mesh, examples(rank), use_zero) for use_zero in (True, False)]


if __name__ == "__main__":
    for rank, found in enumerate(rpc.spawn(work, nprocs=2)):
        for name, (total, size) in zip(("zero", "adam"), found, strict=True):
            print(
                "rank", rank, name, f"parameters' sum {total:.6f}, state {size} bytes"
            )
