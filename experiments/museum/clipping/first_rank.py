"""Replicated parameters are clipped on the first tensor-parallel rank only.

The norms' weights, which all tensor-parallel ranks hold, were scaled on rank 0 and left
alone on the others. The copies drifted apart over months of training.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import language_model as model
from experiments.museum.meshes import Judge, Trainer, mesh, spmd
from experiments.museum.trees import clipped, descended, norm, squares
from jdist import verify

Tree = Any

THREAD = "https://github.com/deepspeedai/DeepSpeed/pull/1801"
CLAIM = "Gradient descent, clipped by the norm of all parameters, on every device."
EXPECTED = ("params/blocks/0/scale", "replicas differ over tp")


def buggy(divided: bool, raw: Tree, scaled: Tree) -> Tree:
    """The gradient of a leaf that this device uses."""
    return scaled if divided else jnp.where(lax.axis_index("tp") == 0, scaled, raw)


def fixed(divided: bool, raw: Tree, scaled: Tree) -> Tree:
    """The gradient of a leaf that this device uses."""
    return scaled


def trainer(part: Trainer) -> Trainer:
    """Two replicas whose blocks are divided over two devices."""

    def local(params: Tree, batch: Tree) -> Tree:
        tokens = lax.psum(model.counts(batch).sum(), "dp")
        mean = lambda p: model.total(p, batch, model.divided_block) / tokens  # noqa: E731
        gradient = lax.psum(jax.grad(mean)(params), "dp")
        divided = jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key in ("up", "down"), gradient
        )
        share = jax.tree.map(
            lambda g, d: squares(g) / (1 if d else 2), gradient, divided
        )
        size = lax.psum(sum(jax.tree.leaves(share)), "tp") ** 0.5
        scaled = clipped(gradient, verify.tap(size, "norm"))
        return descended(params, jax.tree.map(part, divided, gradient, scaled))

    specs = model.specs()
    run = spmd(local, mesh(dp=2, tp=2), (specs, P("dp")), specs)
    return lambda params, state, batch: (run(params, batch), state)


# --- what the judge needs ---


def update(params: Tree, gradient: Tree, state: Tree) -> Tree:
    """Gradient descent, clipped by the norm of all parameters."""
    size = verify.tap(norm(gradient), "norm")
    return descended(params, clipped(gradient, size)), state


def judge() -> Judge:
    """The judge of two steps: the model on one device."""
    batches = [model.tokens(seed=seed) for seed in (1, 2)]
    weights = [model.counts(batch) for batch in batches]
    start = model.params(), ()
    judge = verify.step_judge(model.losses, update, start, batches, weights=weights)
    return lambda trainer: judge({"trainer": trainer})
