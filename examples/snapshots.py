"""Training that goes on from its last snapshot when it is started again.

torch: "Fault-tolerant Distributed Training with torchrun" (ddp_series_fault_tolerance,
distributed/ddp-tutorial-series/multigpu_torchrun.py of its examples). There rank 0
writes weights and the epoch, so the optimizer starts afresh and the saved epoch is
trained twice; here a snapshot is the whole training state, and a run that was killed at
any moment repeats every bit of one that was not. As in torch, a launcher starts it:

    python -m jdist.launch --nproc 2 examples/snapshots.py 4     # and once more, with 8
    python -m jdist.launch --nproc 2 --max-restarts 3 examples/snapshots.py 40
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdist import data_parallel, optim

EXAMPLES, BATCH = 512, 64  # a batch covers all processes


def losses_of(net: Any, batch: Any) -> jax.Array:
    """The squared error of each example, `(examples,)`."""
    x, y = batch
    return (x @ net["w"] + net["b"] - y) ** 2


def dataset() -> tuple[np.ndarray, np.ndarray]:
    """All examples; the sampler reads only the rows of its own process."""
    rng = np.random.default_rng(0)
    x = rng.random((EXAMPLES, 20))
    return x, x @ rng.random(20)


def train(mesh: Mesh, epochs: int, save_every: int, folder: str) -> dict[int, float]:
    """Trains up to epoch `epochs`; returns the last loss of each trained epoch."""
    opt = optim.sgd(lr=1e-2, momentum=0.9)
    step = data_parallel.train_step(losses_of, opt, mesh)
    state = step.init({"w": jnp.zeros(20), "b": jnp.zeros(())})
    sampler = data_parallel.Sampler(EXAMPLES, BATCH)  # shuffles anew in each epoch
    data, losses = dataset(), {}
    with data_parallel.TrainCheckpoints(folder) as snapshots:
        if snapshots.latest() is not None:
            state = snapshots.restore(state)
        for epoch in range(int(state.step) // sampler.steps, epochs):
            for batch, weights in sampler.batches(data, mesh, epoch):
                state, metrics = step(state, batch, weights)
            losses[epoch] = float(metrics.loss)
            if (epoch + 1) % save_every == 0:
                snapshots.save(state)  # keeps the previous snapshot until complete
    return losses


def main() -> None:
    """Parses the command line and trains in the group of all started processes."""
    parser = argparse.ArgumentParser(description="Training that can be resumed.")
    parser.add_argument("epochs", type=int, nargs="?", default=4)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--folder", default="results/snapshots")
    given = parser.parse_args()
    with data_parallel.process_group() as mesh:
        losses = train(mesh, given.epochs, given.save_every, given.folder)
    for epoch, loss in losses.items():
        print("epoch", epoch, f"loss {loss!r}")


if __name__ == "__main__":
    main()
