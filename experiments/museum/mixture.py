"""A small mixture of experts: the two best of four, dense dispatch, a load loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum.language_model import VOCABULARY, WIDTH, cross_entropy
from experiments.museum.meshes import own, whole
from jdist.verify import tap

Tree = Any
Attach = Callable[[Tree, Tree], Tree]

EXPERTS, HIDDEN, CHOSEN = 4, 8, 2
SPECS = {
    "embed": P(), "router": P(), "up": P("ep"), "down": P("ep"), "head": P(),
}  # fmt: skip
"""How the parameters lie where the experts are divided."""
DIVIDED = ("up", "down")


def params(seed: int = 0) -> Tree:
    """Random parameters."""
    keys = iter(jax.random.split(jax.random.key(seed), 5))

    def normal(*shape: int) -> Tree:
        return 0.7 * jax.random.normal(next(keys), shape)

    return {
        "embed": normal(VOCABULARY, WIDTH),
        "router": normal(WIDTH, EXPERTS),
        "up": normal(EXPERTS, WIDTH, HIDDEN),
        "down": normal(EXPERTS, HIDDEN, WIDTH),
        "head": normal(WIDTH, VOCABULARY),
    }


def experts(p: Tree, h: Tree) -> Tree:
    """Every expert's output for every token."""
    inner = jax.nn.gelu(jnp.einsum("btd,edf->btef", h, p["up"]))
    return jnp.einsum("btef,efd->bted", inner, p["down"])


def routed(p: Tree, h: Tree) -> tuple[Tree, Tree, Tree]:
    """The gates, the router's probabilities and the choices, `(b, t, experts)`."""
    probabilities = jax.nn.softmax(tap(h @ p["router"], "router"), -1)
    best, index = lax.top_k(probabilities, CHOSEN)
    chosen = jax.nn.one_hot(index, EXPERTS).sum(-2)
    return probabilities * chosen / best.sum(-1, keepdims=True), probabilities, chosen


def load_loss(probabilities: Tree, chosen: Tree) -> Tree:
    """The load-balancing loss of a batch."""
    share = lax.stop_gradient(chosen.mean((0, 1)) / CHOSEN)
    return EXPERTS * (share * probabilities.mean((0, 1))).sum()


def token_losses(
    p: Tree, batch: Tree, attach: Attach = lambda gates, load: gates
) -> tuple[Tree, Tree]:
    """The loss of each token, and the batch's load loss.

    Args:
      p: The parameters.
      batch: The batch.
      attach: Maps the gates and the load loss to the gates that are used.
    """
    h = tap(p["embed"][batch["x"]], "embed")
    gates, probabilities, chosen = routed(p, h)
    load = tap(load_loss(probabilities, chosen), "load loss")
    gates = tap(attach(gates, load), "gates")
    h = tap(h + jnp.einsum("bte,bted->btd", gates, experts(p, h)), "mixture")
    return tap(cross_entropy(tap(h @ p["head"], "logits"), batch["y"]), "nll"), load


def divided_token_losses(p: Tree, batch: Tree) -> Tree:
    """The loss of each of this device's tokens, with experts divided over "ep"."""
    h = tap(p["embed"][batch["x"]], "embed")
    gates = tap(routed(p, h)[0], "gates")
    of_own = own(whole(gates, "ep", 0), "ep", 2)
    mixed = jnp.einsum("bte,bted->btd", of_own, experts(p, whole(h, "ep", 0)))
    h = tap(h + lax.psum_scatter(mixed, "ep", tiled=True), "mixture")
    return tap(cross_entropy(tap(h @ p["head"], "logits"), batch["y"]), "nll")
