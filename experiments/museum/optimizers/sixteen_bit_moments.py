"""Adam over bfloat16 parameters keeps its moments in bfloat16.

The moments took the dtype of the parameters. With a decay of 0.999 what a step adds to
the second moment is below its last place: it stops moving, at a wrong value.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.museum.meshes import Judge, Trainer
from jdist import verify

Tree = Any

THREAD = "https://github.com/google-deepmind/optax/issues/1552"
CLAIM = "Adam with float32 moments over bfloat16 parameters."
EXPECTED = ("state/0/nu", "bfloat16")
ADAM = optax.adam(0.05)


def buggy(tree: Tree) -> Tree:
    """Parameters or gradients as the optimizer is given them."""
    return tree


def fixed(tree: Tree) -> Tree:
    """Parameters or gradients as the optimizer is given them."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def losses(params: Tree, batch: Tree) -> Tree:
    """The squared error of each example."""
    x, y = batch
    return (jnp.tanh(x @ params["inward"]) @ params["outward"] - y) ** 2


def stepped(params: Tree, gradient: Tree, state: Tree, part: Trainer = fixed) -> Tree:
    """Adam's step; the new parameters are rounded to bfloat16."""
    moves, state = ADAM.update(part(gradient), state, params)
    add = lambda w, u: (w.astype(jnp.float32) + u).astype(w.dtype)  # noqa: E731
    return jax.tree.map(add, params, moves), state


def trainer(part: Trainer) -> Trainer:
    """One device; it makes its optimizer's state itself, and shows it."""
    kept: dict[str, Tree] = {}

    @jax.jit
    def run(params: Tree, state: Tree, batch: Tree) -> Tree:
        gradient = jax.grad(lambda p: losses(p, batch).mean())(params)
        return stepped(params, gradient, state, part)

    def step(params: Tree, _: Tree, batch: Tree) -> Tree:
        state = kept.setdefault("state", ADAM.init(part(params)))
        params, kept["state"] = run(params, state, batch)
        return params, kept["state"]

    return step


# --- what the judge needs ---


def judge() -> Judge:
    """The judge of seven steps."""
    keys = iter(jax.random.split(jax.random.key(0), 16))
    normal = lambda *s: jax.random.normal(next(keys), s, jnp.bfloat16)  # noqa: E731
    params = {"inward": normal(5, 7), "outward": normal(7)}
    batches = [(normal(11, 5), jnp.ones(11, jnp.bfloat16)) for _ in range(7)]
    start = params, ADAM.init(fixed(params))
    judge = verify.step_judge(losses, stepped, start, batches)
    return lambda trainer: judge({"trainer": trainer})
