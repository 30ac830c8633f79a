"""Equal stages that can tell: a parameter used twice, one unused, a scalar, an integer."""

import jax
import jax.numpy as jnp
import numpy as np

from jdist import pipeline

WIDTH = 5


def stage(params, h):
    steps = params["steps"].astype(h.dtype)
    return jnp.tanh(h @ params["w"] @ params["w"] + params["b"][None]) * (
        params["scale"] / steps
    )


def losses(y, batch):
    """One for each example."""
    return ((y - batch["target"]) ** 2).sum(-1)


def stages(count, **options):
    names = ["x", *(f"h{j}" for j in range(1, count)), "y"]
    return [
        pipeline.Stage(stage, (names[j],), (names[j + 1],), **options)
        for j in range(count)
    ]


def whole_losses(params, batch):
    """The losses of the model in one piece."""
    h = batch["x"]
    for own in params:
        h = stage(own, h)
    return losses(h, batch)


def problem(count, examples, seed=0, dtype=np.float32):
    """Parameters, a batch and weights; the batch has an entry that nobody reads."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    params = [
        {
            "w": normal(WIDTH, WIDTH),
            "b": normal(WIDTH),
            "scale": dtype(rng.normal() + 2),
            "unused": normal(2),
            "steps": np.int32(2),
        }
        for _ in range(count)
    ]
    batch = {
        "x": normal(examples, WIDTH),
        "target": normal(examples, WIDTH),
        "name": rng.integers(0, 9, (examples, 4)),
    }
    weights = rng.uniform(0.1, 2, examples).astype(dtype)
    weights[0] = 0
    return jax.tree.map(jnp.asarray, params), batch, weights
