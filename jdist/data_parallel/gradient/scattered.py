"""Reduce-scatter of gradients for ZeRO: each replica keeps one part of every sum.

If the optimizer's state is divided over K replicas, each needs 1/K of every sum. A
reduce-scatter computes no more than that, and sends half the bytes of an all-reduce.

Arrays are divided along the first dimension that K divides. Several arrays are sent as
rows, one per replica, so that its parts of all arrays are contiguous:

    a, 4 x 3, and b, 5 x 2, over 2        row 0:  a[0:2]  b[:, 0:1]
                                          row 1:  a[2:4]  b[:, 1:2]
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

Shape = tuple[int, ...]


def scattered_dimension(shape: Shape, replicas: int) -> int | None:
    """The first dimension that the replicas divide; None if there is none."""
    even = (i for i, size in enumerate(shape) if size % replicas == 0)
    return next(even, None)


def scattered_spec(shape: Shape, replicas: int, axis: str) -> PartitionSpec:
    """The layout of a sum afterwards: divided, or whole if no dimension divides."""
    dimension = scattered_dimension(shape, replicas)
    if dimension is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * dimension, axis)


def can_scatter(mesh: Mesh) -> bool:
    """Whether a reduce-scatter over these devices is reliable."""
    # Between CPU devices of a distributed runtime gloo runs it, also within a process,
    # and has returned wrong numbers (JAX issue 40830).
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return not (on_cpu and jax.distributed.is_initialized())


def by_replica(arrays: Sequence[jax.Array], replicas: int) -> tuple[jax.Array, int]:
    """Joins arrays of one dtype in a buffer; returns it and the dimension to divide."""
    dimensions = [_dimension(x.shape, replicas) for x in arrays]
    # A single array keeps its shape, so that it is not copied.
    if len(arrays) == 1:
        return arrays[0], dimensions[0]
    rows = [_rows(x, d, replicas) for x, d in zip(arrays, dimensions, strict=True)]
    return jnp.concatenate(rows, axis=1), 0


def part_shape(shape: Shape, replicas: int) -> Shape:
    """The shape of one replica's part of an array."""
    d = _dimension(shape, replicas)
    return (*shape[:d], shape[d] // replicas, *shape[d + 1 :])


def _dimension(shape: Shape, replicas: int) -> int:
    found = scattered_dimension(shape, replicas)
    assert found is not None  # Only such arrays are scattered.
    return found


def _rows(array: jax.Array, dimension: int, replicas: int) -> jax.Array:
    """The part of each replica as a row, shape `(replicas, size / replicas)`."""
    before, after = array.shape[:dimension], array.shape[dimension + 1 :]
    each = array.shape[dimension] // replicas
    parts = array.reshape(*before, replicas, each, *after)
    row = math.prod((*before, each, *after))
    return jnp.moveaxis(parts, dimension, 0).reshape(replicas, row)
