"""Equal stages that can tell: a parameter used twice, one unused, scalar, integer."""

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


def noisy(params, h, key):
    """With dropout before and after."""
    before, after = jax.random.split(key)
    h = jnp.where(jax.random.bernoulli(before, 0.7, h.shape), h / 0.7, 0)
    found = stage(params, h)
    return jnp.where(jax.random.bernoulli(after, 0.6, h.shape), found / 0.6, 0)


def losses(y, batch):
    """One for each example."""
    return ((y - batch["target"]) ** 2).sum(-1)


def stages(count, fn=stage, **options):
    names = ["x", *(f"h{j}" for j in range(1, count)), "y"]
    return [
        pipeline.Stage(fn, (names[j],), (names[j + 1],), **options)
        for j in range(count)
    ]


def whole_losses(params, batch):
    """The losses of the model in one piece."""
    h = batch["x"]
    for own in params:
        h = stage(own, h)
    return losses(h, batch)


def whole_gradient(params, batch, weights, reduction):
    """Loss and gradient of the model in one piece, written out by hand."""
    fixed = [{"steps": own["steps"]} for own in params]
    floating = [{k: x for k, x in own.items() if k != "steps"} for own in params]

    def reduced(floating):
        merged = [{**a, **b} for a, b in zip(floating, fixed, strict=True)]
        found = whole_losses(merged, batch)
        if reduction in ("max", "min"):
            return getattr(found[weights > 0], reduction)()
        total = (found * weights).sum()
        return total if reduction == "sum" else total / weights.sum()

    loss, grads = jax.jit(jax.value_and_grad(reduced))(floating)
    return loss, [{**own, "steps": None} for own in grads]


def close(found, expected):
    """Equal to rounding in float64, in one structure."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.shape(a) == jnp.shape(b)
        assert jnp.result_type(a) == jnp.result_type(b)
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def problem(count, examples, seed=0, dtype=np.float32, width=WIDTH):
    """Parameters, a batch and weights; the batch has an entry that nobody reads."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    params = [
        {
            "w": normal(width, width),
            "b": normal(width),
            "scale": dtype(rng.normal() + 2),
            "unused": normal(2),
            "steps": np.int32(2),
        }
        for _ in range(count)
    ]
    batch = {
        "x": normal(examples, width),
        "target": normal(examples, width),
        "name": rng.integers(0, 9, (examples, 4)),
    }
    weights = rng.uniform(0.1, 2, examples).astype(dtype)
    weights[0] = 0
    return jax.tree.map(jnp.asarray, params), batch, weights
