"""A single best expert with normalized gates trains no router.

With one expert for each token the chosen probability was divided by the sum of the
chosen probabilities, itself: the gate is 1 whatever the router says, and the router
gets no gradient from the loss. The model was trained in bfloat16.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.museum.meshes import Judge, Trainer
from experiments.museum.trees import parts
from jdist import verify

Tree = Any

THREAD = "https://github.com/jingyaogong/minimind/issues/858"
CLAIM = "Each token's expert is weighted by its probability; all in bfloat16."
# Not of every example: two tokens are so sure of their expert that the gate is 1.
EXPECTED = ("first difference: forward, gate", "got 1 at [0]")
EXPERTS = 4


def buggy(best: Tree) -> Tree:
    """The gates of the chosen experts, of their probabilities `(tokens, chosen)`."""
    return best / (best.sum(-1, keepdims=True) + 1e-20)


def fixed(best: Tree) -> Tree:
    """The gates of the chosen experts, of their probabilities `(tokens, chosen)`."""
    return best if best.shape[-1] == 1 else best / best.sum(-1, keepdims=True)


def losses(params: Tree, batch: Tree, gates: Trainer) -> Tree:
    """The squared error of each token."""
    x, y = batch
    h = verify.tap(jnp.tanh(x @ params["inward"]), "hidden")
    probabilities = jax.nn.softmax(verify.tap(h @ params["router"], "router"), -1)
    best, index = lax.top_k(probabilities, 1)
    gate = verify.tap(gates(best), "gate")
    chosen = jax.nn.one_hot(index[:, 0], EXPERTS, dtype=x.dtype)
    out = jnp.einsum("te,td,edf->tf", gate * chosen, h, params["experts"])
    return ((out - y) ** 2).mean(-1)


def trainer(part: Trainer) -> Trainer:
    """Two micro-batches of 32 tokens."""
    mean = jax.jit(jax.value_and_grad(lambda p, b: losses(p, b, part).mean()))

    def step(params: Tree, batch: Tree) -> Tree:
        first, second = (mean(params, each) for each in parts(batch, 2))
        return jax.tree.map(lambda a, b: (a + b) / 2, first, second)

    return step


# --- what the judge needs ---


def judge() -> Judge:
    """The judge: all tokens at once."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    normal = lambda *s: jax.random.normal(next(keys), s, jnp.bfloat16)  # noqa: E731
    params = {
        "inward": 0.4 * normal(7, 16),
        "router": 0.5 * normal(16, EXPERTS),
        "experts": 0.3 * normal(EXPERTS, 16, 5),
    }
    batch = normal(64, 7), normal(64, 5)
    return verify.trace_judge(partial(losses, gates=fixed), params, batch)
