"""A small model with taps: a loop over layers, weights that are used twice, a mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jdist.verify import tap

EXAMPLES = 10
PARTS = ((0, 4), (4, 7), (7, 10))
UNCOUNTED = 3


def parameters(dtype=jnp.float32, layers=2):
    """Unequal sizes throughout, and a leaf that nothing uses."""
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "inward": jax.random.normal(keys[0], (4, 5), dtype),
        "layers": jax.random.normal(keys[1], (layers, 5, 5), dtype) / 2,
        "outward": jax.random.normal(keys[2], (5, 3), dtype),
        "unused": jnp.zeros(2, dtype),
    }


def batch(dtype=jnp.float32):
    """Ten examples of a sequence of two."""
    rng = np.random.default_rng(1)
    return {
        "x": jnp.asarray(rng.normal(size=(EXAMPLES, 2, 4)), dtype),
        "label": jnp.asarray(rng.integers(3, size=EXAMPLES)),
    }


def weights():
    """Unequal ones; one example does not count."""
    found = np.random.default_rng(2).uniform(0.5, 2, EXAMPLES).astype(np.float32)
    found[UNCOUNTED] = 0
    return found


def losses(params, rows, hidden=lambda h: h, scores=lambda s: s):
    """One loss per example; `hidden` and `scores` are where defects are planted."""
    x = tap(rows["x"] @ params["inward"], "embedded")

    def layer(x, w):
        return tap(x + hidden(jnp.tanh(x @ w)), "layer"), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    found = scores(tap(x.mean(axis=1) @ params["outward"], "scores"))
    logs = jax.nn.log_softmax(found)
    return -jnp.take_along_axis(logs, rows["label"][:, None], axis=1)[:, 0]


@jax.custom_vjp
def stretched(x):
    """The identity, with 1.1 times the derivative."""
    return x


stretched.defvjp(lambda x: (x, None), lambda _, g: (1.1 * g,))


def accumulated(loss_of=lambda part: losses, after=lambda part, g: g, parts=PARTS):
    """A trainer of micro-batches: the local mean, weighted by its share afterwards.

    Args:
      loss_of: The loss of each micro-batch.
      after: What is done to its gradient.
      parts: The first and the last example of each.
    """

    def candidate(params, rows):
        # Shares in float32 would be a defect of their own beside float64.
        result, w = None, weights().astype(np.float64)
        for number, (start, stop) in enumerate(parts):
            few = jax.tree.map(lambda x, a=start, b=stop: x[a:b], rows)
            found = local_mean(loss_of(number), params, few, weights()[start:stop])
            share = w[start:stop].sum() / w.sum()
            loss, gradient = found[0], after(number, found[1])
            found = jax.tree.map(lambda x, s=float(share): x * s, (loss, gradient))
            result = found if result is None else jax.tree.map(jnp.add, result, found)
        return result

    return candidate


@functools.partial(jax.jit, static_argnums=0)
def local_mean(loss, params, rows, own):
    """The weighted mean of a micro-batch, and its gradient; compiled once a loss."""

    def mean(p):
        found = loss(p, rows)
        w = own.astype(found.dtype)
        return jnp.sum(w * found) / w.sum()

    return jax.value_and_grad(mean)(params)
