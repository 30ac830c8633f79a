"""Splitting a batch over replicas, evenly or not, without changing its gradient.

One compiled program needs shards of one shape, so shorter shards are padded and the
padding gets weight 0. It is padded with *real examples*, never zeros: a log, a norm or
a square root at a zero row has an infinite derivative, and 0 * inf = NaN survives any
mask that is applied to the loss afterwards.

    sizes (3, 1), batch a b c d:     replica 0: a b c      weights 1 1 1
                                     replica 1: d d d      weights 1 0 0
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist._errors import requirement
from jdist._tree import examples_in


def shard_batch(
    batch: Any,
    mesh: Mesh | int,
    sizes: Sequence[int] | None = None,
    *,
    weights: Any = None,
    axis: str = "data",
) -> tuple[Any, jax.Array]:
    """Splits a batch over replicas and gives every example its weight.

    Args:
      batch: Pytree of arrays, each of shape `(examples, ...)`. Examples go to replicas
        in order: the first `sizes[0]` to replica 0, and so on.
      mesh: The devices; or a number of replicas that share one device, for
        `jax.vmap`.
      sizes: Examples per replica, 0 allowed; None for sizes as equal as possible.
      weights: `(examples,)`, finite, at least 0, not all 0: a mask, or tokens per
        example. None for 1 each.
      axis: The mesh axis that counts replicas.

    Returns:
      The batch and its weights, padded to `K * max(sizes)` examples and laid out over
      the mesh, replica i's examples on the devices of row i. Padding repeats an example
      with weight 0; integer and boolean weights become float32.

    Raises:
      ValueError: The sizes do not add up or there is not one per replica; a weight is
        negative, not finite, or all are 0; the mesh has no such axis; the batch is
        empty or its leaves differ in length.

    Example:
      >>> import numpy as np
      >>> batch, weights = shard_batch(np.arange(4.0), 2, sizes=(3, 1))
      >>> batch.tolist(), weights.tolist()
      ([0.0, 1.0, 2.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    """
    call = "shard_batch"
    count = examples_in(batch, f"{call}(batch=...)")
    replicas = replicas_of(mesh, axis, call)
    sizes = _check_sizes(sizes, count, replicas)
    weights = _check_weights(weights, count)
    rows, is_real = _padded_rows(sizes)
    padded = jax.tree.map(lambda leaf: leaf[rows], batch)
    padded_weights = np.where(is_real, weights[rows], 0).astype(weights.dtype)
    if isinstance(mesh, int):
        return jax.device_put((padded, padded_weights))
    return jax.device_put(
        (padded, padded_weights), NamedSharding(mesh, PartitionSpec(axis))
    )


def replicas_of(mesh: Mesh | int, axis: str, call: str) -> int:
    """The number of replicas that a mesh, or a plain number, stands for.

    Raises:
      ValueError: The mesh has no such axis, or the number is below 1.
      TypeError: `mesh` is neither a mesh nor an integer.
    """
    if isinstance(mesh, Mesh):
        if axis in mesh.shape:
            return int(mesh.shape[axis])
        remedy = f"Name one of its axes, as in `axis={mesh.axis_names[0]!r}`."
        rule = f"must have the axis {axis!r}"
        got = f"a mesh with the axes {mesh.axis_names}"
        raise ValueError(requirement(f"{call}(mesh=...)", rule, got, remedy))
    rule = "must be a jax.sharding.Mesh or a number of replicas on one device"
    if isinstance(mesh, bool) or not isinstance(mesh, int):
        raise TypeError(requirement(f"{call}(mesh=...)", rule, repr(mesh)))
    if mesh < 1:
        raise ValueError(requirement(f"{call}(mesh=...)", f"{rule}, at least 1", mesh))
    return mesh


def _check_sizes(
    sizes: Sequence[int] | None, count: int, replicas: int
) -> tuple[int, ...]:
    argument = "shard_batch(sizes=...)"
    if count == 0:
        rule = "must have at least one example"
        raise ValueError(requirement("shard_batch(batch=...)", rule, "none"))
    if sizes is None:
        share, extra = divmod(count, replicas)
        return tuple(share + (rank < extra) for rank in range(replicas))
    sizes = tuple(map(operator.index, sizes))
    if len(sizes) != replicas:
        rule = f"must have one size for each of the {replicas} replicas"
        raise ValueError(requirement(argument, rule, f"{len(sizes)} sizes, {sizes}"))
    if min(sizes) < 0:
        raise ValueError(requirement(argument, "must be at least 0 each", sizes))
    if sum(sizes) != count:
        rule = f"must add up to the batch's {count} examples"
        got = f"{' + '.join(map(str, sizes))} = {sum(sizes)}"
        raise ValueError(requirement(argument, rule, got))
    return sizes


def _check_weights(weights: Any, count: int) -> np.ndarray:
    if weights is None:
        return np.ones(count, np.float32)
    weights = np.asarray(weights)
    if not np.issubdtype(weights.dtype, np.floating):
        weights = weights.astype(np.float32)
    if weights.shape != (count,):
        rule = f"must be one per example, shape ({count},)"
        got = f"shape {weights.shape}"
        raise ValueError(requirement("shard_batch(weights=...)", rule, got))
    check_weight_values("shard_batch", weights)
    return weights


def check_weight_values(call: str, weights: np.ndarray) -> None:
    """Refuses weights that would make a NaN: negative, not finite, or all zero."""
    argument = f"{call}(weights=...)"
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if wrong.size:
        got = f"{weights[wrong[0]]} for example {wrong[0]}"
        rule = "must be finite and at least 0"
        raise ValueError(requirement(argument, rule, got))
    if not weights.any():
        rule = "must not all be 0: there would be nothing to average"
        got = f"{weights.size} zeros"
        raise ValueError(requirement(argument, rule, got))


def _padded_rows(sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """For each row of the padded batch: the example in it, and whether it counts."""
    width = max(sizes)
    starts = np.cumsum((0, *sizes[:-1]))
    position = np.arange(width)
    # A shard repeats its own last example; an empty one repeats the batch's first.
    rows = [
        start + np.minimum(position, size - 1) if size else np.zeros(width, int)
        for start, size in zip(starts, sizes, strict=True)
    ]
    return np.concatenate(rows), np.concatenate([position < size for size in sizes])
