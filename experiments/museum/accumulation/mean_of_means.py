"""Micro-batches' means are averaged, whatever their tokens.

Each micro-batch's loss was a mean over its own tokens, and their gradients were
averaged: tokens of a short micro-batch counted for more than those of a long one.
"""

from typing import Any

import jax

from experiments.museum import language_model as model
from experiments.museum.meshes import Trainer
from experiments.museum.trees import parts, summed

Tree = Any

THREAD = "https://github.com/ml-explore/mlx-lm/issues/1544"
CLAIM = "The gradient of the mean over the step's counted tokens."
EXPECTED = ("first difference:", "examples 0-1 count 1.7333 times")


def buggy(own: Tree, all_tokens: Tree, count: int) -> Tree:
    """The divisor of a micro-batch's sum of losses."""
    return count * own


def fixed(own: Tree, all_tokens: Tree, count: int) -> Tree:
    """The divisor of a micro-batch's sum of losses."""
    return all_tokens


def trainer(part: Trainer) -> Trainer:
    """Three micro-batches."""

    @jax.jit
    def step(params: Tree, batch: Tree) -> Tree:
        tokens, found = model.counts(batch).sum(), []
        for each in parts(batch, 3):
            divisor = part(model.counts(each).sum(), tokens, 3)
            mean = lambda p, b=each, n=divisor: model.total(p, b) / n  # noqa: E731
            found.append(jax.value_and_grad(mean)(params))
        return summed(found)

    return step


# --- what the judge needs ---


judge = model.judge
