"""One model, one optimizer step in six settings, and the gradient it should have.

A next-token model of two layers with tied embeddings: small enough to be written in
every framework in a dozen lines, and rich enough to distinguish mistakes. All sizes
differ except those of the tied leaf's two uses, tokens are weighted, and micro-batches
differ.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import verify

VOCABULARY, WIDTH, HIDDEN, LENGTH = 13, 5, 7, 9
ROWS, MICRO, STEPS = 12, 4, 3
"""Sequences in a full step and in a micro-batch, and micro-batches in a step."""

SETTINGS = {
    "equal": "all sequences of one length, all micro-batches of one size",
    "padded": "sequences of different lengths",
    "masked": "some tokens inside the sequences do not count",
    "small last": "the last micro-batch has fewer sequences",
    "short end": "the data end before the last micro-batch of the step",
    "weighted": "each sequence has a weight of its own",
}

MEAN_OF_MEANS = "mean of the parts' means"
OVER_ALL = "sum of the parts' means, over a full step's parts"
NOTHING = "no gradient"

Params = Mapping[str, Any]
Tokens = jax.Array | np.ndarray


class Batch(NamedTuple):
    """Sequences and the weights of their tokens.

    Attributes:
      inputs: The tokens, `(sequences, LENGTH)` int32.
      targets: The token that follows each, `(sequences, LENGTH)` int32.
      weights: Weights of the targets, `(sequences, LENGTH)` float32, at least 0.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        """The unshifted sequences, `(sequences, LENGTH + 1)` int32."""
        return np.concatenate([self.inputs, self.targets[:, -1:]], axis=1)

    @property
    def labels(self) -> np.ndarray:
        """The targets, and -100 at weight 0, which torch's losses ignore."""
        return np.where(self.weights > 0, self.targets, -100).astype(np.int64)


@dataclass(frozen=True)
class Step:
    """The data of one optimizer step, and the model's parameters before it.

    Attributes:
      setting: One of `SETTINGS`.
      params: The parameters of the model.
      whole: All sequences.
      sizes: The number of sequences in each micro-batch, or on each replica.
      count: The number of micro-batches in a full step, or of replicas.
    """

    setting: str
    params: Params
    whole: Batch
    sizes: tuple[int, ...]
    count: int = STEPS

    @property
    def parts(self) -> Iterator[Batch]:
        """The micro-batches, or the shards, in order."""
        bounds = np.cumsum((0, *self.sizes))
        for low, high in pairwise(bounds):
            yield Batch(*(leaf[low:high] for leaf in self.whole))


def steps(seed: int) -> list[Step]:
    """One step for each setting, from the same parameters.

    Args:
      seed: Seed of parameters, tokens, lengths, masks and weights.
    """
    rng = np.random.default_rng(seed)
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "up": (WIDTH, HIDDEN),
        "bias": (HIDDEN,),
        "down": (HIDDEN, WIDTH),
    }
    params = {
        name: rng.normal(size=shape, scale=0.7).astype(np.float32)
        for name, shape in shapes.items()
    }
    # No token is 0, which stands for padding in some trainers.
    tokens = rng.integers(1, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
    sizes = {"small last": (MICRO, MICRO, MICRO // 2), "short end": (MICRO, MICRO)}
    found = []
    for setting in SETTINGS:
        own = sizes.get(setting, (MICRO,) * STEPS)
        weights = _weights(setting, rng)[: sum(own)]
        batch = Batch(tokens[: sum(own), :-1], tokens[: sum(own), 1:], weights)
        found.append(Step(setting, params, batch, own))
    return found


def _weights(setting: str, rng: np.random.Generator) -> np.ndarray:
    """The weight of each token, `(ROWS, LENGTH)`."""
    weights = np.ones((ROWS, LENGTH), np.float32)
    # Micro-batches must differ in their total weights; otherwise every rule is right.
    if setting == "padded":
        lengths = rng.permuted(np.arange(ROWS) % LENGTH + 1)
        lengths[:MICRO] = (LENGTH, LENGTH - 1, LENGTH, LENGTH - 2)
        weights = (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)
    elif setting == "masked":
        kept = rng.random((ROWS, LENGTH)) < np.linspace(0.3, 0.9, ROWS)[:, None]
        kept[:, 0] = True
        weights = kept.astype(np.float32)
    elif setting == "weighted":
        weights *= rng.uniform(0.2, 3.0, (ROWS, 1)).astype(np.float32)
    return weights


def logits(params: Params, inputs: Tokens) -> jax.Array:
    """Scores of the next token, `(sequences, LENGTH, VOCABULARY)`."""
    table = jnp.asarray(params["embedding"])
    hidden = jnp.tanh(table[inputs] @ params["up"] + params["bias"])
    return hidden @ params["down"] @ table.T


def token_losses(
    params: Params, inputs: Tokens, targets: Tokens, smoothing: Any = 0.0
) -> jax.Array:
    """The cross-entropy of each token, `(sequences, LENGTH)`.

    Args:
      params: The parameters of the model.
      inputs: The tokens, `(sequences, LENGTH)`.
      targets: The tokens that follow, `(sequences, LENGTH)`.
      smoothing: The share of the target that is spread over the vocabulary.
    """
    scores = jax.nn.log_softmax(logits(params, inputs))
    hit = jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
    return -(1 - smoothing) * hit - smoothing * scores.mean(-1)


@dataclass(frozen=True)
class Reference:
    """The gradient that a trainer claims, on one device from the whole step's data.

    Attributes:
      step: The data.
      divisor: The divisor of the losses' weighted sum: "tokens" for the sum of the
        weights, "positions" for the number of all tokens, those of weight 0 included.
      smoothing: The label smoothing.
    """

    step: Step
    divisor: str = "tokens"
    smoothing: float = 0.0

    @property
    def shares(self) -> np.ndarray:
        """The factor of each token's loss, `(sequences, LENGTH)` float32."""
        weights = self.step.whole.weights
        return (weights / self._divided_by(self.step.whole)).astype(np.float32)

    def _divided_by(self, part: Batch) -> float:
        by_tokens = self.divisor == "tokens"
        return float(part.weights.sum()) if by_tokens else part.weights.size

    @cached_property
    def gradient(self) -> dict[str, np.ndarray]:
        """The gradient by parameter."""
        return self.of(Rule(self.step.whole.inputs, self.shares))

    @cached_property
    def scale(self) -> dict[str, np.ndarray]:
        """The sum of the magnitudes of the tokens' gradients, by parameter."""
        found = _magnitudes(
            self.step.params, *self.step.whole[:2], self.shares, self.smoothing
        )
        return jax.tree.map(np.asarray, dict(found))

    @property
    def terms(self) -> int:
        """The number of summed token gradients."""
        return self.step.whole.weights.size

    def of(self, rule: "Rule") -> dict[str, np.ndarray]:
        """The gradient by another rule, by parameter."""
        targets = self.step.whole.targets
        params, smoothing = self.step.params, self.smoothing
        found = _gradient(params, rule.inputs, targets, rule.shares, smoothing)
        return jax.tree.map(np.asarray, dict(found))

    def rules(self) -> "dict[str, Rule]":
        """The rules of the usual mistakes, by name."""
        inputs, _, weights = self.step.whole
        means = [part.weights / self._divided_by(part) for part in self.step.parts]
        joined = np.concatenate(means)
        shares = {
            MEAN_OF_MEANS: joined / len(means),
            OVER_ALL: joined / self.step.count,
            "sum of the parts' means": joined,
            "mean over all positions": weights / weights.size,
            NOTHING: np.zeros_like(weights),
        }
        rules = {k: Rule(inputs, v.astype(np.float32)) for k, v in shares.items()}
        everything = np.full_like(weights, 1 / weights.size)
        padded = np.where(weights > 0, inputs, 0)
        return {**rules, "padding counts as tokens": Rule(padded, everything)}


class Rule(NamedTuple):
    """A way to a gradient: the gradient of `sum(shares * losses)`.

    Attributes:
      inputs: The tokens that the model gets, `(sequences, LENGTH)`.
      shares: The factor of each token's loss, `(sequences, LENGTH)` float32.
    """

    inputs: np.ndarray
    shares: np.ndarray


def _summed(params: Any, inputs: Any, targets: Any, shares: Any, smoothing: Any) -> Any:
    return jnp.sum(shares * token_losses(params, inputs, targets, smoothing))


_gradient = jax.jit(jax.grad(_summed))


@jax.jit
def _magnitudes(
    params: Any, inputs: Any, targets: Any, shares: Any, smoothing: Any
) -> Any:
    def one(x: Any, y: Any, share: Any) -> Any:
        found = jax.grad(_summed)(
            params, x[None, None], y[None, None], share[None, None], smoothing
        )
        return jax.tree.map(jnp.abs, found)

    tokens = (x.reshape(-1) for x in (inputs, targets, shares))
    return jax.tree.map(partial(jnp.sum, axis=0), jax.vmap(one)(*tokens))


def check_oracle(step: Step) -> verify.Report:
    """Judges the reference itself against finite differences in float64.

    Args:
      step: The data.
    """
    reference = Reference(step)
    batch = (*step.whole[:2], step.whole.weights)

    def losses(params: Any, batch: Any) -> jax.Array:
        inputs, targets, weights = batch
        own = token_losses(params, inputs, targets)
        return jnp.sum(weights * own, -1) / jnp.sum(weights, -1)

    def candidate(params: Any, batch: Any) -> Any:
        own = token_losses(params, *step.whole[:2])
        return jnp.sum(reference.shares * own), reference.gradient

    counts = step.whole.weights.sum(-1)
    return verify.gradients(
        losses, step.params, batch, {"reference": candidate}, weights=counts
    )
