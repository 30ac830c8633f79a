"""A small causal attention model, whole and with sequences in parts."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.museum.language_model import (
    VOCABULARY,
    WIDTH,
    counts,
    cross_entropy,
    rms,
    tokens,
)
from experiments.museum.meshes import Judge
from jdist import verify
from jdist.verify import tap

Tree = Any
Attention = Callable[[Tree, Tree, Tree], Tree]

HEADS, SIZE = 2, 4


def params(seed: int = 0) -> Tree:
    """Random parameters of one layer."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*shape: int) -> Tree:
        return 0.5 * jax.random.normal(next(keys), shape)

    return {
        "embed": normal(VOCABULARY, WIDTH),
        "scale": 1 + 0.2 * normal(WIDTH),
        **{name: normal(WIDTH, HEADS, SIZE) for name in "qkv"},
        "out": normal(HEADS, SIZE, WIDTH),
        "head": normal(WIDTH, VOCABULARY),
    }


def rotated(x: Tree, positions: Tree) -> Tree:
    """Rotary positions.

    Args:
      x: Queries or keys, `(sequences, tokens, heads, size)`.
      positions: The position of each token, `(tokens,)`.
    """
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * (0.5 ** jnp.arange(half))
    a, b = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def scores(q: Tree, k: Tree) -> Tree:
    """Scaled products, `(sequences, heads, queries, keys)`."""
    return jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(SIZE)


def causal(q: Tree, k: Tree, v: Tree, start: Tree = 0) -> Tree:
    """Causal attention of queries that begin at a position."""
    rows = start + jnp.arange(q.shape[1])
    seen = rows[:, None] >= jnp.arange(k.shape[1])
    weights = jax.nn.softmax(jnp.where(seen, scores(q, k), -1e9), -1)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def full(q: Tree, k: Tree, v: Tree) -> Tree:
    """Attention to all tokens."""
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores(q, k), -1), v)


def logits(
    p: Tree,
    ids: Tree,
    attend: Attention = causal,
    positions: Tree = None,
    show: Callable[[Tree, str], Tree] = tap,
) -> Tree:
    """The logits of each token.

    Args:
      p: The parameters.
      ids: Tokens, `(sequences, tokens)`, or a part of each sequence.
      attend: The attention.
      positions: The tokens' positions; None for all in order.
      show: Marks values, as `verify.tap`.
    """
    positions = jnp.arange(ids.shape[1]) if positions is None else positions
    h = show(p["embed"][ids], "embed")
    z = rms(h, p["scale"])
    q, k, v = (jnp.einsum("btd,dhe->bthe", z, p[name]) for name in "qkv")
    q, k = show(rotated(q, positions), "q"), show(rotated(k, positions), "k")
    mixed = show(attend(q, k, show(v, "v")), "attention")
    h = show(h + jnp.einsum("bthe,hed->btd", mixed, p["out"]), "residual")
    return show(h @ p["head"], "logits")


def token_losses(p: Tree, batch: Tree, **options: Any) -> Tree:
    """The loss of each token; options as in `logits`."""
    show = options.get("show", tap)
    found = cross_entropy(logits(p, batch["x"], **options), batch["y"])
    return show(found, "token loss")


# --- what the judge needs ---


def losses(p: Tree, batch: Tree) -> Tree:
    """The mean over the counted tokens of each sequence."""
    return (token_losses(p, batch) * batch["mask"]).sum(-1) / counts(batch)


# What several exhibits share is measured once.
@cache
def judge() -> Judge:
    """The judge: the model on one device."""
    batch = tokens()
    return verify.trace_judge(losses, params(), batch, weights=counts(batch))
