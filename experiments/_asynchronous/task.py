"""What a study trains: data, and a network of pieces that any number of stages share.

A network has two ends and between them halves of blocks, which are of one size. Stages
are runs of halves of equal length, with the ends at both ends.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from experiments._asynchronous.compiled import MicroBatches
from jdist import pipeline

PyTree = Any
Piece = Callable[[Any, jax.Array], jax.Array]
"""`piece(weights, value) -> value`."""


class Task(Hashable, Protocol):
    """Data and a network; its `repr` has all that its results depend on."""

    @property
    def input(self) -> str:
        """The entry of a batch that the first piece takes."""
        ...

    @property
    def halves(self) -> int:
        """The pieces between both ends."""
        ...

    @property
    def steps(self) -> int:
        """The updates."""
        ...

    @property
    def text(self) -> str:
        """The network and its training, as a sentence."""
        ...

    def pieces(self) -> list[Piece]:
        """The functions of the network, in order."""
        ...

    def parameters(self, seed: int) -> list[dict[str, np.ndarray]]:
        """Random weights of each piece."""
        ...

    def training(self, seed: int) -> MicroBatches:
        """A seed's micro-batches, one for each update."""
        ...

    def held_out(self) -> dict[str, np.ndarray]:
        """Other data, the same for all seeds."""
        ...

    def losses(self, outputs: jax.Array, batch: Mapping[str, Any]) -> jax.Array:
        """The loss of each example."""
        ...


def normed(h: jax.Array) -> jax.Array:
    """Vectors of mean square 1, over the last axis; without weights and statistics."""
    return h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6)


class Through:
    """Several pieces, one after the other, as the function of a stage."""

    def __init__(self, parts: Sequence[Piece]) -> None:
        self._parts = tuple(parts)

    def __call__(self, own: Sequence[PyTree], value: jax.Array) -> jax.Array:
        """Applies each piece with its weights."""
        for part, weights in zip(self._parts, own, strict=True):
            value = part(weights, value)
        return value


def cut(whole: Sequence[Any], stages: int) -> list[list[Any]]:
    """The pieces of each stage, or their weights.

    Raises:
      ValueError: The halves cannot be divided among the stages.
    """
    halves = len(whole) - 2
    if halves % stages:
        raise ValueError(f"{halves} halves must be a multiple of {stages} stages")
    run = halves // stages
    found = [list(whole[1 + j * run : 1 + (j + 1) * run]) for j in range(stages)]
    found[0].insert(0, whole[0])
    found[-1].append(whole[-1])
    return found


def staged(task: Task, stages: int) -> list[pipeline.Stage]:
    """The network as stages."""
    names = [task.input, *(f"h{j}" for j in range(1, stages)), "outputs"]
    return [
        pipeline.Stage(Through(own), (names[j],), (names[j + 1],))
        for j, own in enumerate(cut(task.pieces(), stages))
    ]
