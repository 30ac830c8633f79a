"""Sums, multiples and norms of gradients, and a batch in parts."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def parts(batch: Tree, count: int) -> list[Tree]:
    """A batch in equal parts, in order."""

    def part(number: int) -> Tree:
        def rows(x: Tree) -> Tree:
            return x[number * len(x) // count : (number + 1) * len(x) // count]

        return jax.tree.map(rows, batch)

    return [part(number) for number in range(count)]


def summed(trees: Sequence[Tree]) -> Tree:
    """The sum of trees."""
    return reduce(lambda a, b: jax.tree.map(jnp.add, a, b), trees)


def scaled(tree: Tree, factor: Tree) -> Tree:
    """A tree times a number."""
    return jax.tree.map(lambda x: x * factor, tree)


def squares(tree: Tree) -> Tree:
    """The sum of the squares of all entries."""
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))


def norm(tree: Tree) -> Tree:
    """The 2-norm of all entries."""
    return jnp.sqrt(squares(tree))


def clipped(gradient: Tree, size: Tree, limit: float = 0.1) -> Tree:
    """A gradient of a norm `size`, scaled to at most `limit`."""
    return scaled(gradient, jnp.minimum(1.0, limit / size))


def descended(params: Tree, gradient: Tree, rate: float = 0.1) -> Tree:
    """The parameters after a step of gradient descent."""
    return jax.tree.map(lambda w, g: w - rate * g, params, gradient)
