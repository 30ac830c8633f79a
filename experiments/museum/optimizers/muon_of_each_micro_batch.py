"""Muon runs once for each micro-batch.

With fully sharded parameters the optimizer's momentum and orthogonalization ran in the
reduction of gradients, that is, for each micro-batch: the momentum advanced several
times in a step, and parts were made orthogonal before they were added.
"""

from typing import Any

import jax
import jax.numpy as jnp

from experiments.museum import language_model as model
from experiments.museum.meshes import Judge, Trainer
from experiments.museum.optimizers._muon import direction, momentum, moved, muon
from experiments.museum.trees import parts, scaled, summed
from jdist import verify

Tree = Any

THREAD = "https://github.com/deepspeedai/DeepSpeed/issues/8443"
CLAIM = "The step of Muon with the accumulated gradient."
EXPECTED = ("wrong optimizer update", "momentum", "micro-batch")


def buggy(params: Tree, gradients: list[Tree], state: Tree) -> Tree:
    """The new parameters and momentum, of the micro-batches' gradients."""
    moves = []
    for gradient in gradients:
        state = momentum(state, gradient)
        moves.append(jax.tree.map(direction, state))
    return moved(params, scaled(summed(moves), 1 / len(moves))), state


def fixed(params: Tree, gradients: list[Tree], state: Tree) -> Tree:
    """The new parameters and momentum, of the micro-batches' gradients."""
    return muon(params, summed(gradients), state)


def trainer(part: Trainer) -> Trainer:
    """Three micro-batches."""

    @jax.jit
    def step(params: Tree, state: Tree, batch: Tree) -> Tree:
        tokens = model.counts(batch).sum()
        own = jax.grad(lambda p, each: model.total(p, each) / tokens)
        return part(params, [own(params, each) for each in parts(batch, 3)], state)

    return step


# --- what the judge needs ---


def judge() -> Judge:
    """The judge of two steps: the model on one device."""
    params, batches = model.params(), [model.tokens(seed=seed) for seed in (1, 2)]
    weights = [model.counts(batch) for batch in batches]
    start = params, jax.tree.map(jnp.zeros_like, params)
    judge = verify.step_judge(model.losses, muon, start, batches, weights=weights)
    return lambda trainer: judge({"trainer": trainer})
