"""Gradients that are summed already are summed again.

Where replication is tracked, a parameter that is the same on all devices gets the sum
of all devices' cotangents from differentiation itself. Code written for `pmap` sums or
averages once more.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import language_model as model
from experiments.museum.meshes import Trainer, mesh

Tree = Any

THREAD = "https://github.com/jax-ml/jax/issues/36886"
CLAIM = "The gradient of the mean over the counted tokens of all replicas."
EXPECTED = ("first difference: gradient", " 6 times")


def buggy(gradient: Tree) -> Tree:
    """The sum over the replicas."""
    varying = jax.tree.map(lambda g: lax.pcast(g, "dp", to="varying"), gradient)
    return lax.psum(varying, "dp")


def fixed(gradient: Tree) -> Tree:
    """The sum over the replicas."""
    return gradient


def trainer(part: Trainer) -> Trainer:
    """Six replicas, with replication tracked."""

    def local(params: Tree, batch: Tree) -> Tree:
        tokens = lax.psum(model.counts(batch).sum(), "dp")
        mean = lambda p: model.total(p, batch) / tokens  # noqa: E731
        loss, gradient = jax.value_and_grad(mean)(params)
        return lax.psum(loss, "dp"), part(gradient)

    over, ins = mesh(dp=6), (P(), P("dp"))
    return jax.jit(jax.shard_map(local, mesh=over, in_specs=ins, out_specs=(P(), P())))


# --- what the judge needs ---


judge = model.judge
