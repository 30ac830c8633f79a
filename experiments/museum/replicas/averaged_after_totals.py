"""Losses are divided by all replicas' tokens, and gradients are averaged.

The division by the tokens of all replicas makes the sum of the gradients right. The
average was switched off for fully sharded parameters, but not for replicated ones: the
gradient was too small by the number of replicas.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import language_model as model
from experiments.museum.meshes import Trainer, mesh, spmd

Tree = Any

THREAD = "https://github.com/pytorch/torchtitan/issues/2318"
CLAIM = "The gradient of the mean over the counted tokens of all replicas."
EXPECTED = ("first difference: gradient", "0.5 times")


def buggy(gradient: Tree) -> Tree:
    """The gradient over the replicas."""
    return lax.pmean(gradient, "dp")


def fixed(gradient: Tree) -> Tree:
    """The gradient over the replicas."""
    return lax.psum(gradient, "dp")


def trainer(part: Trainer) -> Trainer:
    """Two replicas."""

    def local(params: Tree, batch: Tree) -> Tree:
        tokens = lax.psum(model.counts(batch).sum(), "dp")
        mean = lambda p: model.total(p, batch) / tokens  # noqa: E731
        loss, gradient = jax.value_and_grad(mean)(params)
        return lax.psum(loss, "dp"), part(gradient)

    return spmd(local, mesh(dp=2), (P(), P("dp")), (P(), P()))


# --- what the judge needs ---


judge = model.judge
