"""A model on two devices, and the same fed with micro-batches.

torch: "Single-Machine Model Parallel Best Practices" (model_parallel_tutorial). There
layers and activations are moved by `.to(device)`; here a pipeline has a place for each
stage and moves them. A single micro-batch is torch's plain model parallelism; with more
of them the devices work at the same time.

    python examples/model_parallel.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import optim, pipeline

ROWS, LR = 60, 0.5


def initial_weights() -> list[Any]:
    """Random weights of two linear layers, one for each device."""
    rng = np.random.default_rng(0)
    return [
        {"w": jnp.asarray(rng.normal(size=(n, m)) / n**0.5), "b": jnp.zeros(m)}
        for n, m in ((10, 10), (10, 5))
    ]


def net1(p: Any, x: jax.Array) -> jax.Array:
    """The layer on the first device."""
    return jax.nn.relu(x @ p["w"] + p["b"])


def net2(p: Any, h: jax.Array) -> jax.Array:
    """The layer on the second device."""
    return h @ p["w"] + p["b"]


def squared_errors(y: jax.Array, batch: Any) -> jax.Array:
    """The squared error of each example; the pipeline takes the mean over the batch."""
    return ((y - batch["labels"]) ** 2).mean(axis=1)


def batches(steps: int) -> list[dict[str, np.ndarray]]:
    """Random inputs, and labels that depend on them."""
    rng = np.random.default_rng(1)
    teacher = rng.normal(size=(10, 5)) / 3
    inputs = [rng.normal(size=(ROWS, 10)) for _ in range(steps)]
    return [{"x": x, "labels": np.tanh(x @ teacher)} for x in inputs]


def train(devices: list[jax.Device], splits: int, steps: int = 8) -> list[float]:
    """Trains by plain SGD with `splits` micro-batches; returns the losses."""
    stages = [
        pipeline.Stage(net1, ("x",), ("h",)),
        pipeline.Stage(net2, ("h",), ("y",)),
    ]
    schedule = pipeline.gpipe(2, splits)
    opt = optim.sgd(lr=LR)
    model = pipeline.Pipeline(stages, squared_errors, schedule, devices, optimizer=opt)
    state = model.init(initial_weights())
    losses = []
    for batch in batches(steps):
        state, metrics = model.train_step(state, batch)
        losses.append(float(metrics.loss))
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)  # before JAX starts its backend
    for splits in (1, 4):
        losses = train(jax.devices()[:2], splits)
        print(splits, "micro-batches, losses", *(f"{loss:.6f}" for loss in losses))
