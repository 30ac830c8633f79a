"""Rotary positions are sliced by another group's rank.

Under context parallelism each device rotates its part of the sequence. The group was
not passed on, so the part was that of the rank in the default group: with more than one
replica, devices took the positions of other parts.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import attention_model as model
from experiments.museum.meshes import Trainer, mesh, spmd, whole
from jdist import verify

Tree = Any

THREAD = "https://github.com/NVIDIA/Megatron-LM/issues/1612"
CLAIM = "The gradient of the mean over the counted tokens, with sequences in parts."
EXPECTED = ("first difference: forward, q", "examples")
BOTH = ("dp", "cp")


def buggy() -> Tree:
    """Which part of the positions is this device's."""
    return lax.axis_index("dp")


def fixed() -> Tree:
    """Which part of the positions is this device's."""
    return lax.axis_index("cp")


def trainer(part: Trainer) -> Trainer:
    """Two replicas of two parts of each sequence."""

    def local(params: Tree, batch: Tree) -> Tree:
        count = lax.psum(batch["mask"].sum(), BOTH)
        length = batch["x"].shape[1]
        start = lax.axis_index("cp") * length
        positions = part() * length + jnp.arange(length)

        def attend(q: Tree, k: Tree, v: Tree) -> Tree:
            return model.causal(q, whole(k, "cp", 1), whole(v, "cp", 1), start)

        def mean(p: Tree) -> Tree:
            how = {"attend": attend, "positions": positions, "show": SHOW}
            return (model.token_losses(p, batch, **how) * batch["mask"]).sum() / count

        loss, gradient = jax.value_and_grad(mean)(params)
        return lax.psum(loss, BOTH), lax.psum(gradient, BOTH)

    return spmd(local, mesh(dp=2, cp=2), (P(), P(*BOTH)), (P(), P()))


# --- what the judge needs ---

SHOW = partial(verify.tap, cp=1)

judge = model.judge
