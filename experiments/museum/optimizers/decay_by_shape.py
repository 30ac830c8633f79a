"""Weights are decayed by their shape, and layers are stacked.

Vectors, which are norms and biases, were not to be decayed, and matrices were. With the
layers stacked for a scan, a norm's weights are a matrix and were decayed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.museum.meshes import Judge, Trainer
from jdist import verify

Tree = Any

THREAD = "https://github.com/salesforce/jaxformer/issues/28"
CLAIM = "A step of AdamW that decays no norm's weights."
EXPECTED = ("wrong optimizer update: its optimizer state is right", "params/scale")
RATE, DECAY = 1e-2, 0.1


def buggy(path: str, leaf: Tree) -> bool:
    """Whether a parameter is decayed."""
    return leaf.ndim > 1


def fixed(path: str, leaf: Tree) -> bool:
    """Whether a parameter is decayed."""
    return "scale" not in path


def losses(params: Tree, x: Tree) -> Tree:
    """The squared sum of each example's outputs, by a scan over stacked layers."""

    def layer(h: Tree, p: Tree) -> tuple[Tree, None]:
        z = h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-6) * p["scale"]
        return h + jnp.tanh(z @ p["kernel"]), None

    return jax.lax.scan(layer, x, params)[0].sum(-1) ** 2


def adamw(part: Trainer, params: Tree) -> Any:
    """AdamW with a mask of the parameters that it decays."""
    mask = jax.tree_util.tree_map_with_path(
        lambda path, leaf: part(jax.tree_util.keystr(path), leaf), params
    )
    return optax.adamw(RATE, weight_decay=DECAY, mask=mask)


def trainer(part: Trainer) -> Trainer:
    """One device."""

    @jax.jit
    def step(params: Tree, state: Tree, x: Tree) -> Tree:
        gradient = jax.grad(lambda p: losses(p, x).mean())(params)
        moves, state = adamw(part, params).update(gradient, state, params)
        return optax.apply_updates(params, moves), state

    return step


# --- what the judge needs ---


def update(params: Tree, gradient: Tree, state: Tree) -> Tree:
    """The step of AdamW that is claimed."""
    moves, state = adamw(fixed, params).update(gradient, state, params)
    return optax.apply_updates(params, moves), state


def judge() -> Judge:
    """The judge of two steps."""
    keys = iter(jax.random.split(jax.random.key(0), 4))
    normal = lambda *s: jax.random.normal(next(keys), s)  # noqa: E731
    params = {"scale": 1 + 0.2 * normal(3, 5), "kernel": 0.5 * normal(3, 5, 5)}
    start, batches = (params, adamw(fixed, params).init(params)), [normal(7, 5)] * 2
    judge = verify.step_judge(losses, update, start, batches)
    return lambda trainer: judge({"trainer": trainer})
