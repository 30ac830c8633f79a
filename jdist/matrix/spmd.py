"""Rows of the equivalence matrix for pipelines in one program.

A loss that nobody has cut into equal stages is cut here by its parameters: every stage
has all of them and a flag for each that is its own. The value that passes through the
stages is the parameters found so far, to which each stage adds its own; a micro-batch
has a copy per example, of which the loss reads the first.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdist._errors import Unavailable
from jdist._tree import examples_in, merge, split_inexact
from jdist.pipeline.pipeline import Pipeline
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.stages.stage import Stage


def one_program(
    schedule: Schedule, loss_fn: Callable[..., jax.Array], reduction: str
) -> Callable[..., Any]:
    """A candidate for the judge, under a schedule.

    Raises:
      Unavailable: There are fewer devices than workers.
    """
    if schedule.workers > jax.device_count():
        what = f"{schedule.workers} devices, of which {jax.device_count()} here"
        raise Unavailable(what)
    mesh = Mesh(np.array(jax.devices()[: schedule.workers]), ("stage",))
    count = schedule.stages
    stages = [Stage(_add, (f"h{j}",), (f"h{j + 1}",)) for j in range(count)]

    def candidate(params: Any, batch: Any, weights: Any) -> Any:
        floating, fixed = split_inexact(params)
        leaves, structure = jax.tree.flatten(floating)
        examples = examples_in(batch, "one_program")
        nothing = [np.zeros((examples, *x.shape), x.dtype) for x in leaves]
        owned = [
            {"leaves": leaves, "mine": [np.bool_(k % count == j) for k in range(size)]}
            for j, size in enumerate([len(leaves)] * count)
        ]
        losses = partial(_losses, loss_fn, structure, fixed)
        pipe = Pipeline(stages, losses, schedule, mesh, reduction=reduction)
        entries = {"h0": nothing, "batch": batch}
        loss, grads = pipe.value_and_grad(pipe.place(owned), entries, weights)
        own = [grads[k % count]["leaves"][k] for k in range(len(leaves))]
        return loss, jax.tree.unflatten(structure, own)

    return candidate


def _add(own: Any, found: list[jax.Array]) -> list[jax.Array]:
    """Puts its own parameters where there are zeros."""
    return [
        value + jnp.where(mine, leaf, jnp.zeros_like(leaf))[None]
        for value, leaf, mine in zip(found, own["leaves"], own["mine"], strict=True)
    ]


def _losses(
    loss_fn: Callable[..., jax.Array],
    structure: Any,
    fixed: Any,
    found: list[jax.Array],
    entries: Any,
) -> jax.Array:
    floating = jax.tree.unflatten(structure, [copies[0] for copies in found])
    return loss_fn(merge(floating, fixed), entries["batch"])
