"""Real images without a download: scikit-learn's digits and a small net for them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class Net(nnx.Module):
    """Two convolutions and a readout, for images of 8 x 8."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Random weights."""
        self.edges = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.parts = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.readout = nnx.Linear(4 * 4 * 16, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Scores `(examples, 10)` of images `(examples, 8, 8, 1)`."""
        hidden = nnx.relu(self.parts(nnx.relu(self.edges(images))))
        return self.readout(hidden.reshape(len(images), -1))


class Task(NamedTuple):
    """The data, the model as pure functions, and the batches in their order."""

    params: Any
    losses: Callable[[Any, Any], jax.Array]
    accuracy: Callable[[Any], float]
    batches: Sequence[Any]


def digits(seed: int, steps: int, batch: int) -> Task:
    """scikit-learn's digits, four fifths of them to train with.

    Args:
      seed: Of the split, the order and the initial weights.
      steps: Number of batches.
      batch: Examples in each.
    """
    images, labels = load_digits(return_X_y=True)
    x = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    y = labels.astype(np.int32)
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(x))
    test, train = np.split(shuffled, [len(x) // 5])
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
        found = np.argmax(compiled(params, x[test]), axis=1)
        return float(np.mean(found == y[test]))

    chosen: list[int] = []
    while len(chosen) < steps * batch:
        chosen.extend(rng.permutation(train))
    rows = np.array(chosen[: steps * batch]).reshape(steps, batch)
    batches = [(x[row], y[row]) for row in rows]
    return Task(params, losses, accuracy, batches)
