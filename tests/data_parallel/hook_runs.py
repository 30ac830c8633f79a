"""Running a hook by itself: chosen shares in, what every replica gets out."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist.data_parallel.hooks import Bucket
from jdist.data_parallel.replicas.mapping import over_replicas
from jdist.data_parallel.replicas.placement import Placement


def bucket_of(buffer, shapes, weight, index=0):
    """A bucket of gradients named g0, g1, .. ."""
    return Bucket(
        buffer=buffer,
        weight=weight,
        index=index,
        is_last=True,
        axis_name="data",
        paths=tuple(f"g{i}" for i in range(len(shapes))),
        shapes=tuple(shapes),
    )


def run_hook(hook, shares, *, shapes=None, weights=None, where=None):
    """All steps of a hook.

    Args:
      hook: The hook.
      shares: `(steps, replicas, n)`.
      shapes: Of the gradients in a buffer; None for one vector.
      weights: `(replicas,)` that add up to 1; None for equal ones.
      where: A mesh; None for a `vmap`.

    Returns:
      `(results, sent)`, each `(steps, replicas, n)`.
    """
    _, replicas, size = shares.shape
    shapes = shapes or [(size,)]
    weights = np.full(replicas, 1 / replicas) if weights is None else weights
    rows = PartitionSpec("data")

    def on_replica(shares, weight):
        """All steps; arguments and results have a first axis of one row."""
        weight = weight[0].astype(shares.dtype)
        first = bucket_of(jnp.zeros(size, shares.dtype), shapes, weight)

        def step(state, share):
            state, result = hook.reduce(state, first.replaced(share))
            sent = share if result.sent is None else result.sent
            return state, (result.buffer, sent)

        _, found = jax.lax.scan(step, hook.start(first), shares[0])
        return jax.tree.map(lambda x: x[None], found)

    placement = Placement(where, replicas, "data")
    mapped = over_replicas(on_replica, placement, (rows, rows), (rows, rows))
    found = jax.jit(mapped)(jnp.swapaxes(jnp.asarray(shares), 0, 1), weights)
    return tuple(np.swapaxes(np.asarray(x), 0, 1) for x in found)
