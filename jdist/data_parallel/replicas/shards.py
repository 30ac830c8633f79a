"""Splitting a batch over replicas, evenly or not, without changing its gradient.

One compiled program needs shards of one shape, so shorter shards are padded with rows
of weight 0. These are *real examples*, never zeros: a log, a norm or a square root at a
zero row has an infinite derivative, and 0 * inf = NaN survives any mask that is applied
to the loss afterwards.

    sizes (3, 1), batch a b c d:     replica 0: a b c      weights 1 1 1
                                     replica 1: d d d      weights 1 0 0
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdist._errors import check_number, check_sequence, value_error
from jdist._tree import PyTree, Shaped, check_arrays, examples_in, is_shape, wide_dtype
from jdist.data_parallel.replicas.placement import Placement
from jdist.reduction import weight_array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class BoundWeights:
    """Weights that are right for steps of one reduction only.

    Attributes:
      array: Shape `(rows,)`, as from `shard_batch`.
      reduction: The reduction of the step.
    """

    array: jax.Array
    reduction: str = field(metadata={"static": True})

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The numbers."""
        return np.array(self.array, dtype, copy=copy)


Weights = (
    jax.Array
    | np.ndarray
    | Sequence[float]
    | BoundWeights
    | jax.ShapeDtypeStruct
    | None
)
"""Weights of the examples or rows of a batch; None for 1 each; a shape, to lower a
program."""


def shard_batch(
    batch: PyTree,
    mesh: Mesh | None = None,
    sizes: Sequence[int] | None = None,
    *,
    replicas: int | None = None,
    weights: Weights = None,
    rows: int | None = None,
    data_axis: str = "data",
) -> tuple[PyTree, jax.Array]:
    """Splits a batch over replicas and gives every example its weight.

    Where the mesh spans several processes, each calls this with the examples that *it*
    has, for the replicas on its own devices, and all get the one global batch.

    Args:
      batch: Pytree of arrays, each of shape `(examples, ...)`. Examples go to replicas
        in order: the first `sizes[0]` to this process's first replica, and so on.
      mesh: The devices.
      sizes: Examples per replica, 0 allowed; None for sizes as equal as possible.
      replicas: In place of a mesh: a number of replicas that share one device.
      weights: `(examples,)`, finite, at least 0, not all 0 (in all processes together):
        a mask, or tokens per example. None for 1 each.
      rows: Rows per replica, padding included; None for the largest size. A fixed
        number keeps batches of all sizes in one compiled program, and can be divided
        into micro-batches. Several processes must name the same.
      data_axis: The mesh axis that counts replicas.

    Returns:
      The batch and its weights, padded to `rows` for each replica and laid out over the
      mesh, replica i's examples on the devices of row i. Padding repeats an example
      with weight 0; integer and boolean weights become float32. Steps refuse these
      arrays without their weights, if these are not all 1; they cannot recognise copies
      of the arrays, or arrays within a caller's `jax.jit`.

    Raises:
      ValueError: The sizes do not add up or there is not one per replica; a weight is
        negative, not finite, or all are 0; the mesh has no such axis; a mesh and
        replicas are given; the batch is empty or its leaves differ in length; `rows` is
        below a size, or None with several processes.
      TypeError: `rows` is not an integer, `sizes` are no integers, `weights` no
        numbers, or `data_axis` is no name; neither a mesh nor replicas are given.

    Example:
      >>> import numpy as np
      >>> batch, weights = shard_batch(np.arange(4.0), replicas=2, sizes=(3, 1))
      >>> batch.tolist(), weights.tolist()
      ([0.0, 1.0, 2.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    """
    placement = Placement.of("shard_batch", mesh, replicas, data_axis)
    return sharded(batch, placement, sizes, weights, rows)


def sharded(
    batch: PyTree,
    placement: Placement,
    sizes: Sequence[int] | None = None,
    weights: Weights = None,
    rows: int | None = None,
) -> tuple[PyTree, jax.Array]:
    """Splits a batch over replicas; see `shard_batch`."""
    call = "shard_batch"
    count = examples_in(batch, f"{call}(batch=...)")
    check_arrays(f"{call}(batch=...)", batch)
    own = len(placement.own())
    several = own < placement.count
    sizes = _check_sizes(sizes, count, own)
    rows = _check_rows(rows, sizes, several=several)
    weights = host_weights(call, weights, count, all_zero=several)
    # One indexing both splits and pads, so that every row is copied once.
    order, is_real = _padded_rows(sizes, rows)
    padded = jax.tree.map(lambda leaf: leaf[order], batch)
    padded_weights = np.where(is_real, weights[order], 0).astype(weights.dtype)
    given = (padded, padded_weights)
    place = None if placement.mesh is None else placement.rows
    if not several:
        found = jax.device_put(given, place)
    else:
        # `device_put` onto devices of other processes compares the values everywhere.
        found = jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(place, np.asarray(x)),
            given,
        )
    _remember(*found, needed=bool((padded_weights != 1).any()))
    return found


def rows_in(call: str, batch: PyTree, divisor: int) -> int:
    """The number of rows of a batch, which replicas and micro-batches must divide."""
    argument = f"{call}(batch=...)"
    count = examples_in(batch, argument)
    if count % divisor or not count:
        rule = f"must have a multiple of {divisor} rows, one or more for each "
        rule += "replica and micro-batch"
        remedy = "Use `shard_batch(..., rows=...)`, which pads with weight 0."
        raise value_error(argument, rule, f"{count} rows", remedy)
    return count


def _check_sizes(
    sizes: Sequence[int] | np.ndarray | None, count: int, replicas: int
) -> tuple[int, ...]:
    argument = "shard_batch(sizes=...)"
    if count == 0:
        rule = "must have at least one example"
        remedy = (
            "A process without examples gives one of its others with weight 0, as "
            "`Sampler.batches` and `Join` do: the padding repeats it."
        )
        raise value_error("shard_batch(batch=...)", rule, "none", remedy)
    if sizes is None:
        share, extra = divmod(count, replicas)
        return tuple(share + (rank < extra) for rank in range(replicas))
    rule = f"must be integers of at least 0, one for each of the {replicas} replicas, "
    rule += f"that add up to the batch's {count} examples"
    if isinstance(sizes, np.ndarray):
        sizes = sizes.tolist()
    check_sequence(argument, sizes, Integral, rule)
    found = tuple(map(int, sizes))
    if len(found) != replicas or min(found) < 0 or sum(found) != count:
        raise value_error(argument, rule, found)
    return found


def _check_rows(rows: int | None, sizes: tuple[int, ...], *, several: bool) -> int:
    argument = "shard_batch(rows=...)"
    if rows is None:
        if not several:
            return max(sizes)
        rule = "must be given where a mesh spans several processes"
        remedy = (
            "No process knows how many examples the others bring: pass one number on "
            "all, the most that a replica has anywhere. Here it would be "
            f"{max(sizes)}."
        )
        raise value_error(argument, rule, rows, remedy)
    rule = f"must be at least the largest of the sizes, {sizes}"
    check_number(argument, rows, rule, lambda n: n >= max(sizes), whole=True)
    return int(rows)


def host_weights(call: str, weights: Any, count: int, *, all_zero: bool) -> np.ndarray:
    """Checks weights that a process brings; `all_zero` as in `check_weight_values`."""
    if weights is None:
        return np.ones(count, np.float32)
    found = np.asarray(weight_array(f"{call}(weights=...)", weights))
    check_one_per_row(call, found, count)
    check_weight_values(call, found, all_zero=all_zero)
    return found


def unbound(weights: Weights) -> Weights:
    """Unwraps weights that are bound to a reduction; returns others unchanged."""
    return weights.array if isinstance(weights, BoundWeights) else weights


# By the address of an array, while it lives: weights of `shard_batch`, and arrays of
# its batches with the weights that they need.
_issued: dict[int, weakref.ref[jax.Array]] = {}
_needed: dict[int, tuple[weakref.ref[jax.Array], weakref.ref[jax.Array]]] = {}


def _remember(batch: PyTree, weights: jax.Array, *, needed: bool) -> None:
    def known(array: jax.Array, table: dict[int, Any]) -> weakref.ref[jax.Array]:
        place = id(array)
        return weakref.ref(array, lambda _: table.pop(place, None))

    own = _issued[id(weights)] = known(weights, _issued)
    for leaf in jax.tree.leaves(batch) if needed else ():
        _needed[id(leaf)] = known(leaf, _needed), own


def are_issued(weights: Weights) -> bool:
    """Whether weights come from `Join`, `Sampler.batches` or `shard_batch`."""
    if isinstance(weights, BoundWeights):
        return True
    found = _issued.get(id(weights))
    return found is not None and found() is weights


def check_weighted(call: str, batch: PyTree) -> None:
    """Checks that a batch which is given without weights needs none.

    Raises:
      ValueError: `shard_batch` has returned an array of it with weights that are not
        all 1. Where these are in the batch too, the loss function may use them.
    """
    if not _needed:
        return
    leaves = jax.tree.leaves(batch)
    for leaf in leaves:
        array, weights = _needed.get(id(leaf), (None, None))
        if array is None or weights is None or array() is not leaf:
            continue
        if not any(x is weights() for x in leaves):
            rule = "must be given with a batch whose rows `shard_batch` has weighted, "
            rule += "those of its padding by 0"
            remedy = (
                "Pass both, as `batch, weights = shard_batch(...)` returns them; or "
            )
            remedy += "ones, to count all rows."
            raise value_error(f"{call}(weights=...)", rule, None, remedy)


def weights_given(
    call: str, batch: PyTree, weights: Weights, count: int, reduction: str
) -> jax.Array | np.ndarray | jax.ShapeDtypeStruct | None:
    """Checks the weights given to a step: a number per row, or None for 1 each.

    Lists and tuples become arrays; integers and booleans become float32.

    Raises:
      ValueError: They are not `(count,)`, or on the host and seen to be wrong; or they
        are bound to another reduction, or None for a batch that needs them.
    """
    if weights is None:
        check_weighted(call, batch)
        return None
    if isinstance(weights, BoundWeights):
        if weights.reduction != reduction:
            rule = f"must be for a step with reduction={reduction!r}"
            got = f"those of a `Join` for {weights.reduction!r}"
            remedy = "Build the step with `reduction=joined.reduction`."
            raise value_error(f"{call}(weights=...)", rule, got, remedy)
        weights = weights.array
    if is_shape(weights):  # For a program that is only lowered.
        check_one_per_row(call, weights, count)
        floating = jnp.issubdtype(weights.dtype, jnp.floating)
        return weights if floating else weights.update(dtype=jnp.dtype(jnp.float32))
    weights = weight_array(f"{call}(weights=...)", weights)
    check_one_per_row(call, weights, count)
    # Weights in device memory are not read back: that would wait for the device.
    if not isinstance(weights, jax.Array):
        check_weight_values(call, weights)
    return weights


def check_one_per_row(call: str, weights: Shaped, count: int) -> None:
    """Checks the shape of weights that are given to a step."""
    if weights.shape != (count,):
        rule = f"must be one per row, shape ({count},)"
        raise value_error(f"{call}(weights=...)", rule, f"shape {weights.shape}")


def check_weight_values(
    call: str, weights: np.ndarray, *, all_zero: bool = False
) -> None:
    """Checks that weights cannot make a NaN: negative, not finite, or all zero.

    Their total must fit the devices' precision. `all_zero` allows weights that are all
    0, for a process where others have weights as well.
    """
    argument = f"{call}(weights=...)"
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if wrong.size:
        got = f"{weights[wrong[0]]} for example {wrong[0]}"
        raise value_error(argument, "must be finite and at least 0", got)
    if not all_zero and not weights.any():
        rule = "must not all be 0: there would be nothing to average"
        raise value_error(argument, rule, f"{weights.size} zeros")
    floating = jnp.issubdtype(weights.dtype, jnp.floating)
    dtype = jax.dtypes.canonicalize_dtype(weights.dtype if floating else np.float32)
    kept = jnp.finfo(wide_dtype(dtype))
    with np.errstate(over="ignore"):  # An overflow is refused below, by its value.
        # In float64, to see whether the precision of the devices can hold it.
        total = float(weights.sum(dtype=np.float64))
    if total and not float(kept.tiny) <= total <= float(kept.max):
        rule = f"must have a total between {kept.tiny:.2g} and {kept.max:.2g}, as "
        rule += f"{kept.dtype} can hold it"
        remedy = "Multiply them all by one number: a mean does not change."
        raise value_error(argument, rule, f"{total:.3g}", remedy)


def _padded_rows(sizes: tuple[int, ...], width: int) -> tuple[np.ndarray, np.ndarray]:
    """For each row of the padded batch: the example in it, and whether it counts."""
    starts = np.cumsum((0, *sizes[:-1]))
    position = np.arange(width)
    # A shard repeats its own last example; an empty one repeats the batch's first.
    rows = [
        start + np.minimum(position, size - 1) if size else np.zeros(width, int)
        for start, size in zip(starts, sizes, strict=True)
    ]
    return np.concatenate(rows), np.concatenate([position < size for size in sizes])
