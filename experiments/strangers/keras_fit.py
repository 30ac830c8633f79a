"""Keras on JAX: `Model.fit` with gradient accumulation in the optimizer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from experiments.strangers.problem import (
    HIDDEN,
    MICRO,
    OPTIONS,
    STEPS,
    VOCABULARY,
    WIDTH,
    Step,
)
from experiments.strangers.stranger import Use

# --- the trainer, as its documentation has it ---


class Readout(keras.layers.Layer):
    """Scores by tied weights, in a layer that propagates a mask."""

    supports_masking = True

    def call(self, hidden: Any, table: Any) -> Any:
        """Returns scores, `(sequences, LENGTH, VOCABULARY)`."""
        return keras.ops.matmul(hidden, keras.ops.transpose(table))


class NextToken(keras.Model):
    """The model; its embeddings are also the output weights."""

    def __init__(
        self, mask_zero: bool = False, readout: Any = None, auxiliary: float = 0.0
    ) -> None:
        """Makes layers without weights; `mask_zero` makes token 0 padding."""
        super().__init__()
        self.auxiliary = auxiliary
        self.embedding = keras.layers.ReversibleEmbedding(
            VOCABULARY, WIDTH, mask_zero=mask_zero
        )
        self.up = keras.layers.Dense(HIDDEN, activation="tanh")
        self.down = keras.layers.Dense(WIDTH, use_bias=False)
        self.readout = readout

    def call(self, inputs: Any) -> Any:
        """Returns scores, `(sequences, LENGTH, VOCABULARY)`."""
        hidden = self.down(self.up(self.embedding(inputs)))
        if self.readout is None:
            scores = self.embedding(hidden, reverse=True)
        else:
            scores = self.readout(hidden, self.embedding.embeddings)
        if self.auxiliary:
            sizes = keras.ops.logsumexp(scores, -1) ** 2
            self.add_loss(self.auxiliary * keras.ops.mean(sizes))
        return scores


def weighted(step: Step, reduction: str, accumulate: int | None = STEPS) -> Any:
    """The weights after `fit` with each token's weight in `sample_weight`.

    Args:
      step: The data.
      reduction: The reduction of the loss.
      accumulate: Micro-batches in a step; None for the whole step as one batch.
    """
    inputs, targets, weights = step.whole
    model = lambda: NextToken(auxiliary=step.auxiliary)  # noqa: E731
    return _fitted(model, step, inputs, targets, weights, reduction, accumulate)


def masked(step: Step, readout: type[keras.layers.Layer] | None) -> Any:
    """The weights after `fit` with padding marked by Keras's mask.

    Args:
      step: The data.
      readout: The layer that computes scores; None for the reversed embeddings.
    """
    inputs, targets, weights = step.whole
    padded = np.where(weights > 0, inputs, 0)
    last = lambda: None if readout is None else readout()  # noqa: E731
    model = lambda: NextToken(True, last(), step.auxiliary)  # noqa: E731
    reduction = "sum_over_batch_size"
    return _fitted(model, step, padded, targets, None, reduction, STEPS)


def _fitted(
    make: Callable[[], NextToken],
    step: Step,
    inputs: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray | None,
    reduction: str,
    accumulate: int | None,
) -> Any:
    keras.config.set_dtype_policy("mixed_bfloat16" if step.mixed else "float32")
    model = make()
    model(inputs[:1])  # makes the weights
    start(model, step)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy
    model.compile(
        optimizer=keras.optimizers.SGD(
            1.0, gradient_accumulation_steps=accumulate, global_clipnorm=step.clip
        ),
        loss=cross_entropy(from_logits=True, reduction=reduction),
    )
    model.fit(
        inputs,
        targets,
        sample_weight=weights,
        batch_size=MICRO if accumulate else len(inputs),
        shuffle=False,
        verbose=0,
    )
    return shown(model)


# --- what the judge needs ---

NAMES = {
    "embedding": "embedding/embeddings",
    "up": "up/kernel",
    "bias": "up/bias",
    "down": "down/kernel",
}


def start(model: NextToken, step: Step) -> None:
    """Sets the model's parameters to those of the trial."""
    own = step.params
    model.embedding.set_weights([own["embedding"]])
    model.up.set_weights([own["up"], own["bias"]])
    model.down.set_weights([own["down"]])


def shown(model: NextToken) -> dict[str, np.ndarray]:
    """The weights after the step, by layer and name."""
    layers = {"embedding": model.embedding, "up": model.up, "down": model.down}
    return {
        f"{name}/{weight.name}": np.asarray(weight)
        for name, layer in layers.items()
        for weight in layer.weights
    }


# --- what is on trial ---

OPTIMIZERS = "https://keras.io/api/optimizers/"
LOSSES = "https://keras.io/api/losses/"

POSITIONS = Use(
    "keras Model.fit",
    "accumulating, weights as sample_weight",
    "the mean over all positions of the step, padding included",
    lambda step: weighted(step, "sum_over_batch_size"),
    "parameters",
    "The loss is divided by the sample size, and gradients are averaged; nothing on a "
    "smaller batch.",
    OPTIMIZERS,
    names=NAMES,
    divisor="positions",
    offers=tuple(OPTIONS),
)

MASKED = replace(
    POSITIONS,
    way="accumulating, padding as Keras's mask",
    claim="the mean over the counted tokens of the step",
    show=lambda step: masked(step, Readout),
    documented="Masked positions are left out of the loss; not that each micro-batch "
    "is divided by its own count.",
    link="https://keras.io/guides/understanding_masking_and_padding/",
    divisor="tokens",
    lacks={"weighted": "a mask has no weights"},
)

USES = (
    POSITIONS,
    replace(
        POSITIONS,
        way="accumulating, mean_with_sample_weight",
        claim="the mean over the counted tokens of the step",
        show=lambda step: weighted(step, "mean_with_sample_weight"),
        documented="The reduction divides by the sum of the weights; not that it does "
        "so within each micro-batch, before the average.",
        link=LOSSES,
        divisor="tokens",
    ),
    MASKED,
    replace(
        MASKED,
        way="accumulating, mask through ReversibleEmbedding",
        show=lambda step: masked(step, None),
        documented="Layers after one with `mask_zero` support masking, or raise. The "
        "reverse direction drops the mask (pull request 21961 of "
        "keras-team/keras, against an error) and raises nothing.",
        link="https://keras.io/api/layers/core_layers/reversible_embedding/",
    ),
)
