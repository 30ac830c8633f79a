"""Rewards are grouped in another order than the answers.

Answers to one prompt were generated side by side for several prompts at once: the
first answer to each, then the second. Their rewards were reshaped as if all answers to
a prompt stood together, so that means and deviations were those of mixed groups.
"""

from typing import Any

import jax

from experiments.museum.meshes import Judge, Trainer
from experiments.museum.objectives._policy import (
    ANSWERS,
    PROMPTS,
    advantages_of,
    answers,
    policy_losses,
)
from jdist import verify

Tree = Any

THREAD = "https://github.com/StarsfieldAI/R1-V/issues/67"
CLAIM = "Each answer's advantage is its reward's among the answers to its prompt."
EXPECTED = ("first difference: forward, advantage", "examples 0-11")


def buggy(rewards: Tree) -> Tree:
    """The advantages of answers, of which each prompt's n-th stand together."""
    return advantages_of(rewards.reshape(PROMPTS, ANSWERS)).reshape(-1)


def fixed(rewards: Tree) -> Tree:
    """The advantages of answers, of which each prompt's n-th stand together."""
    return advantages_of(rewards.reshape(ANSWERS, PROMPTS).T).T.reshape(-1)


def trainer(part: Trainer) -> Trainer:
    """One device."""

    @jax.jit
    def step(params: Tree, batch: Tree) -> Tree:
        def mean(p: Tree) -> Tree:
            own = policy_losses(p, batch, part(batch["reward"]))
            return own.sum() / batch["mask"].sum()

        return jax.value_and_grad(mean)(params)

    return step


# --- what the judge needs ---


def losses(params: Tree, batch: Tree) -> Tree:
    """The mean over each answer's tokens."""
    own = policy_losses(params, batch, batch["advantage"])
    return own.sum(-1) / batch["mask"].sum(-1)


def judge() -> Judge:
    """The judge: advantages that are computed group by group, outside the trainer."""
    params, batch = answers()
    groups = [batch["reward"][number::PROMPTS] for number in range(PROMPTS)]
    found = [advantages_of(group[None])[0] for group in groups]
    whole = {**batch, "advantage": jax.numpy.stack(found, 1).reshape(-1)}
    weights = batch["mask"].sum(-1)
    return verify.trace_judge(losses, params, whole, weights=weights)
