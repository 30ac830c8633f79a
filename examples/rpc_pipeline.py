"""A convolutional net in two shards on two workers, fed with micro-batches over RPC.

torch: "Distributed Pipeline Parallelism Using RPC" (dist_pipeline_parallel_tutorial,
distributed/rpc/pipeline of its examples). There it is ResNet-50 with batch
normalisation; here each shard has one residual block and no normalisation, so that the
losses are the same however the batch is split. The optimizers are one
DistributedOptimizer. (For training in earnest take `jdist.pipeline`, which has
schedules; examples/transformer_pipeline.py shows it.)

    python examples/rpc_pipeline.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import autograd, optim, rpc

WORKERS = ("master", "worker1", "worker2")
BATCH, IMAGE, CHANNELS, CLASSES, LR = 12, 8, 4, 5, 0.5


def convolution(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """3 x 3, padded, of images `(examples, height, width, channels)`."""
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=layout
    )


def block(kernels: Any, x: jax.Array) -> jax.Array:
    """A residual block."""
    return x + convolution(jax.nn.relu(convolution(x, kernels["a"])), kernels["b"])


def first_half(p: Any, images: jax.Array) -> jax.Array:
    """Images to features."""
    return block(p["block"], jax.nn.relu(convolution(images, p["stem"])))


def second_half(p: Any, x: jax.Array) -> jax.Array:
    """Features to scores."""
    return block(p["block"], x).mean(axis=(1, 2)) @ p["fc"]


def initial_weights(half: int) -> Any:
    """Random weights of one half."""
    rng = np.random.default_rng(half)

    def kernel(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.prod(shape[:-1]) ** 0.5)

    blocks = {name: kernel(3, 3, CHANNELS, CHANNELS) for name in ("a", "b")}
    if half == 0:
        return {"stem": kernel(3, 3, 3, CHANNELS), "block": blocks}
    return {"block": blocks, "fc": kernel(CHANNELS, CLASSES)}


class Shard:
    """Half of the net, on the worker that makes it."""

    def __init__(self, half: int) -> None:
        """Makes its weights there."""
        self.function = (first_half, second_half)[half]
        self.weights = autograd.variable(initial_weights(half))

    def forward(self, x: rpc.RRef[Any]) -> Any:
        """The output for a micro-batch, which is fetched from where it is."""
        return autograd.apply(self.function, self.weights, x.to_here())

    def parameter_rrefs(self) -> list[rpc.RRef[Any]]:
        """What a DistributedOptimizer is given."""
        return [rpc.RRef(self.weights)]


class DistributedNet:
    """Both halves, from the master's side."""

    def __init__(self, splits: int, workers: tuple[str, str]) -> None:
        """Has each half made on its worker."""
        self.splits = splits
        self.shards = [rpc.remote(w, Shard, args=(i,)) for i, w in enumerate(workers)]

    def forward(self, images: np.ndarray) -> list[Any]:
        """Scores of each micro-batch."""
        futures = []
        for part in np.split(images, self.splits):
            # Nothing waits here: worker2 fetches y from worker1 when it is there, and
            # worker1 goes on with the next micro-batch.
            y = self.shards[0].remote().forward(rpc.RRef(part))
            futures.append(self.shards[1].rpc_async().forward(y))
        return rpc.wait_all(futures)

    def parameter_rrefs(self) -> list[rpc.RRef[Any]]:
        """Of both halves."""
        return [p for s in self.shards for p in s.rpc_sync().parameter_rrefs()]


def squared_error(scores: list[jax.Array], labels: jax.Array) -> jax.Array:
    """Mean over the batch; a list of micro-batches is a tree, as good as an array."""
    return ((jnp.concatenate(scores) - labels) ** 2).mean()


def batches(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random images and one-hot labels."""
    rng = np.random.default_rng(3)
    shape = (BATCH, IMAGE, IMAGE, 3)
    labels = np.eye(CLASSES)[rng.integers(0, CLASSES, BATCH)]  # the same in all steps
    return [(rng.normal(size=shape), labels) for _ in range(steps)]


def train(splits: int, workers: tuple[str, str], steps: int = 3) -> list[float]:
    """What the master does; returns the losses."""
    net = DistributedNet(splits, workers)
    opt = autograd.DistributedOptimizer(optim.sgd, net.parameter_rrefs(), lr=LR)
    losses = []
    for images, labels in batches(steps):
        with autograd.context() as context_id:
            loss = autograd.apply(squared_error, net.forward(images), labels)
            autograd.backward(context_id, [loss])
            opt.step(context_id)
        losses.append(float(loss.value))
    return losses


def work(rank: int) -> dict[int, list[float]]:
    """What each process does: the two workers only answer."""
    rpc.init_rpc(WORKERS[rank])
    found = {n: train(n, WORKERS[1:]) for n in (1, 2, 4)} if rank == 0 else {}
    rpc.shutdown()
    return found


if __name__ == "__main__":
    for splits, losses in rpc.spawn(work, nprocs=len(WORKERS))[0].items():
        print(splits, "micro-batches, losses", *(f"{loss:.6f}" for loss in losses))
