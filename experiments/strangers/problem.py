"""One model, one optimizer step in nine settings, and the gradient it should have.

A next-token model of two layers with tied embeddings: small enough to be written in
every framework in a dozen lines, and rich enough to distinguish mistakes. All sizes
differ except those of the tied leaf's two uses, tokens are weighted, and micro-batches
differ.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
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

CLIP, AUXILIARY = 0.05, 0.1
"""The largest norm of a clipped gradient, and the factor of the auxiliary loss."""

OPTIONS = {
    "clipped by norm": f"equal, and the step's gradient is clipped to norm {CLIP}",
    "auxiliary loss": f"equal, and {AUXILIARY} times the mean of the tokens' squared "
    "log-partition functions is added to the loss",
    "mixed precision": "equal, and float32 parameters are used in bfloat16",
}
"""The settings of what a trainer offers beside accumulation."""

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
      setting: One of `SETTINGS` or `OPTIONS`.
      params: The parameters of the model.
      whole: All sequences.
      sizes: The number of sequences in each micro-batch, or on each replica.
      count: The number of micro-batches in a full step, or of replicas.
      clip: The largest norm of the step's gradient; None for any.
      auxiliary: The factor of the auxiliary loss.
      mixed: Whether the model computes in bfloat16.
    """

    setting: str
    params: Params
    whole: Batch
    sizes: tuple[int, ...]
    count: int = STEPS
    clip: float | None = None
    auxiliary: float = 0.0
    mixed: bool = False

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
    options: list[dict[str, Any]] = [
        {"clip": CLIP}, {"auxiliary": AUXILIARY}, {"mixed": True}
    ]  # fmt: skip
    return found + [
        replace(found[0], setting=setting, **option)
        for setting, option in zip(OPTIONS, options, strict=True)
    ]


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


def logits(params: Params, inputs: Tokens, dtype: Any = None) -> jax.Array:
    """Scores of the next token, `(sequences, LENGTH, VOCABULARY)`.

    Args:
      params: The parameters of the model.
      inputs: The tokens, `(sequences, LENGTH)`.
      dtype: The dtype in which the model computes; None for that of its parameters.
    """
    own = {name: jnp.asarray(leaf, dtype) for name, leaf in params.items()}
    table = own["embedding"]
    hidden = jnp.tanh(table[inputs] @ own["up"] + own["bias"])
    return hidden @ own["down"] @ table.T


def token_losses(
    params: Params,
    inputs: Tokens,
    targets: Tokens,
    smoothing: Any = 0.0,
    auxiliary: Any = 0.0,
    dtype: Any = None,
) -> jax.Array:
    """The loss of each token in float32, `(sequences, LENGTH)`.

    Args:
      params: The parameters of the model.
      inputs: The tokens, `(sequences, LENGTH)`.
      targets: The tokens that follow, `(sequences, LENGTH)`.
      smoothing: The share of the target that is spread over the vocabulary.
      auxiliary: The factor of the squared log-partition function.
      dtype: As in `logits`.
    """
    scores = logits(params, inputs, dtype).astype(jnp.float32)
    partition = jax.nn.logsumexp(scores, -1)
    hit = jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
    entropy = partition - (1 - smoothing) * hit - smoothing * scores.mean(-1)
    return entropy + auxiliary * partition**2


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

    @property
    def rule(self) -> "Rule":
        """The rule that is claimed."""
        return Rule(self.step.whole.inputs, self.shares)

    @cached_property
    def gradient(self) -> dict[str, np.ndarray]:
        """The gradient by parameter."""
        return self.of(self.rule)

    @cached_property
    def scale(self) -> dict[str, np.ndarray]:
        """The sum of the magnitudes of the tokens' gradients, by parameter."""
        options = self.smoothing, self.step.auxiliary
        batch = self.step.whole[:2]
        found = _magnitudes(self.step.params, *batch, self.shares, *options)
        return jax.tree.map(np.asarray, dict(found))

    @property
    def terms(self) -> int:
        """The number of summed token gradients."""
        return self.step.whole.weights.size

    def of(self, rule: "Rule") -> dict[str, np.ndarray]:
        """The gradient in float32 by a rule, by parameter."""
        if rule.clipped != "parts":
            return self._clipped(self._gradient(rule, rule.shares), rule.clipped)
        bounds, places = np.cumsum(self.step.sizes), np.arange(len(rule.shares))
        part, count = np.searchsorted(bounds, places, "right"), self.step.count
        each = [
            np.where(part[:, None] == i, count * rule.shares, 0) for i in range(count)
        ]
        found = [self._clipped(self._gradient(rule, x), "whole") for x in each]
        return jax.tree.map(lambda *x: np.mean(x, 0, dtype=np.float32), *found)

    def in_mixed_precision(
        self, rule: "Rule", gradient: Mapping[str, np.ndarray]
    ) -> verify.Report:
        """Judges a gradient against that of the model in bfloat16.

        Args:
          rule: The rule of the claimed gradient.
          gradient: The gradient by parameter.
        """

        def candidate(params: Any, batch: Any) -> Any:
            return jnp.sum(self._losses_in_bfloat16(params, batch)), dict(gradient)

        batch = rule.inputs, self.step.whole.targets, rule.shares
        params, candidates = dict(self.step.params), {"candidate": candidate}
        # `check_oracle` has the finite differences.
        return self._judge(params, batch, candidates, finite_differences=False)

    @cached_property
    def _judge(self) -> Callable[..., verify.Report]:
        return verify.gradients_judge(self._losses_in_bfloat16, reduction="sum")

    def _losses_in_bfloat16(self, params: Any, batch: Any) -> jax.Array:
        inputs, targets, shares = batch
        options = {"smoothing": self.smoothing, "dtype": jnp.bfloat16}
        return jnp.sum(shares * token_losses(params, inputs, targets, **options), -1)

    def _gradient(self, rule: "Rule", shares: np.ndarray) -> dict[str, np.ndarray]:
        options = self.smoothing, rule.auxiliary * self.step.auxiliary
        batch = rule.inputs, self.step.whole.targets
        found = _gradient(self.step.params, *batch, shares, *options)
        return jax.tree.map(np.asarray, dict(found))

    def _clipped(self, gradient: dict[str, np.ndarray], by: str) -> Any:
        """A gradient, clipped by the norm of the whole, of each leaf, or not."""
        if self.step.clip is None or by == "never":
            return gradient
        norms = {x: float(np.linalg.norm(leaf)) for x, leaf in gradient.items()}
        if by == "whole":
            whole = float(np.linalg.norm(list(norms.values())))
            norms = dict.fromkeys(norms, whole)
        limit = self.step.clip
        return {
            name: leaf * np.float32(limit / max(limit, norms[name]))
            for name, leaf in gradient.items()
        }

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
        rules["padding counts as tokens"] = Rule(padded, everything)
        claimed, count = self.rule, self.step.count
        if self.step.clip is not None:
            rules |= {
                "not clipped": claimed._replace(clipped="never"),
                "each part clipped": claimed._replace(clipped="parts"),
                "each parameter clipped": claimed._replace(clipped="leaves"),
            }
        if self.step.auxiliary:
            # The claimed rule first: where parts are equal, others are the same.
            before = {"": claimed, **{f"{name}; ": own for name, own in rules.items()}}
            rules |= {
                f"{name}{times}": rule._replace(auxiliary=factor)
                for name, rule in before.items()
                for times, factor in (
                    ("auxiliary loss of each part in full", count),
                    ("no auxiliary loss", 0.0),
                )
            }
        return rules


class Rule(NamedTuple):
    """A way to a gradient: the gradient of `sum(shares * losses)`, which is clipped.

    Attributes:
      inputs: The tokens that the model gets, `(sequences, LENGTH)`.
      shares: The factor of each token's loss, `(sequences, LENGTH)` float32.
      auxiliary: How often the auxiliary loss counts.
      clipped: What is clipped where the step is: the "whole" gradient, that of each of
        the "parts" before their mean, each of the "leaves", or "never" one.
    """

    inputs: np.ndarray
    shares: np.ndarray
    auxiliary: float = 1.0
    clipped: str = "whole"


def _summed(params: Any, inputs: Any, targets: Any, shares: Any, *options: Any) -> Any:
    return jnp.sum(shares * token_losses(params, inputs, targets, *options))


_gradient = jax.jit(jax.grad(_summed))


@jax.jit
def _magnitudes(
    params: Any, inputs: Any, targets: Any, shares: Any, *options: Any
) -> Any:
    def one(x: Any, y: Any, share: Any) -> Any:
        found = jax.grad(_summed)(
            params, x[None, None], y[None, None], share[None, None], *options
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
