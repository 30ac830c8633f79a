"""Devices of tensor parallelism are counted as replicas.

To undo the average over replicas the loss was multiplied by the number of all
processes, those that share a replica's tensors included.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import language_model as model
from experiments.museum.meshes import Trainer, mesh, spmd

Tree = Any

THREAD = "https://github.com/huggingface/transformers/issues/45994"
CLAIM = "The gradient of the mean over the counted tokens of all replicas."
EXPECTED = ("first difference: gradient, head", "all examples count 2 times")


def buggy() -> Tree:
    """The factor that undoes the average over replicas."""
    return lax.axis_size("dp") * lax.axis_size("tp")


def fixed() -> Tree:
    """The factor that undoes the average over replicas."""
    return lax.axis_size("dp")


def trainer(part: Trainer) -> Trainer:
    """Three replicas of two devices each."""

    def local(params: Tree, batch: Tree) -> Tree:
        tokens = lax.psum(model.counts(batch).sum(), "dp")

        def mean(p: Tree) -> Tree:
            return model.total(p, batch, model.divided_block) / tokens * part()

        loss, gradient = jax.value_and_grad(mean)(params)
        return lax.pmean(loss, "dp"), lax.pmean(gradient, "dp")

    specs = model.specs()
    return spmd(local, mesh(dp=3, tp=2), (specs, P("dp")), (P(), specs))


# --- what the judge needs ---


judge = model.judge
