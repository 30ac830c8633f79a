"""The models on which data parallelism is timed: stacks of layers, squared error."""

from typing import NamedTuple

import numpy as np

RATE = 0.01


class Model(NamedTuple):
    """A stack of linear layers with ReLU between them.

    Attributes:
      name: The name in tables.
      widths: The number of inputs, then the number of outputs of each layer.
      batch: Examples on each of the two replicas.
      calls: Steps per round, such that a round takes tens of milliseconds at least.
      goal: The largest allowed ratio of a step's time to that of torch as shipped.
    """

    name: str
    widths: tuple[int, ...]
    batch: int
    calls: int
    goal: float

    def weights(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each layer its matrix, `(inputs, outputs)`, and its bias."""
        rng = np.random.default_rng(0)
        pairs = zip(self.widths, self.widths[1:], strict=False)
        return [
            (
                rng.normal(size=(i, o), scale=i**-0.5).astype(np.float32),
                rng.normal(size=o, scale=0.1).astype(np.float32),
            )
            for i, o in pairs
        ]

    def examples(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """One replica's inputs, `(batch, inputs)`, and targets, `(batch, outputs)`."""
        rng = np.random.default_rng(1 + rank)
        x, y = (
            rng.normal(size=(self.batch, width)).astype(np.float32)
            for width in (self.widths[0], self.widths[-1])
        )
        return x, y


MODELS = (
    Model("512-1024-10, batch 64", (512, 1024, 10), 64, calls=10, goal=0.65),
    Model("4 x 2048, batch 128", (2048,) * 5, 128, calls=1, goal=0.85),
    Model("8 x 1024, batch 256", (1024,) * 9, 256, calls=1, goal=0.92),
)
