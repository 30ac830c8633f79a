"""What the workers of the tests run, and one device in their place."""

import os
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from jdist import data_parallel, optim, pipeline

NAMES = [f"worker{i}" for i in range(4)]
PLACES = pipeline.Workers(NAMES)
WIDTHS = (3, 6, 4, 5, 2)
BATCH = {
    "x": np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32),
    "target": np.random.default_rng(1).normal(size=(10, 2)).astype(np.float32),
}
WEIGHTS = np.arange(1.0, 11.0, dtype=np.float32)
PARAMS = [
    np.random.default_rng((2, i)).normal(size=size).astype(np.float32)
    for i, size in enumerate(pairwise(WIDTHS))
]

# Small integers: with a linear loss all sums are exact, in any order.
EXAMPLES, ELASTIC_BATCH, EPOCHS = 37, 8, 30
X = np.random.default_rng(3).integers(-3, 4, (EXAMPLES, 3)).astype(np.float32)
Y = np.random.default_rng(5).integers(-3, 4, EXAMPLES).astype(np.float32)
COUNTS = (np.arange(EXAMPLES) % 4).astype(np.float32)
FIRST = {"w": np.float32([1, 2, -3]), "twice": np.float32(2), "no": np.ones(2, "f4")}


def pid():
    return os.getpid()


def variable(name):
    return os.environ[name]


def squared(x):
    return x * x


def layer(w, x):
    return jnp.tanh(x @ w)


def loss(y, batch):
    return ((y - batch["target"]) ** 2).sum(-1)


def train_pipeline(params, steps, places=PLACES):
    """Steps of a pipeline over these workers, or in this process without places.

    Returns:
      The losses, and the parameters of the stages that this worker has; None for
      those of others.
    """
    values = ["x", "h0", "h1", "h2", "y"]
    stages = [pipeline.Stage(layer, (a,), (b,)) for a, b in pairwise(values)]
    pipe = pipeline.Pipeline(
        stages,
        loss,
        pipeline.one_f_one_b(4, 3),
        places,
        optimizer=optim.sgd(lr=0.1),
    )
    state, losses = pipe.init([jnp.asarray(w) for w in params]), []
    for _ in range(steps):
        state, metrics = pipe.train_step(state, BATCH, WEIGHTS)
        losses.append(float(metrics.loss))
    return losses, jax.tree.map(np.asarray, state.params)


def exact_loss(params, batch):
    x, y = batch
    return x @ params["w"] + 2 * y * params["twice"]


class Watched:
    """Data that calls `before()` when a share of it is read, and counts that."""

    shares = 0

    def __init__(self, array, before):
        self.shape, self._array, self._before = array.shape, array, before

    def __getitem__(self, rows):
        if not isinstance(rows, slice):
            Watched.shares += 1
            self._before()
        return self._array[rows]


def shares():
    """How many shares of an elastic run this process has computed."""
    return Watched.shares


def train_elastic(before=lambda: None):
    """Takes part in an elastic run; parameters and losses."""
    sampler = data_parallel.Sampler(EXAMPLES, ELASTIC_BATCH)
    run = data_parallel.Elastic(exact_loss, optim.sgd(lr=1.0), sampler, reduction="sum")
    state, losses = run.run(FIRST, (Watched(X, before), Y), COUNTS, epochs=EPOCHS)
    return jax.tree.map(np.asarray, state.params), losses


def exact_run():
    """Parameters and losses of `train_elastic`, by integers."""
    sampler = data_parallel.Sampler(EXAMPLES, ELASTIC_BATCH, seed=0)
    w, twice, losses = np.array([1, 2, -3]), 2, []
    for epoch in range(EPOCHS):
        order = sampler.order(epoch)
        for start in range(0, EXAMPLES, ELASTIC_BATCH):
            rows = order[start : start + ELASTIC_BATCH]
            x, y, k = (a[rows].astype(int) for a in (X, Y, COUNTS))
            losses.append(int(k @ (x @ w + 2 * y * twice)))
            w, twice = w - k @ x, twice - int(k @ (2 * y))
    return {"w": w, "twice": twice}, losses
