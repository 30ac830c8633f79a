"""Two stages of the language model on two devices, run micro-batch by micro-batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.museum.language_model import block, counts, cross_entropy
from experiments.museum.trees import parts, summed
from jdist.verify import tap

Tree = Any
MICRO_BATCHES = 3


def first(p: Tree, batch: Tree) -> Tree:
    """The first stage: embeddings and a block."""
    return block(p["blocks"][0], tap(p["embed"][batch["x"]], "embed"), "block0")


def last(p: Tree, h: Tree, batch: Tree) -> Tree:
    """The last stage: a block, and the sum of the counted tokens' losses."""
    h = block(p["blocks"][1], h, "block1")
    logits = tap(h @ (p["head"] if "head" in p else p["embed"].T), "logits")
    return (tap(cross_entropy(logits, batch["y"]), "token loss") * batch["mask"]).sum()


def halves(p: Tree) -> tuple[Tree, Tree]:
    """The parameters of both stages; tied embeddings are in both."""
    ends = {"head": p["head"]} if "head" in p else {"embed": p["embed"]}
    start = {"embed": p["embed"], "blocks": p["blocks"][:1]}
    return start, {**ends, "blocks": [None, p["blocks"][1]]}


def passes(p: Tree, batch: Tree, seed: Callable[[Tree], Tree]) -> tuple[Tree, ...]:
    """The mean loss, and each stage's gradient, summed over micro-batches.

    Args:
      p: The parameters.
      batch: The batch.
      seed: Maps the number of counted tokens to the loss's cotangent.
    """
    one, two = jax.devices()[:2]
    start, end = halves(p)
    start, end = jax.device_put(start, one), jax.device_put(end, two)
    tokens, found = counts(batch).sum(), []
    for each in parts(batch, MICRO_BATCHES):
        own, theirs = jax.device_put(each, one), jax.device_put(each, two)
        h, backward0 = jax.vjp(lambda p, b=own: first(p, b), start)
        loss, backward1 = jax.vjp(
            lambda p, h, b=theirs: last(p, h, b), end, jax.device_put(h, two)
        )
        gradient1, dh = backward1(jnp.float32(seed(tokens)))
        found.append((loss, backward0(jax.device_put(dh, one))[0], gradient1))
    loss, gradient0, gradient1 = summed(found)
    return loss / tokens, gradient0, gradient1


def merged(gradient0: Tree, gradient1: Tree) -> Tree:
    """One gradient of both stages' own parameters."""
    blocks = [gradient0["blocks"][0], gradient1["blocks"][1]]
    return {**gradient1, "embed": gradient0["embed"], "blocks": blocks}
