"""Stages that are made anew between micro-batches forget their gradients.

Whenever the sequence length changed, the pipeline's stages were initialized again, and
that set all gradients to None. With gradient accumulation this happened between
micro-batches: the step used the last one's gradient. The loss, summed elsewhere, was
right.
"""

from typing import Any

import jax

from experiments.museum import language_model as model
from experiments.museum.meshes import Judge, Trainer
from experiments.museum.trees import parts, summed
from jdist import verify

Tree = Any

THREAD = "https://github.com/NVIDIA-NeMo/Automodel/pull/3530"
CLAIM = "The gradient of the mean over the counted tokens of all micro-batches."
EXPECTED = ("first difference: gradient", "examples 0-3", "count 0 times")


def buggy(accumulated: list[Tree], length: int, before: int) -> list[Tree]:
    """The accumulated gradients when a micro-batch of another length comes."""
    return accumulated if length == before else []


def fixed(accumulated: list[Tree], length: int, before: int) -> list[Tree]:
    """The accumulated gradients when a micro-batch of another length comes."""
    return accumulated


def trainer(part: Trainer) -> Trainer:
    """Three micro-batches, each cut to its longest sequence."""

    def step(params: Tree, batch: Tree) -> Tree:
        tokens, loss, before = model.counts(batch).sum(), 0.0, 0
        accumulated: list[Tree] = []
        for each in parts(batch, 3):
            length = int(model.counts(each).max())
            accumulated = part(accumulated, length, before)
            mean = jax.value_and_grad(lambda p, b=each: model.total(p, b) / tokens)
            one, gradient = mean(params)
            loss, before = loss + one, length
            accumulated = [*accumulated, gradient]
        return loss, summed(accumulated)

    return step


# --- what the judge needs ---


def judge() -> Judge:
    """The judge: the model on one device."""
    batch = model.tokens((3, 1, 6, 5, 4, 2))
    return verify.trace_judge(
        model.losses, model.params(), batch, weights=model.counts(batch)
    )
