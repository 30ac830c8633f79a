"""Tied embeddings on two devices keep a gradient each.

A pipeline whose first and last stage share an embedding duplicated it on both devices
and never added the two gradients before the optimizer's step.
"""

from functools import partial
from typing import Any

import jax

from experiments.museum import language_model as model
from experiments.museum.meshes import Trainer
from experiments.museum.pipelines._stages import merged, passes

Tree = Any

THREAD = "https://github.com/uw-syfi/piper/issues/13"
CLAIM = "The gradient of one embedding that both ends use."
EXPECTED = ("embed: the uses that it counts", "gather once", "dot_general 0 times")


def buggy(of_first: Tree, of_last: Tree) -> Tree:
    """The gradient of the embedding on the first device."""
    return of_first


def fixed(of_first: Tree, of_last: Tree) -> Tree:
    """The gradient of the embedding on the first device."""
    return of_first + jax.device_put(of_last, of_first.sharding)


def trainer(part: Trainer) -> Trainer:
    """Two stages on two devices, three micro-batches."""

    def step(params: Tree, batch: Tree) -> Tree:
        loss, gradient0, gradient1 = passes(params, batch, lambda tokens: 1.0 / tokens)
        embed = part(gradient0["embed"], gradient1["embed"])
        return loss, {**merged(gradient0, gradient1), "embed": embed}

    return step


# --- what the judge needs ---


judge = partial(model.judge, tied=True)
