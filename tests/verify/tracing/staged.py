"""A model of two equal stages with taps, and what a worker of a pipeline does."""

import jax
import jax.numpy as jnp
import numpy as np

from jdist import pipeline, verify

RNG = np.random.default_rng(5)
PARAMS = [jnp.asarray(RNG.normal(size=(3, 3)), jnp.float32) for _ in range(2)]
BATCH = {
    name: jnp.asarray(RNG.normal(size=(9, 3)), jnp.float32) for name in ("x", "target")
}
WEIGHTS = RNG.uniform(0.5, 2, 9).astype(np.float32)


def stage(w, h):
    return verify.tap(jnp.tanh(h @ w), "stage")


def louder(w, h):
    return verify.tap(jnp.tanh(1.01 * h @ w), "stage")


def distance(y, batch):
    return jnp.sum((y - batch["target"]) ** 2, axis=1)


def losses(params, batch):
    return distance(stage(params[1], stage(params[0], batch["x"])), batch)


def piped(schedule, places=None, second=stage):
    stages = [
        pipeline.Stage(stage, ("x",), ("h",)),
        pipeline.Stage(second, ("h",), ("y",)),
    ]
    pipe = pipeline.Pipeline(stages, distance, schedule, places)
    return lambda params, batch: pipe.value_and_grad(params, batch, WEIGHTS)


def worker_step(second=stage):
    """One worker's part of a step, and what its taps saw, as plain data."""
    run = piped(
        pipeline.one_f_one_b(2, 2), pipeline.Workers(["worker0", "worker1"]), second
    )
    with verify.TapRecording() as recording:
        loss, gradient = jax.block_until_ready(run(PARAMS, BATCH))
    found = jax.tree.map(np.asarray, (loss, list(gradient)))
    return found, [tuple(record) for record in recording.records]


def wrong_worker_step():
    return worker_step(louder)
