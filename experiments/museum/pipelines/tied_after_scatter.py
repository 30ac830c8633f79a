"""Tied gradients are added after they were scattered over the replicas.

With a distributed optimizer each replica keeps the sum of a part of a flat buffer. The
embedding lies first in the first stage's buffer and last in that of the last stage, so
different replicas had the sums. The stages then added, replica by replica, a sum and a
partial result.
"""

from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import language_model as model
from experiments.museum.meshes import Trainer, mesh, spmd
from experiments.museum.pipelines._stages import first, halves, last, merged

Tree = Any

THREAD = "https://github.com/NVIDIA/Megatron-LM/issues/844"
CLAIM = "The gradient of one embedding that both ends of all replicas use."
EXPECTED = ("embed: the uses that it counts", "dot_general", "examples 3-5")


def buggy(of_first: Tree, of_last: Tree) -> Tree:
    """The tied gradient of replica 0, which owns the first stage's embedding."""
    on_owner = lax.psum(of_first, "dp") + of_last
    return lax.all_gather(on_owner, "dp")[0]


def fixed(of_first: Tree, of_last: Tree) -> Tree:
    """The tied gradient of replica 0, which owns the first stage's embedding."""
    return lax.psum(of_first + of_last, "dp")


def trainer(part: Trainer) -> Trainer:
    """Two replicas of two stages."""

    def local(params: Tree, batch: Tree) -> Tree:
        tokens = lax.psum(model.counts(batch).sum(), "dp")
        start, end = halves(params)

        def mean(start: Tree, end: Tree) -> Tree:
            return last(end, first(start, batch), batch) / tokens

        loss, found = jax.value_and_grad(mean, argnums=(0, 1))(start, end)
        embed = part(found[0]["embed"], found[1]["embed"])
        whole = lax.psum(merged(*found), "dp")
        return lax.psum(loss, "dp"), {**whole, "embed": embed}

    return spmd(local, mesh(dp=2), (P(), P("dp")), (P(), P()))


# --- what the judge needs ---


judge = partial(model.judge, tied=True)
