"""Muon: momentum, made orthogonal by a Newton-Schulz iteration."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any
RATE, DECAY = 0.02, 0.95


def orthogonal(x: Tree) -> Tree:
    """Nearly the orthogonal matrix that is nearest to a matrix."""
    y = x / (jnp.sqrt((x * x).sum()) + 1e-7)
    y = y.T if (tall := x.shape[0] > x.shape[1]) else y
    for _ in range(5):
        a = y @ y.T
        y = 3.4445 * y + (2.0315 * a @ a - 4.7750 * a) @ y
    return y.T if tall else y


def momentum(state: Tree, gradient: Tree) -> Tree:
    """The new momentum."""
    return jax.tree.map(lambda m, g: DECAY * m + g, state, gradient)


def moved(params: Tree, moves: Tree) -> Tree:
    """The parameters after their moves."""
    return jax.tree.map(lambda w, m: w - RATE * m, params, moves)


def direction(m: Tree, apply: Callable[[Tree], Tree] = orthogonal) -> Tree:
    """The move of a leaf: matrices are made orthogonal, vectors are not."""
    return apply(m) if m.ndim == 2 else m


def muon(params: Tree, gradient: Tree, state: Tree) -> tuple[Tree, Tree]:
    """A step on whole matrices."""
    state = momentum(state, gradient)
    return moved(params, jax.tree.map(direction, state)), state
