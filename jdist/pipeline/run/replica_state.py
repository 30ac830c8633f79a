"""The state of a stage that several workers run: one state out of theirs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist._tree import is_inexact, wide_dtype


def joined_state(states: Sequence[Any], weights: Sequence[float]) -> Any:
    """The states' mean, as `data_parallel` forms that of its replicas.

    Args:
      states: Trees of one structure, on one device: by the rank of their workers.
      weights: Of the examples that each worker's micro-batches had. If all are 0, the
        first state is returned.

    Returns:
      A tree like each: floating leaves are the mean, in proportion to the weights, and
      other leaves those of the first worker with a positive weight.

    Example:
      >>> import jax.numpy as jnp
      >>> ones = {"mean": jnp.array([1.0]), "seen": jnp.int32(3)}
      >>> others = {"mean": jnp.array([5.0]), "seen": jnp.int32(1)}
      >>> joined_state([ones, others], [3.0, 1.0])
      {'mean': Array([2.], dtype=float32), 'seen': Array(3, dtype=int32)}
    """
    pairs = [(s, w) for s, w in zip(states, weights, strict=True) if w > 0]
    kept, shares = zip(*pairs or [(states[0], 1.0)], strict=True)
    total = sum(shares)
    return _mean(list(kept), [jnp.float32(share / total) for share in shares])


@jax.jit
def _mean(states: list[Any], shares: list[jax.Array]) -> Any:
    def mean(*leaves: jax.Array) -> jax.Array:
        if len(leaves) == 1 or not is_inexact(leaves[0]):
            return leaves[0]
        wide = wide_dtype(leaves[0].dtype)
        parts = [
            leaf.astype(wide) * share.astype(wide)
            for leaf, share in zip(leaves, shares, strict=True)
        ]
        return sum(parts[1:], parts[0]).astype(leaves[0].dtype)

    return jax.tree.map(mean, *states)
