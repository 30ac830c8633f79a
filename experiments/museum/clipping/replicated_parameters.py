"""Parameters that all devices hold enter the norm once for each device.

The gradient's norm was summed over the tensor-parallel devices, whether a parameter is
divided over them or the same on all: the norm was too large, and the step too small.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import language_model as model
from experiments.museum.meshes import Judge, Trainer, mesh, spmd
from experiments.museum.trees import clipped, descended, norm, squares
from jdist import verify

Tree = Any

THREAD = "https://github.com/NVIDIA-NeMo/RL/issues/3788"
CLAIM = "Gradient descent, clipped by the norm of all parameters."
EXPECTED = ("norm over tp",)


def buggy(divided: bool) -> float:
    """The share of a leaf's squares that this device adds to the norm."""
    return 1.0


def fixed(divided: bool) -> float:
    """The share of a leaf's squares that this device adds to the norm."""
    return 1.0 if divided else 1 / lax.axis_size("tp")


def trainer(part: Trainer) -> Trainer:
    """Two replicas whose blocks are divided over two devices."""

    def local(params: Tree, batch: Tree) -> Tree:
        tokens = lax.psum(model.counts(batch).sum(), "dp")
        mean = lambda p: model.total(p, batch, model.divided_block) / tokens  # noqa: E731
        gradient = lax.psum(jax.grad(mean)(params), "dp")
        shares = jax.tree_util.tree_map_with_path(
            lambda path, g: squares(g) * part(path[-1].key in ("up", "down")), gradient
        )
        size = lax.psum(sum(jax.tree.leaves(shares)), "tp") ** 0.5
        return descended(params, clipped(gradient, verify.tap(size, "norm over tp")))

    specs = model.specs()
    run = spmd(local, mesh(dp=2, tp=2), (specs, P("dp")), specs)
    return lambda params, state, batch: (run(params, batch), state)


# --- what the judge needs ---


def update(params: Tree, gradient: Tree, state: Tree) -> Tree:
    """Gradient descent, clipped by the norm of all parameters."""
    size = verify.tap(norm(gradient), "norm over tp")
    return descended(params, clipped(gradient, size)), state


def judge() -> Judge:
    """The judge of two steps: the model on one device."""
    batches = [model.tokens(seed=seed) for seed in (1, 2)]
    weights = [model.counts(batch) for batch in batches]
    start = model.params(), ()
    judge = verify.step_judge(model.losses, update, start, batches, weights=weights)
    return lambda trainer: judge({"trainer": trainer})
