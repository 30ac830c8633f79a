"""Training over two processes, with a checkpoint that one writes and all read.

torch: "Getting Started with Distributed Data Parallel" (ddp_tutorial), its basic use
and its checkpoint. There each process wraps its model, and DDP averages gradients
inside `backward`; here `train_step` is the whole step, a function of state and batch.
Its gradient is that of the whole batch even if processes have different numbers of
examples (here 40 and 27), for which DDP's average would be wrong.

    python examples/replicas.py
"""

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdist import data_parallel, optim, rpc

SIZES, STEPS, LR = (40, 27), 8, 0.5


def initial_weights() -> Any:
    """Random weights of two linear layers."""
    rng = np.random.default_rng(0)
    net = {"w1": rng.normal(size=(10, 10)) / 3, "w2": rng.normal(size=(10, 5)) / 3}
    return jax.tree.map(jnp.asarray, net)


def squared_errors(net: Any, batch: Any) -> jax.Array:
    """The squared error of each example; `train_step` takes the mean over all."""
    x, labels = batch
    return ((jax.nn.relu(x @ net["w1"]) @ net["w2"] - labels) ** 2).mean(axis=1)


def batches(rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The examples of one process for all steps."""
    teacher = np.random.default_rng(1).normal(size=(10, 5)) / 3  # the same for all
    rng = np.random.default_rng((rank, 2))
    inputs = [rng.normal(size=(SIZES[rank], 10)) for _ in range(STEPS)]
    return [(x, np.tanh(x @ teacher)) for x in inputs]


def train(mesh: Mesh, data: list[Any], sizes: Any, folder: str) -> list[float]:
    """Returns the losses; resumes from a checkpoint after half of the steps."""
    step = data_parallel.train_step(squared_errors, optim.sgd(lr=LR), mesh)
    state = step.init(initial_weights())  # broadcasts the weights of process 0
    losses = []
    with data_parallel.TrainCheckpoints(folder) as checkpoints:
        for number, own in enumerate(data):
            if number == STEPS // 2:
                checkpoints.save(state)  # called by all; returns when it is on disk
                state = checkpoints.restore(step.init(initial_weights()))
            # Shorter shards are padded to `rows` with weight 0, because a compiled step
            # has one shape.
            batch, weights = data_parallel.shard_batch(
                own, mesh, sizes, rows=max(SIZES)
            )
            state, metrics = step(state, batch, weights)
            losses.append(float(metrics.loss))
    return losses


def work(rank: int, folder: str) -> list[float]:
    """Entry point of each process; returns its losses."""
    with data_parallel.process_group() as mesh:
        return train(mesh, batches(rank), None, folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for rank, losses in enumerate(rpc.spawn(work, args=(folder,), nprocs=2)):
            print("rank", rank, "losses", *(f"{loss:.6f}" for loss in losses))
