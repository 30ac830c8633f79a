"""Muon makes each shard orthogonal for itself.

Under tensor parallelism the optimizer saw each rank's slice of a matrix, and the
orthogonal factor of a slice is no slice of the whole matrix's factor.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import language_model as model
from experiments.museum.meshes import Judge, Trainer, mesh, own, spmd, whole
from experiments.museum.optimizers._muon import (
    direction,
    momentum,
    moved,
    muon,
    orthogonal,
)
from jdist import verify

Tree = Any

THREAD = "https://github.com/deepspeedai/DeepSpeed/issues/8437"
CLAIM = "The step of Muon on whole matrices."
EXPECTED = ("its optimizer state is right", "params/blocks/1/")


def buggy(m: Tree, dim: int) -> Tree:
    """The move of a matrix that is divided along a dimension."""
    return orthogonal(m)


def fixed(m: Tree, dim: int) -> Tree:
    """The move of a matrix that is divided along a dimension."""
    return own(orthogonal(whole(m, "tp", dim)), "tp", dim)


def trainer(part: Trainer) -> Trainer:
    """Two replicas whose blocks are divided over two devices."""
    specs, dims = model.specs(), {"up": 1, "down": 0}

    def local(params: Tree, state: Tree, batch: Tree) -> Tree:
        tokens = lax.psum(model.counts(batch).sum(), "dp")
        mean = lambda p: model.total(p, batch, model.divided_block) / tokens  # noqa: E731
        state = momentum(state, lax.psum(jax.grad(mean)(params), "dp"))

        def move(path: Tree, m: Tree) -> Tree:
            name = path[-1].key
            return part(m, dims[name]) if name in dims else direction(m)

        moves = jax.tree_util.tree_map_with_path(move, state)
        return moved(params, moves), state

    return spmd(local, mesh(dp=2, tp=2), (specs, specs, P("dp")), (specs, specs))


# --- what the judge needs ---


def judge() -> Judge:
    """The judge of two steps: the model on one device."""
    params, batches = model.params(), [model.tokens(seed=seed) for seed in (1, 2)]
    weights = [model.counts(batch) for batch in batches]
    start = params, jax.tree.map(jnp.zeros_like, params)
    judge = verify.step_judge(model.losses, muon, start, batches, weights=weights)
    return lambda trainer: judge({"trainer": trainer})
