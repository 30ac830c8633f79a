"""The loss is summed over devices before it is differentiated.

In SPMD code without tracking of replication the transpose of a sum over devices is a
sum over devices: the cotangent 1 of each device's equal loss arrives as often as there
are devices.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import language_model as model
from experiments.museum.meshes import Trainer, mesh, spmd

Tree = Any

THREAD = "https://github.com/jax-ml/jax/issues/3970"
CLAIM = "The gradient of the mean over the counted tokens of all replicas."
EXPECTED = ("first difference: backward, token loss", " 3 times")


def buggy(mean: Trainer, params: Tree) -> Tree:
    """The loss over all replicas, and this replica's share of its gradient."""
    return jax.value_and_grad(lambda p: lax.psum(mean(p), "dp"))(params)


def fixed(mean: Trainer, params: Tree) -> Tree:
    """The loss over all replicas, and this replica's share of its gradient."""
    loss, gradient = jax.value_and_grad(mean)(params)
    return lax.psum(loss, "dp"), gradient


def trainer(part: Trainer) -> Trainer:
    """Three replicas."""

    def local(params: Tree, batch: Tree) -> Tree:
        tokens = lax.psum(model.counts(batch).sum(), "dp")
        loss, gradient = part(lambda p: model.total(p, batch) / tokens, params)
        return loss, lax.psum(gradient, "dp")

    return spmd(local, mesh(dp=3), (P(), P("dp")), (P(), P()))


# --- what the judge needs ---


judge = model.judge
