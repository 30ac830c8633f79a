"""The load loss counts once for each micro-batch.

Token losses were divided by the tokens of the whole step, the load losses of the
micro-batches by nothing: with accumulation they were too large by the number of
micro-batches.
"""

from typing import Any

import jax

from experiments.museum import mixture as model
from experiments.museum.language_model import counts, tokens
from experiments.museum.meshes import Judge, Trainer
from experiments.museum.trees import parts, summed
from jdist import verify

Tree = Any

THREAD = "https://github.com/NVIDIA-NeMo/Automodel/issues/3359"
CLAIM = (
    "The gradient of the mean loss and a tenth of the micro-batches' mean load loss."
)
EXPECTED = ("backward, load loss", " 3 times")
PARTS = 3


def buggy(load: Tree) -> Tree:
    """The load loss of a micro-batch in the step's loss."""
    return load


def fixed(load: Tree) -> Tree:
    """The load loss of a micro-batch in the step's loss."""
    return load / PARTS


def trainer(part: Trainer) -> Trainer:
    """Three micro-batches."""

    @jax.jit
    def step(params: Tree, batch: Tree) -> Tree:
        count = counts(batch).sum()

        def own(p: Tree, each: Tree) -> Tree:
            nll, load = model.token_losses(p, each)
            return (nll * each["mask"]).sum() / count + 0.1 * part(load)

        mean = jax.value_and_grad(own)
        return summed([mean(params, each) for each in parts(batch, PARTS)])

    return step


# --- what the judge needs ---


def loss(params: Tree, batch: Tree) -> Tree:
    """The mean over the counted tokens, and a tenth of the mean of the load losses."""
    nll, loads = verify.in_parts(model.token_losses, PARTS)(params, batch)
    return (nll * batch["mask"]).sum() / counts(batch).sum() + 0.1 * loads.mean()


def judge() -> Judge:
    """The judge: the model on one device."""
    return verify.trace_judge(loss, model.params(), tokens())
