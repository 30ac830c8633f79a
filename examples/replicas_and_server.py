"""Dense layers replicated on trainers, and one embedding table that a server holds.

torch: "Combining Distributed DataParallel with Distributed RPC Framework"
(rpc_ddp_tutorial, distributed/rpc/ddp_rpc of its examples). There the dense layer is
wrapped by DDP, and a master starts the trainers; here it is a replicated variable, and
the server starts them. Bags of words are padded to one length, because a compiled
function has one shape. The trainers have different numbers of examples; weighted by
these, each step equals that of all examples on one device.

    python examples/replicas_and_server.py
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdist import autograd, optim, rpc

WORKERS = ("server", "trainer0", "trainer1")
TRAINERS, SIZES = WORKERS[1:], (7, 4)
WORDS, DIM, CLASSES, LONGEST = 20, 6, 3, 5
STEPS, LR = 100, 0.2


class EmbeddingBag(nnx.Module):
    """Computes `torch.nn.EmbeddingBag` with mode="sum"."""

    def __init__(self) -> None:
        """Initializes random rows."""
        rows = np.random.default_rng(0).normal(size=(WORDS, DIM))
        self.table = nnx.Param(jnp.asarray(rows))

    def __call__(self, words: Any, lengths: Any) -> jax.Array:
        """The sum of each bag's rows, `(examples, DIM)`."""
        return bag_sums(self.table[...], words, lengths)


def bag_sums(table: Any, words: Any, lengths: Any) -> jax.Array:
    """Sums rows of `table`; the first `lengths` words of each bag count.

    Args:
      table: The embedding, `(WORDS, DIM)`.
      words: The bags, `(examples, LONGEST)`.
      lengths: The number of words in each bag, `(examples,)`.
    """
    counts = jnp.arange(LONGEST) < lengths[:, None]
    return (table[words] * counts[..., None]).sum(axis=1)


def cross_entropy(dense: Any, bags: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy of the dense layer's scores."""
    scores = jax.nn.log_softmax(bags @ dense["w"] + dense["b"])
    return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()


def initial_dense() -> Any:
    """Weights of the dense layer; those of the first trainer are broadcast."""
    w = np.random.default_rng(1).normal(size=(DIM, CLASSES))
    return {"w": jnp.asarray(w) / DIM**0.5, "b": jnp.zeros(CLASSES)}


def batches(trainer: int, steps: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields bags of a trainer, their lengths and labels."""
    teacher = np.random.default_rng(2).normal(size=(WORDS, CLASSES))  # the same for all
    rng, size = np.random.default_rng((trainer, 3)), SIZES[trainer]
    for _ in range(steps):
        words = rng.integers(0, WORDS, (size, LONGEST))
        lengths = rng.integers(1, LONGEST + 1, size)
        yield words, lengths, np.asarray(bag_sums(teacher, words, lengths)).argmax(1)


def train(embedding: rpc.RemoteModule, trainer: int, steps: int) -> list[float]:
    """Trains on one trainer; returns its losses."""
    size = SIZES[trainer]
    # The counterpart of DDP: `backward` averages over all trainers, weighted by
    # examples.
    dense = autograd.replicated(initial_dense(), TRAINERS, weight=size)
    dense_opt = autograd.DistributedOptimizer(optim.sgd, [rpc.RRef(dense)], lr=LR)
    # The table is not replicated: every trainer steps it with its own gradient, and the
    # steps add up. Each therefore takes its share of the rate, where torch takes all of
    # it.
    rows, rate = embedding.parameters().values(), LR * size / sum(SIZES)
    table_opt = autograd.DistributedOptimizer(optim.sgd, rows, lr=rate)
    losses = []
    for words, lengths, labels in batches(trainer, steps):
        with autograd.context() as context_id:
            bags = embedding(words, lengths)
            loss = autograd.apply(cross_entropy, dense, bags, labels)
            autograd.backward(context_id, [loss])
            dense_opt.step(context_id)
            table_opt.step(context_id)
        rpc.barrier(
            names=TRAINERS
        )  # or else one may look rows up before the other steps
        losses.append(float(loss.value))
    return losses


def run(steps: int) -> list[list[float]]:
    """Trains from the server; returns the losses of each trainer."""
    embedding = rpc.RemoteModule(WORKERS[0], EmbeddingBag, trainable=True)
    training = [
        rpc.rpc_async(name, train, args=(embedding, number, steps))
        for number, name in enumerate(TRAINERS)
    ]
    return rpc.wait_all(training)


def work(rank: int) -> list[list[float]] | None:
    """Entry point of each process; the trainers only answer calls."""
    rpc.init_rpc(WORKERS[rank])
    losses = run(STEPS) if rank == 0 else None
    rpc.shutdown()
    return losses


if __name__ == "__main__":
    losses = np.transpose(rpc.spawn(work, nprocs=len(WORKERS))[0])
    for step in range(0, STEPS, 20):
        print("step", step, "losses", losses[step : step + 20].mean(axis=0))
