"""The loss undoes an average over replicas; the scatter averages over more.

With sequence parallelism under fully sharded parameters the loss was multiplied by the
data-parallel replicas, while the reduce-scatter averaged over all devices that hold a
shard, those of the sequence included.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import language_model as model
from experiments.museum.meshes import Judge, Trainer, mesh, spmd
from jdist import verify

Tree = Any

THREAD = "https://github.com/hamishivi/tmax/issues/9"
CLAIM = "The gradient of the mean over the counted tokens of all devices."
EXPECTED = ("first difference: gradient", "0.333333 times")
AXES = ("dp", "sp")


def buggy() -> Tree:
    """The factor that undoes the average of the reduce-scatter."""
    return lax.axis_size("dp")


def fixed() -> Tree:
    """The factor that undoes the average of the reduce-scatter."""
    return lax.axis_size("dp") * lax.axis_size("sp")


def trainer(part: Trainer) -> Trainer:
    """Two replicas of three parts of the sequences; parameters are fully sharded."""

    def local(shards: Tree, batch: Tree) -> Tree:
        params = jax.tree.map(lambda x: lax.all_gather(x, AXES, tiled=True), shards)
        tokens = lax.psum(batch["mask"].sum(), AXES)
        mean = lambda p: model.total(p, batch) / tokens * part()  # noqa: E731
        loss, gradient = jax.value_and_grad(mean)(params)
        scatter = lambda g: lax.psum_scatter(g, AXES, tiled=True) / 6  # noqa: E731
        return lax.psum(loss, AXES) / part(), jax.tree.map(scatter, gradient)

    return spmd(local, mesh(dp=2, sp=3), (P(AXES), P("dp", "sp")), (P(), P(AXES)))


# --- what the judge needs ---


def judge() -> Judge:
    """The judge: the model on one device, of twelve units."""
    batch, params = model.tokens(), model.params(hidden=12, vocabulary=12)
    return verify.trace_judge(model.losses, params, batch, weights=model.counts(batch))
