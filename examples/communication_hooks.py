"""Gradients compressed by PowerSGD on their way, and the compression's state saved.

torch: "DDP Communication Hooks", its end-to-end example of checkpointing PowerSGD's
state. There hook and state are registered with the model and pickled; here the hook
belongs to the training step, and its state is part of the training state, which every
checkpoint contains.

    python examples/communication_hooks.py
"""

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdist import data_parallel, optim, rpc
from jdist.data_parallel import hooks

ROWS, STEPS, LR = 10, 6, 0.1
HOOKS = {
    "none": None,
    "fp16": hooks.fp16(),
    "power_sgd": hooks.power_sgd(rank=2, start=2),  # two exact steps, then factors
}


def initial_weights() -> Any:
    """Random weights of two linear layers."""
    rng = np.random.default_rng(0)
    net = {"w1": rng.normal(size=(24, 24)) / 5, "w2": rng.normal(size=(24, 12)) / 5}
    return jax.tree.map(jnp.asarray, net)


def squared_errors(net: Any, batch: Any) -> jax.Array:
    """The squared error of each example, `(examples,)`."""
    x, labels = batch
    return ((jax.nn.relu(x @ net["w1"]) @ net["w2"] - labels) ** 2).mean(axis=1)


def examples(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and labels of one process."""
    rng = np.random.default_rng((rank, 1))
    return rng.normal(size=(ROWS, 24)), rng.normal(size=(ROWS, 12))


def train(mesh: Mesh, own: Any, hook: hooks.Hook | None, folder: str) -> list[float]:
    """Returns the losses; resumes from a checkpoint after half of the steps."""
    opt = optim.sgd(lr=LR)
    step = data_parallel.train_step(squared_errors, opt, mesh, hook=hook)
    batch, weights = data_parallel.shard_batch(own, mesh, rows=ROWS)
    state, losses = step.init(initial_weights()), []
    with data_parallel.TrainCheckpoints(folder) as checkpoints:
        for number in range(STEPS):
            if number == STEPS // 2:
                checkpoints.save(state)
                state = checkpoints.restore(step.init(initial_weights()))
            state, metrics = step(state, batch, weights)
            losses.append(float(metrics.loss))
    return losses


def work(rank: int, folder: str) -> dict[str, list[float]]:
    """Entry point of each process; returns the losses of each hook."""
    with data_parallel.process_group() as mesh:
        return {
            name: train(mesh, examples(rank), hook, f"{folder}/{name}")
            for name, hook in HOOKS.items()
        }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, losses in rpc.spawn(work, args=(folder,), nprocs=2)[0].items():
            print(name, "losses", *(f"{loss:.6f}" for loss in losses))
