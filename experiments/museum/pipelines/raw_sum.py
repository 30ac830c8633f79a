"""The pipeline differentiates the sum of the token losses.

The loss of a pipeline was divided by the number of valid tokens after the schedule had
run, and so only in the log: backward passes began from the raw sum. Without a pipeline
the same trainer divided before.
"""

from typing import Any

from experiments.museum import language_model as model
from experiments.museum.meshes import Trainer
from experiments.museum.pipelines._stages import merged, passes

Tree = Any

THREAD = "https://github.com/pytorch/torchtitan/issues/2972"
CLAIM = "The gradient of the mean over the step's counted tokens."
EXPECTED = ("first difference: backward, token loss", " 26 times")


def buggy(tokens: Tree) -> Tree:
    """The cotangent of each micro-batch's sum of losses."""
    return 1.0


def fixed(tokens: Tree) -> Tree:
    """The cotangent of each micro-batch's sum of losses."""
    return 1.0 / tokens


def trainer(part: Trainer) -> Trainer:
    """Two stages on two devices, three micro-batches."""

    def step(params: Tree, batch: Tree) -> Tree:
        loss, gradient0, gradient1 = passes(params, batch, part)
        return loss, merged(gradient0, gradient1)

    return step


# --- what the judge needs ---


judge = model.judge
