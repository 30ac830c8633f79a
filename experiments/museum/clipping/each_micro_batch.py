"""Accumulated gradients are clipped after each micro-batch.

The sum so far was clipped after each backward pass and not once before the step. What
the first micro-batches add is scaled down again and again.
"""

from typing import Any

import jax
import jax.numpy as jnp

from experiments.museum import language_model as model
from experiments.museum.meshes import Judge, Trainer
from experiments.museum.trees import clipped, descended, norm, parts
from jdist import verify

Tree = Any

THREAD = "https://github.com/huggingface/transformers/issues/1563"
CLAIM = "Gradient descent, clipped by the norm of the accumulated gradient."
EXPECTED = ("wrong accumulated/",)


def buggy(total: Tree, last: bool) -> Tree:
    """The accumulated gradient after a micro-batch."""
    return clipped(total, norm(total))


def fixed(total: Tree, last: bool) -> Tree:
    """The accumulated gradient after a micro-batch."""
    return clipped(total, norm(total)) if last else total


def trainer(part: Trainer) -> Trainer:
    """Three micro-batches."""

    @jax.jit
    def run(params: Tree, batch: Tree) -> Tree:
        tokens = model.counts(batch).sum()
        own = jax.grad(lambda p, each: model.total(p, each) / tokens)
        total = jax.tree.map(jnp.zeros_like, params)
        for number, each in enumerate(parts(batch, 3)):
            total = jax.tree.map(jnp.add, total, own(params, each))
            if last := number == 2:
                total = verify.tap(total, "accumulated")
            total = part(total, last)
        return descended(params, total)

    return lambda params, state, batch: (run(params, batch), state)


# --- what the judge needs ---


def update(params: Tree, gradient: Tree, state: Tree) -> Tree:
    """Gradient descent, clipped by the norm of all parameters."""
    gradient = verify.tap(gradient, "accumulated")
    return descended(params, clipped(gradient, norm(gradient))), state


def judge() -> Judge:
    """The judge of two steps: the model on one device."""
    batches = [model.tokens(seed=seed) for seed in (1, 2)]
    weights = [model.counts(batch) for batch in batches]
    start = model.params(), ()
    judge = verify.step_judge(model.losses, update, start, batches, weights=weights)
    return lambda trainer: judge({"trainer": trainer})
