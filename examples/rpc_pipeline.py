"""A convolutional net in two shards on two workers, fed with micro-batches over RPC.

torch: "Distributed Pipeline Parallelism Using RPC" (dist_pipeline_parallel_tutorial,
distributed/rpc/pipeline of its examples). There it is ResNet-50 with batch
normalisation; here each shard has one residual block and no normalisation, so that the
losses do not depend on how the batch is split. The optimizers are one
DistributedOptimizer. (Real training should use `jdist.pipeline`, which has schedules;
see examples/transformer_pipeline.py.)

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
    """A padded 3 x 3 convolution of `(examples, height, width, channels)`."""
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=layout
    )


def block(kernels: Any, x: jax.Array) -> jax.Array:
    """A residual block of two convolutions."""
    return x + convolution(jax.nn.relu(convolution(x, kernels["a"])), kernels["b"])


def first_half(p: Any, images: jax.Array) -> jax.Array:
    """Maps images to features."""
    return block(p["block"], jax.nn.relu(convolution(images, p["stem"])))


def second_half(p: Any, x: jax.Array) -> jax.Array:
    """Maps features to scores, `(examples, CLASSES)`."""
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
        """Makes its weights on the worker."""
        self.function = (first_half, second_half)[half]
        self.weights = autograd.variable(initial_weights(half))

    def forward(self, x: rpc.RRef[Any]) -> Any:
        """The output for a micro-batch, which `to_here` fetches from its owner."""
        return autograd.apply(self.function, self.weights, x.to_here())

    def parameter_rrefs(self) -> list[rpc.RRef[Any]]:
        """References to the parameters, for a DistributedOptimizer."""
        return [rpc.RRef(self.weights)]


class DistributedNet:
    """Both halves, seen from the master."""

    def __init__(self, splits: int, workers: tuple[str, str]) -> None:
        """Creates each half on its worker."""
        self.splits = splits
        self.shards = [rpc.remote(w, Shard, args=(i,)) for i, w in enumerate(workers)]

    def forward(self, images: np.ndarray) -> list[Any]:
        """Returns the scores of each micro-batch."""
        futures = []
        for part in np.split(images, self.splits):
            # No call blocks here: worker2 fetches y from worker1 once it is computed,
            # and worker1 continues with the next micro-batch.
            y = self.shards[0].remote().forward(rpc.RRef(part))
            futures.append(self.shards[1].rpc_async().forward(y))
        return rpc.wait_all(futures)

    def parameter_rrefs(self) -> list[rpc.RRef[Any]]:
        """References to the parameters of both halves."""
        return [p for s in self.shards for p in s.rpc_sync().parameter_rrefs()]


def squared_error(scores: list[jax.Array], labels: jax.Array) -> jax.Array:
    """The mean over the batch, given as a list of micro-batches."""
    return ((jnp.concatenate(scores) - labels) ** 2).mean()


def batches(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random images and one-hot labels."""
    rng = np.random.default_rng(3)
    shape = (BATCH, IMAGE, IMAGE, 3)
    labels = np.eye(CLASSES)[rng.integers(0, CLASSES, BATCH)]  # the same in all steps
    return [(rng.normal(size=shape), labels) for _ in range(steps)]


def train(splits: int, workers: tuple[str, str], steps: int = 3) -> list[float]:
    """Trains from the master; returns the losses."""
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
    """Entry point of each process; the two workers only answer calls."""
    rpc.init_rpc(WORKERS[rank])
    found = {n: train(n, WORKERS[1:]) for n in (1, 2, 4)} if rank == 0 else {}
    rpc.shutdown()
    return found


if __name__ == "__main__":
    for splits, losses in rpc.spawn(work, nprocs=len(WORKERS))[0].items():
        print(splits, "micro-batches, losses", *(f"{loss:.6f}" for loss in losses))
