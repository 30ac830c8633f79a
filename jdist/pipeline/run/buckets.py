"""A stage's gradient in buckets, for its workers to add up.

When a worker's last backward pass of a stage is done, its sum leaves for the stage's
other workers in several messages, while the worker goes on with other stages. Each
bucket is added up as soon as it is there from everybody; the next ones are still under
way.
"""

import itertools
from collections.abc import Sequence

import jax

from jdist.reduction import Partial

LIMIT = 25 * 2**20
"""Bytes from which on a bucket is closed."""


def buckets_of(partial: Partial) -> list[Partial]:
    """The partial, with some leaves of its gradient in each bucket, in their order.

    A bucket is closed when it holds `LIMIT` bytes or more. There is one at least.

    Example:
      >>> import jax.numpy as jnp
      >>> gradient = {"b": jnp.zeros(2), "w": jnp.zeros((3, 2))}
      >>> [len(b.gradient) for b in buckets_of(Partial(1.0, gradient, 4.0))]
      [2]
    """
    found: list[list[jax.Array]] = [[]]
    held = 0
    for leaf in jax.tree.leaves(partial.gradient):
        if held >= LIMIT:
            found.append([])
            held = 0
        found[-1].append(leaf)
        held += leaf.nbytes
    return [partial._replace(gradient=leaves) for leaves in found]


def whole(buckets: Sequence[Partial], like: Partial) -> Partial:
    """The inverse of `buckets_of`, with the structure of `like`."""
    leaves = itertools.chain.from_iterable(bucket.gradient for bucket in buckets)
    structure = jax.tree.structure(like.gradient)
    return buckets[0]._replace(gradient=jax.tree.unflatten(structure, leaves))
