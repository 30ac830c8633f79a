"""A gradient that overflowed is set to zero, and the optimizer steps.

Entries that are not finite were replaced by zeros. Adam still moved its count, its
moments and, by them, the parameters: the step was to be skipped.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.museum.meshes import Judge, Trainer
from jdist import verify

Tree = Any

THREAD = "https://github.com/mlnomadpy/flaxchat/issues/6"
CLAIM = "Adam that leaves parameters and state alone if a gradient is not finite."
EXPECTED = ("step 2", "count")
ADAM = optax.adam(1e-2)


def losses(params: Tree, x: Tree) -> Tree:
    """The squared output of each example."""
    return (jnp.tanh(x @ params["inward"]) @ params["outward"]) ** 2


def finite(gradient: Tree) -> Tree:
    """Whether all entries are."""
    return jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(gradient)]).all()


def buggy(params: Tree, gradient: Tree, state: Tree) -> Tree:
    """The parameters and the state after a step."""
    zeroed = jax.tree.map(lambda g: jnp.where(finite(gradient), g, 0), gradient)
    moves, state = ADAM.update(zeroed, state)
    return optax.apply_updates(params, moves), state


def fixed(params: Tree, gradient: Tree, state: Tree) -> Tree:
    """The parameters and the state after a step."""
    moved = buggy(params, gradient, state)
    return jax.tree.map(
        lambda new, old: jnp.where(finite(gradient), new, old), moved, (params, state)
    )


def trainer(part: Trainer) -> Trainer:
    """One device."""

    @jax.jit
    def step(params: Tree, state: Tree, batch: Tree) -> Tree:
        scale = batch["scale"][
            0
        ]  # of the loss: its gradient overflows in the second step
        mean = lambda p: losses(p, batch["x"]).mean() * scale  # noqa: E731
        gradient = jax.tree.map(lambda g: g / scale, jax.grad(mean)(params))
        return part(params, gradient, state)

    return step


# --- what the judge needs ---


def step(state: Tree, batch: Tree) -> Tree:
    """The step that is claimed: it skips a batch whose scale overflows."""
    params, inner = state
    gradient = jax.grad(lambda p: losses(p, batch["x"]).mean())(params)
    moves, new = ADAM.update(gradient, inner)
    moved, sound = (optax.apply_updates(params, moves), new), batch["scale"][0] < 1e30
    return jax.tree.map(lambda a, b: jnp.where(sound, a, b), moved, state)


def judge() -> Judge:
    """The judge of two steps, of which the second one overflows."""
    keys = iter(jax.random.split(jax.random.key(0), 4))
    normal = lambda *s: jax.random.normal(next(keys), s)  # noqa: E731
    params = {"inward": normal(5, 7), "outward": 5 * normal(7)}
    batches = [{"x": normal(11, 5), "scale": jnp.full(11, s)} for s in (8.0, 3e38)]
    judge = verify.step_judge(step, (params, ADAM.init(params)), batches)
    return lambda trainer: judge(lambda state, batch: trainer(*state, batch))
