"""Real images without a download: scikit-learn's digits and a small net for them."""

from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx


class Net(nnx.Module):
    """Two convolutions and a readout, for images of 8 x 8."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Initializes random weights."""
        self.edges = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.parts = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.readout = nnx.Linear(4 * 4 * 16, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images, `(examples, 8, 8, 1)`, to scores, `(examples, 10)`."""
        hidden = nnx.relu(self.parts(nnx.relu(self.edges(images))))
        return self.readout(hidden.reshape(len(images), -1))


class Task(NamedTuple):
    """The data, the model as pure functions, and the batches in order."""

    params: Any
    losses: Callable[[Any, Any], jax.Array]
    accuracy: Callable[[Any], float]
    batches: Sequence[Any]


class Data(NamedTuple):
    """Images `(examples, 8, 8, 1)` in [0, 1] with their labels."""

    batches: Sequence[Any]
    """Training batches in order."""

    test: Any
    """The test images and labels."""


def data(seed: int, steps: int, batch: int) -> Data:
    """scikit-learn's digits, four fifths of them for training.

    Args:
      seed: Seed of the split and of the order.
      steps: The number of batches.
      batch: Examples in a batch.
    """
    # `sklearn.datasets.load_digits` reads the same file, but its import takes a second.
    file = metadata.distribution("scikit-learn").locate_file(
        "sklearn/datasets/data/digits.csv.gz"
    )
    table = np.loadtxt(str(file), delimiter=",")
    images, labels = table[:, :-1], table[:, -1]
    x = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    y = labels.astype(np.int32)
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(x))
    test, train = np.split(shuffled, [len(x) // 5])
    chosen: list[int] = []
    while len(chosen) < steps * batch:
        chosen.extend(rng.permutation(train))
    rows = np.array(chosen[: steps * batch]).reshape(steps, batch)
    return Data([(x[row], y[row]) for row in rows], (x[test], y[test]))


def digits(seed: int, steps: int, batch: int) -> Task:
    """The digits, and a convolutional net for them.

    Args:
      seed: Seed of the data's split and order, and of the initial weights.
      steps: The number of batches.
      batch: Examples in a batch.
    """
    batches, (test_images, test_labels) = data(seed, steps, batch)
    structure = nnx.graphdef(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    # rbg compiles several times faster than the default generator.
    key = jax.random.key(seed, impl="rbg")
    params = jax.jit(lambda key: nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(key)))))(key)

    def scores(params: Any, images: jax.Array) -> jax.Array:
        return nnx.merge(structure, nnx.State(params))(images)

    def losses(params: Any, examples: Any) -> jax.Array:
        images, labels = examples
        given = scores(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(given, labels)

    compiled = jax.jit(scores)

    def accuracy(params: Any) -> float:
        # By NumPy: JAX would compile each of these operations.
        found = np.asarray(compiled(params, test_images)).argmax(axis=1)
        return float(np.mean(found == test_labels))

    return Task(params, losses, accuracy, batches)
