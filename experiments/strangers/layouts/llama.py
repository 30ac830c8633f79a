"""A Llama of one layer in plain JAX: the claim, on one device, from the whole step.

RMS norms, rotary positions, causal attention, SwiGLU. Of the tokens those count whose
label is in the step's mask; a sequence's loss is their mean, and its weight their
number, so that the step's loss is the mean over all counted tokens.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY, WIDTH, HIDDEN, HEADS, LENGTH, ROWS = 16, 8, 12, 2, 8, 12
SIZE = WIDTH // HEADS
EPSILON = 1e-6

Layout = Mapping[str, Any]


def problem(layout: Layout) -> tuple[Any, ...]:
    """Parameters, sequences and the number of counted tokens in each.

    Args:
      layout: `tied` embeddings; a `mask` of "none", "padded" sequences, or "inside".
    """
    shapes = {
        "embed": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY),
        "q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH),
        "o": (WIDTH, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
        "before": (WIDTH,), "after": (WIDTH,), "last": (WIDTH,),
    }  # fmt: skip
    keys = dict(
        zip(shapes, jax.random.split(jax.random.key(7), len(shapes)), strict=True)
    )
    params = {
        name: jax.random.normal(keys[name], shape, jnp.float32) / 2 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    if layout["tied"]:
        del params["head"]
    one, two = jax.random.split(jax.random.key(11))
    # No token is 0, which some trainers take for padding.
    tokens = jax.random.randint(one, (ROWS, LENGTH), 1, VOCABULARY, jnp.int32)
    # Micro-batches, which are of neighbours, differ in their counts.
    lengths = jnp.array([8, 8, 8, 7, 5, 5, 4, 4, 3, 2, 2, 3])
    mask = jnp.ones((ROWS, LENGTH), jnp.int32)
    if layout["mask"] == "padded":
        mask = (jnp.arange(LENGTH) < lengths[:, None]).astype(jnp.int32)
    elif layout["mask"] == "inside":
        kept = jax.random.bernoulli(two, lengths[:, None] / LENGTH, (ROWS, LENGTH))
        mask = kept.astype(jnp.int32).at[:, -1].set(1)
    batch = {"tokens": tokens, "mask": mask}
    return params, batch, mask[:, 1:].sum(1).astype(jnp.float32)


def logits(
    params: Any, tokens: jax.Array, turns: np.ndarray, scale: float
) -> jax.Array:
    """Scores of the next tokens, `(sequences, LENGTH, VOCABULARY)`."""
    x = params["embed"][tokens]
    x = x + attention(params, norm(x, params["before"]), turns, scale) @ params["o"]
    h = norm(x, params["after"])
    h = jax.nn.silu(h @ params["gate"]) * (h @ params["up"])
    x = norm(x + h @ params["down"], params["last"])
    return x @ params.get("head", params["embed"].T)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """The RMS norm."""
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale


def attention(params: Any, x: jax.Array, turns: np.ndarray, scale: float) -> jax.Array:
    """Causal attention, before its output projection."""
    heads = (*x.shape[:-1], HEADS, SIZE)
    q, k, v = ((x @ params[name]).reshape(heads) for name in ("q", "k", "v"))
    q, k = rotated(q, turns), rotated(k, turns)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("bnts,bsnh->btnh", shares, v).reshape(x.shape)


def rotations(theta: float, dtype: Any = np.float32) -> np.ndarray:
    """Sine and cosine of each position and pair, rounded to a type."""
    rates = theta ** (-np.arange(0, SIZE, 2) / SIZE)
    angles = np.arange(LENGTH)[:, None, None] * rates
    # A trainer computes them in float32 before it rounds them.
    found = np.stack([np.sin(angles), np.cos(angles)]).astype(np.float32)
    return found.astype(dtype).astype(np.float32)


def rotated(x: jax.Array, turns: np.ndarray) -> jax.Array:
    """Rotates the first half of each head against the second."""
    first, second = jnp.split(x, 2, -1)
    sine, cosine = turns.astype(x.dtype)
    parts = first * cosine - second * sine, second * cosine + first * sine
    return jnp.concatenate(parts, -1)


def losses(
    params: Any,
    batch: Any,
    turns: np.ndarray,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = SIZE**-0.5,
) -> jax.Array:
    """The mean loss over each sequence's counted tokens, `(sequences,)`.

    Args:
      params: The parameters.
      batch: Sequences, and which of their tokens count as targets.
      turns: Of the rotary positions, from `rotations`.
      smoothing: The share of the target that the other tokens have.
      z_loss: Factor of the squared log of the scores' normalizer.
      scale: Factor of the products of queries and keys.
    """
    scores = logits(params, batch["tokens"], turns, scale)[:, :-1]
    total = jax.nn.logsumexp(scores, -1)
    hit = jnp.take_along_axis(scores, batch["tokens"][:, 1:, None], -1)[..., 0]
    others = (scores.sum(-1) - hit) / (VOCABULARY - 1)
    own = total - (1 - smoothing) * hit - smoothing * others + z_loss * total**2
    mask = batch["mask"][:, 1:].astype(scores.dtype)
    return (own * mask).sum(1) / mask.sum(1)
