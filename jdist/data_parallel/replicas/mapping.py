"""One function on every replica: on the devices of a mesh axis, or by `vmap`."""

from collections.abc import Callable, Hashable, Sequence
from functools import reduce

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdist._compat import map_shards
from jdist._tree import PyTree
from jdist.data_parallel.replicas.placement import Placement

EACH = PartitionSpec()
"""The spec of an array that is the same on all replicas, such as parameters."""
LANES = 128
"""Lanes of a TPU's vector unit. A flat array whose length is not a multiple of it is
not gathered by XLA there but summed from rows that are zero elsewhere, which sends
twice the bytes."""


def over_replicas(
    on_replica: Callable[..., PyTree],
    placement: Placement,
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PyTree],
) -> Callable[..., PyTree]:
    """Maps a function over all replicas; the caller compiles it.

    Args:
      on_replica: From pytrees to a tuple of pytrees. It may use collectives over the
        replicas' axis.
      placement: The replicas. Over further axes of their mesh arrays stay as they are
        divided (see `jdist.data_parallel.replicas.layout`).
      in_specs: For each argument, `EACH` or `PartitionSpec(placement.axis)`: divided
        along the first dimension.
      out_specs: The same for each result; on a mesh also a tree of specs. What is the
        same on all replicas is not checked to be so.
    """
    axis, count = placement.axis, placement.count
    if placement.mesh is not None:
        manual = axis if placement.further_axes() else None
        mesh = placement.mesh
        return map_shards(on_replica, mesh, in_specs, tuple(out_specs), manual)
    # One replica's arrays get no dimension for it: XLA on CPU is slow at batched matrix
    # products, also with a batch of one.
    each = tuple(None if count == 1 or spec == EACH else 0 for spec in in_specs)
    # Rows in all results: `vmap` does not know that values computed from a hook's state
    # are the same on all replicas.
    mapped = jax.vmap(on_replica, in_axes=each, axis_name=axis, axis_size=count)

    def on_one_device(*arguments: PyTree) -> tuple[PyTree, ...]:
        given = (
            tree if kind is None else in_parts(tree, count)
            for kind, tree in zip(each, arguments, strict=True)
        )
        return _brought_together(mapped(*given), out_specs)

    return on_one_device


def share_a_device(axis: Hashable) -> bool:
    """Whether the replicas of this axis, bound here, are the rows of a `vmap`."""
    # `shard_map` enters its axes into the mesh as manual; `vmap` binds no more than a
    # name.
    return axis not in jax.sharding.get_abstract_mesh().manual_axes


def summed(array: jax.Array, axis: Hashable) -> jax.Array:
    """The sum over all replicas, on each; call it where the axis is bound."""
    # XLA on CPU reduces the leading dimension of an array of 2 MiB in 6 ms, and adds
    # its two rows in 0.16 ms.
    if share_a_device(axis):
        return summed_in_order(array, axis)
    return jax.lax.psum(array, axis)


def gathered(array: jax.Array, axis: Hashable) -> jax.Array:
    """The arrays of all replicas as rows by rank, on each; where the axis is bound."""
    spare = -array.size % LANES
    if array.ndim != 1 or not spare or share_a_device(axis):
        return jax.lax.all_gather(array, axis)
    rows = jax.lax.all_gather(jnp.pad(array, (0, spare)), axis)
    return rows[:, : array.size]


def summed_in_order(array: jax.Array, axis: Hashable) -> jax.Array:
    """The sum in rank order, bit-equal on all replicas, at K times the traffic."""
    rows = gathered(array, axis)
    # A chain of additions: XLA may order the terms of a reduction as it likes.
    return reduce(jnp.add, [rows[rank] for rank in range(rows.shape[0])])


def as_row(tree: PyTree) -> PyTree:
    """Adds a leading axis of size 1: a replica's row of arrays over all replicas."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def in_parts(tree: PyTree, count: int) -> PyTree:
    """Divides the rows of all arrays in `count` parts, along a new first axis."""
    # The rows counted, not -1, which no array without elements determines.
    return jax.tree.map(
        lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), tree
    )


def own_row(tree: PyTree) -> PyTree:
    """Inverse of `as_row`: drops the leading axis of a replica's row."""
    return jax.tree.map(lambda x: x[0], tree)


def _brought_together(
    results: tuple[PyTree, ...], out_specs: Sequence[PartitionSpec]
) -> tuple[PyTree, ...]:
    return tuple(
        own_row(tree) if spec == EACH else jax.tree.map(_joined, tree)
        for spec, tree in zip(out_specs, results, strict=True)
    )


def _joined(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
