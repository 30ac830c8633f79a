"""A small next-token model of perceptrons, whole and with divided blocks."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum.meshes import Judge, enter, leave
from jdist import verify
from jdist.verify import tap

Tree = Any
Layer = Callable[[Tree, Tree, str], Tree]

VOCABULARY, WIDTH, HIDDEN, LENGTH = 11, 6, 10, 6
COUNTED = (2, 3, 6, 5, 4, 6)
"""Counted tokens of each sequence: 26, and 5, 11 and 10 in thirds."""


def params(
    layers: int = 2,
    tied: bool = False,
    hidden: int = HIDDEN,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
) -> Tree:
    """Random parameters.

    Args:
      layers: The number of blocks.
      tied: Whether the embeddings are also the output weights.
      hidden: The hidden units of each block.
      vocabulary: The number of rows of the embedding.
      seed: The seed.
    """
    keys = iter(jax.random.split(jax.random.key(seed), 4 * layers + 2))

    def normal(*shape: int) -> Tree:
        return 0.5 * jax.random.normal(next(keys), shape)

    made = {
        "embed": normal(vocabulary, WIDTH),
        "blocks": [
            {
                "scale": 1 + 0.2 * normal(WIDTH),
                "up": normal(WIDTH, hidden),
                "down": normal(hidden, WIDTH),
            }
            for _ in range(layers)
        ],
    }
    return made if tied else {**made, "head": normal(WIDTH, vocabulary)}


def specs(layers: int = 2, axis: str = "tp") -> Tree:
    """How the parameters lie where the blocks are divided over an axis."""
    block = {"scale": P(), "up": P(None, axis), "down": P(axis, None)}
    return {"embed": P(), "blocks": [block] * layers, "head": P()}


def tokens(counted: tuple[int, ...] = COUNTED, seed: int = 1) -> Tree:
    """Random sequences.

    Args:
      counted: How many tokens of each sequence count, from its start.
      seed: The seed.
    """
    shape = (len(counted), LENGTH + 1)
    ids = jax.random.randint(jax.random.key(seed), shape, 0, VOCABULARY)
    mask = jnp.arange(LENGTH) < jnp.array(counted)[:, None]
    return {"x": ids[:, :-1], "y": ids[:, 1:], "mask": mask.astype(jnp.float32)}


def rms(h: Tree, scale: Tree) -> Tree:
    """The RMS norm of the last axis."""
    return h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6) * scale


def cross_entropy(logits: Tree, targets: Tree) -> Tree:
    """The negative log-likelihood of each target."""
    own = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - own


def block(p: Tree, h: Tree, name: str) -> Tree:
    """A block of the model."""
    inner = tap(jax.nn.gelu(rms(h, p["scale"]) @ p["up"]), f"{name}/inner")
    return tap(h + inner @ p["down"], name)


def token_losses(p: Tree, batch: Tree, layer: Layer = block) -> Tree:
    """The loss of each token, `(sequences, tokens)`."""
    h = tap(p["embed"][batch["x"]], "embed")
    for number, weights in enumerate(p["blocks"]):
        h = layer(weights, h, f"block{number}")
    logits = tap(h @ (p["head"] if "head" in p else p["embed"].T), "logits")
    return tap(cross_entropy(logits, batch["y"]), "token loss")


def total(p: Tree, batch: Tree, layer: Layer = block) -> Tree:
    """The sum over the counted tokens."""
    return (token_losses(p, batch, layer) * batch["mask"]).sum()


def divided_block(p: Tree, h: Tree, name: str) -> Tree:
    """A block on one device of the axis "tp", with its part of the hidden units."""
    z = enter(rms(h, p["scale"]), "tp")
    inner = tap(jax.nn.gelu(z @ p["up"]), f"{name}/inner")
    return tap(h + leave(inner @ p["down"], "tp"), name)


def counts(batch: Tree) -> Tree:
    """The number of counted tokens of each sequence: their weights."""
    return batch["mask"].sum(-1)


# --- what the judge needs ---


def losses(p: Tree, batch: Tree) -> Tree:
    """The mean over the counted tokens of each sequence."""
    return (token_losses(p, batch) * batch["mask"]).sum(-1) / counts(batch)


# What several exhibits share is measured once.
@cache
def judge(tied: bool = False) -> Judge:
    """The judge: the model on one device.

    Args:
      tied: Whether the embeddings are also the output weights.
    """
    batch = tokens()
    return verify.trace_judge(losses, params(tied=tied), batch, weights=counts(batch))
