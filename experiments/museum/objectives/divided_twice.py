"""A loss over the whole step's tokens is divided by the micro-batches again.

The policy loss was normalized by the tokens of all micro-batches of a step. The
trainer that it is built on divides each micro-batch's loss by their number, as it must
for means: the policy loss was too small by that number.
"""

from typing import Any

import jax

from experiments.museum.meshes import Judge, Trainer
from experiments.museum.objectives._policy import advantages_of, answers, policy_losses
from experiments.museum.trees import parts, summed
from jdist import verify

Tree = Any

THREAD = "https://github.com/modelscope/ms-swift/pull/10116"
CLAIM = "The gradient of the mean over all tokens of the step's answers."
EXPECTED = ("first difference: gradient", "0.166667 times")
MICRO_BATCHES = 6


def buggy(loss: Tree) -> Tree:
    """A micro-batch's loss, before the trainer divides by the micro-batches."""
    return loss


def fixed(loss: Tree) -> Tree:
    """A micro-batch's loss, before the trainer divides by the micro-batches."""
    return loss * MICRO_BATCHES


def trainer(part: Trainer) -> Trainer:
    """Six micro-batches of two answers."""

    @jax.jit
    def step(params: Tree, batch: Tree) -> Tree:
        count = batch["mask"].sum()

        def mean(p: Tree, each: Tree) -> Tree:
            own = policy_losses(p, each, each["advantage"]).sum() / count
            return part(own) / MICRO_BATCHES, own

        own = jax.grad(mean, has_aux=True)
        found = [own(params, each) for each in parts(batch, MICRO_BATCHES)]
        gradient, loss = summed(found)
        return loss, gradient

    return step


# --- what the judge needs ---


def losses(params: Tree, batch: Tree) -> Tree:
    """The mean over each answer's tokens."""
    own = policy_losses(params, batch, batch["advantage"])
    return own.sum(-1) / batch["mask"].sum(-1)


def judge() -> Judge:
    """The judge: all answers at once."""
    params, batch = answers()
    groups = advantages_of(batch["reward"].reshape(4, 3)).reshape(-1)
    weights = batch["mask"].sum(-1)
    return verify.trace_judge(
        losses, params, {**batch, "advantage": groups}, weights=weights
    )
