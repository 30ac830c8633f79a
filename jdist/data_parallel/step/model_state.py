"""State of a model that has no gradient, such as batch-norm statistics.

Each replica's forward pass computes a new state from its own examples. After the step
all replicas must hold the same one, which is a choice:

    "mean"    floating leaves: the average, in proportion to the weight of each
              replica's examples; other leaves as in "first"
    "first"   the state of the first replica that has examples at all; PyTorch's
              `DistributedDataParallel`, which broadcasts the buffers of rank 0

"mean" uses the examples of all replicas. A variance becomes the mean of the variances
within replicas, as in any batch norm that is not synchronized. A model that reduces its
statistics over the axis in the forward pass (`jax.lax.pmean`) has equal states, which
both rules keep, up to rounding.
"""

from collections.abc import Hashable

import jax
import jax.numpy as jnp

from jdist._tree import PyTree, is_key, merge, split_inexact, unworded, words
from jdist.reduction import weighted_mean

RULES = ("mean", "first")


def synchronized(
    state: PyTree, weight: jax.Array, axis_name: Hashable, rule: str = "mean"
) -> PyTree:
    """Joins the replicas' states in one; call it where `axis_name` is bound.

    Args:
      state: Pytree, this replica's own; None where the model has none.
      weight: Scalar: the total weight of this replica's examples.
      axis_name: The axis that counts replicas.
      rule: One of `RULES`.

    Returns:
      Tree like `state`, equal on all replicas.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> means = {"mean": jnp.array([1.0, 5.0])}       # of 3 examples, and of 1
      >>> jax.vmap(lambda s, w: synchronized(s, w, "data"), axis_name="data")(
      ...     means, jnp.array([3.0, 1.0])
      ... )
      {'mean': Array([2., 2.], dtype=float32)}
    """
    # With one replica both rules are the identity.
    alone = jax.lax.axis_size(axis_name) == 1
    if alone or not jax.tree.leaves(state):
        return state
    if rule == "first":
        return _of_first(state, weight, axis_name)
    floating, rest = split_inexact(state)
    # Where no example counts all have the state from before, and no mean.
    given = jnp.where(jax.lax.psum(weight, axis_name) == 0, 1, weight)
    return merge(
        weighted_mean(floating, given, axis_name), _of_first(rest, weight, axis_name)
    )


def _of_first(state: PyTree, weight: jax.Array, axis_name: Hashable) -> PyTree:
    """The state of the first replica with examples; of replica 0 if there is none."""
    if not jax.tree.leaves(state):
        return state
    rank = jax.lax.axis_index(axis_name)
    beyond = jnp.full_like(rank, jax.lax.axis_size(axis_name))
    # The state of a replica without examples comes from padding.
    first = jax.lax.pmin(jnp.where(weight > 0, rank, beyond), axis_name)
    first = jnp.where(first == beyond, 0, first)

    def picked(leaf: jax.Array) -> jax.Array:
        if is_key(leaf):
            return unworded(picked(words(leaf)), leaf)
        if leaf.dtype == bool:  # Booleans cannot be summed.
            return picked(leaf.astype(jnp.uint8)).astype(bool)
        # A sum with a single term other than 0 is an exact broadcast.
        own = jnp.where(rank == first, leaf, jnp.zeros_like(leaf))
        return jax.lax.psum(own, axis_name)

    return jax.tree.map(lambda x: picked(jnp.asarray(x)), state)
