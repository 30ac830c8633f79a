"""Gradients are added up in bfloat16.

The optimizer of bfloat16 training kept its running sum of gradients in bfloat16 as
well. What a micro-batch adds is soon below the last place of the sum and gets lost.
"""

from typing import Any

import jax
import jax.numpy as jnp

from experiments.museum import language_model as model
from experiments.museum.meshes import Judge, Trainer
from experiments.museum.trees import parts
from jdist import verify

Tree = Any

THREAD = "https://github.com/deepspeedai/DeepSpeed/issues/1800"
CLAIM = "The gradient in float32, added up in float32."
EXPECTED = ("first difference: gradient", "bfloat16")
COUNTED = (2, 3, 6, 5, 4, 6, 6, 5, 3, 6, 5, 4, 2, 6)


def buggy(total: Tree, gradient: Tree) -> Tree:
    """The running sum after a micro-batch."""
    narrow = lambda x: x.astype(jnp.bfloat16)  # noqa: E731
    return jax.tree.map(lambda a, b: narrow(a) + narrow(b), total, gradient)


def fixed(total: Tree, gradient: Tree) -> Tree:
    """The running sum after a micro-batch."""
    return jax.tree.map(jnp.add, total, gradient)


def trainer(part: Trainer) -> Trainer:
    """Seven micro-batches in a loop."""

    def step(params: Tree, batch: Tree) -> Tree:
        tokens = model.counts(batch).sum()
        mean = jax.jit(jax.value_and_grad(lambda p, b: model.total(p, b) / tokens))
        loss, total = 0.0, jax.tree.map(jnp.zeros_like, params)
        for each in parts(batch, 7):
            one, gradient = mean(params, each)
            loss, total = loss + one, part(total, gradient)
        return loss, jax.tree.map(lambda x: x.astype(jnp.float32), total)

    return step


# --- what the judge needs ---


def judge() -> Judge:
    """The judge: the model on one device."""
    batch = model.tokens(COUNTED)
    return verify.trace_judge(
        model.losses, model.params(), batch, weights=model.counts(batch)
    )
