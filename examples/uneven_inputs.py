"""Replicas that run out of data at different times, and a divided optimizer state.

torch: "Distributed Training with Uneven Inputs Using the Join Context Manager"
(generic_join), with DistributedDataParallel and ZeroRedundancyOptimizer. torch's
default divides the gradient by the initial number of replicas; ours is the mean over
the remaining examples, and `divide_by="initial"` is torch's.

    python examples/uneven_inputs.py
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdist import data_parallel, optim, rpc

INPUTS = 5


def inputs(rank: int) -> list[np.ndarray]:
    """Inputs of shape `(1, 3)`, one more on rank 1 than on rank 0."""
    return list(np.random.default_rng(rank).normal(size=(INPUTS + rank, 1, 3)))


def train(mesh: Mesh, streams: list[Any], divide_by: str) -> list[float]:
    """Returns the losses, which are the same on all replicas."""
    joined = data_parallel.Join(streams, mesh, rows=1, divide_by=divide_by)
    opt = data_parallel.zero(optim.adam(lr=0.01), mesh)
    step = data_parallel.train_step(
        lambda w, x: (x @ w - 1) ** 2, opt, mesh, reduction=joined.reduction
    )
    state = step.init(jnp.asarray([0.3, -0.2, 0.1]))
    losses = []
    for batch, weights in joined:
        state, metrics = step(state, batch, weights)
        losses.append(float(metrics.loss))
    return losses


def work(rank: int) -> list[float]:
    """Entry point of each process; returns the losses."""
    with data_parallel.process_group() as mesh:
        return train(mesh, [inputs(rank)], "weight")


if __name__ == "__main__":
    for rank, losses in enumerate(rpc.spawn(work, nprocs=2)):
        print("rank", rank, len(losses), "steps", *(f"{loss:.4f}" for loss in losses))
