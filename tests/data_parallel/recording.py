"""Steps whose result can be looked at: the gradient itself, and copies bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np

from jdist._tree import is_inexact, is_none
from jdist.data_parallel import train_step
from jdist.optim import Optimizer
from tests.replicas import over


def recorder():
    """An optimizer that moves nothing and keeps the gradient as its state.

    Where no gradient came, the state stays NaN.
    """

    def init(params):
        return jax.tree.map(
            lambda p: jnp.full_like(p, jnp.nan) if is_inexact(p) else None, params
        )

    def step(params, grads, state, overrides):
        kept = jax.tree.map(
            lambda g, s: s if g is None else g, grads, state, is_leaf=is_none
        )
        return params, kept

    return Optimizer("recorder", init, step)


def gradient_of(loss_fn, mesh, **options):
    """`fn(params, batch, weights) -> (loss, gradient)`, through a training step."""
    step = train_step(loss_fn, recorder(), **over(mesh), **options)

    def fn(params, batch, weights=None):
        state, metrics = step(step.init(params), batch, weights)
        return metrics.loss, state.opt_state

    return fn


def copies_differ(tree):
    """How many leaves do not have the same bits on all devices that hold them."""
    return sum(
        len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) > 1
        for leaf in jax.tree.leaves(tree)
        if leaf.is_fully_replicated
    )
