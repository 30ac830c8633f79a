"""A small residual network, on scikit-learn's digits.

A convolution of 2 x 2 with stride 2 makes 4 x 4 vectors of an image, each half adds a
convolution of 3 x 3 to them, and all together are classified. In the place of batch
normalisation is one without statistics: those of a stage would be a state beside its
weights, which no rule for late gradients speaks of.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments._asynchronous.compiled import MicroBatches
from experiments._asynchronous.task import Piece, normed
from experiments._digits import data

CLASSES = 10


@lru_cache(maxsize=1)
def split() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images and labels to train with, and those that are held out."""
    found = data(0, 1, 1438)
    return found.batches[0], found.test


class Images(NamedTuple):
    """A `Task`: the digit of an image.

    Attributes:
      width: Channels.
      halves: Convolutions of 3 x 3; a multiple of each number of stages.
      batch: Images of an update.
      steps: Updates.
    """

    width: int = 8
    halves: int = 16
    batch: int = 16
    steps: int = 200

    @property
    def input(self) -> str:
        """Images."""
        return "images"

    @property
    def text(self) -> str:
        """The sizes and the data."""
        return (
            f"a residual network of {self.halves} convolutions of 3 x 3 and "
            f"{self.width} channels, without batch normalisation; {self.steps} updates "
            f"of {self.batch} of scikit-learn's digits; a fifth of them is held out; "
            "losses in nats"
        )

    def training(self, seed: int) -> MicroBatches:
        """Images of four fifths, in an order for each seed."""
        images, labels = split()[0]
        rng, shape = np.random.default_rng((seed, 1)), (self.steps, self.batch)
        chosen = rng.integers(len(images), size=shape)
        shares = np.full(shape, 1 / self.batch, np.float32)
        totals = np.full(self.steps, self.batch, np.float32)
        batch = {"images": images[chosen], "labels": labels[chosen]}
        return MicroBatches(batch, shares, totals)

    def held_out(self) -> dict[str, np.ndarray]:
        """The other fifth."""
        images, labels = split()[1]
        return {"images": images, "labels": labels}

    def losses(self, outputs: jax.Array, batch: Mapping[str, Any]) -> jax.Array:
        """The cross-entropy of each image."""
        labels = batch["labels"]
        return optax.softmax_cross_entropy_with_integer_labels(outputs, labels)

    def pieces(self) -> list[Piece]:
        """Convolutions between a coarser image and the classes."""
        return [coarser, *[convolve] * self.halves, classify]

    def parameters(self, seed: int) -> list[dict[str, np.ndarray]]:
        """Normal numbers that keep the size of values."""
        rng, width = np.random.default_rng((seed, 2)), self.width

        def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
            size = scale / np.sqrt(rows)
            return (size * rng.normal(size=(rows, columns))).astype(np.float32)

        # So that the sum over all halves keeps the size of its terms.
        late = self.halves**-0.5
        first = {"patch": matrix(4, width)}
        kernels = [matrix(9 * width, width, late) for _ in range(self.halves)]
        middle = [{"kernel": kernel} for kernel in kernels]
        return [first, *middle, {"head": matrix(16 * width, CLASSES)}]


def coarser(own: Mapping[str, jax.Array], images: jax.Array) -> jax.Array:
    """Maps `(images, 8, 8, 1)` to `(images, 4, 4, width)`."""
    parts = images.reshape(len(images), 4, 2, 4, 2).transpose(0, 1, 3, 2, 4)
    return parts.reshape(len(images), 4, 4, 4) @ own["patch"]


def convolve(own: Mapping[str, jax.Array], h: jax.Array) -> jax.Array:
    """A convolution of 3 x 3 after a ReLU, added to `h`."""
    # As one product of matrices, which may be mapped over seeds: a convolution that is
    # mapped over its kernels is one of groups, and slow on CPU.
    padded = jnp.pad(jax.nn.relu(normed(h)), ((0, 0), (1, 1), (1, 1), (0, 0)))
    near = [padded[:, a : a + 4, b : b + 4] for a in range(3) for b in range(3)]
    return h + jnp.concatenate(near, axis=-1) @ own["kernel"]


def classify(own: Mapping[str, jax.Array], h: jax.Array) -> jax.Array:
    """The logits of the digits."""
    return normed(h).reshape(len(h), -1) @ own["head"]
