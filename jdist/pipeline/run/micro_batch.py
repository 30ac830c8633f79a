"""Splits a batch into micro-batches, with each example's share of the whole batch.

The weights of a mean become shares w / S w of the whole batch: the backward pass of an
example begins with its share, in every split as in `jax.grad` of the mean, and a mean
is a sum from there on (see `jdist.reduction`).

Weight 0 excludes an example: 0 times the derivative of a loss of 0 / 0 would be NaN.
Before the batch is cut for a backward pass, an example that counts takes the place of
those that do not: in all entries, and from the whole batch, so that a micro-batch of
excluded examples has its numbers too.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jdist._errors import type_error, value_error
from jdist._tree import PyTree, examples_in, is_shape, type_name
from jdist.reduction import host_weights, without_excluded


class MicroBatch(NamedTuple):
    """A part of a batch.

    Attributes:
      number: Number of the micro-batch, from 0.
      batch: Its entries.
      weights: `(examples,)`, float32 or wider; see `normalized`.
      total: The sum of the weights; in an epoch that of the weights as they were given,
        in units of a power of two.
    """

    number: int
    batch: dict[str, PyTree]
    weights: np.ndarray
    total: float


class MicroBatchSource(Protocol):
    """Micro-batches by number: a list, a dict or a `BatchStream`."""

    def __getitem__(self, number: int, /) -> MicroBatch: ...


def split_batch(
    batch: PyTree,
    weights: ArrayLike | None,
    count: int,
    kind: str,
    rows: int = 1,
    *,
    replacing: bool = True,
) -> list[MicroBatch]:
    """Splits a batch into `count` micro-batches of nearly equal size.

    Where the examples do not divide, the first ones have more. No example is added or
    left out: each counts by its share of the whole batch, so that uneven parts add up
    to its gradient.

    Args:
      batch: Mapping of names to pytrees of arrays, each `(examples, ...)`.
      weights: `(examples,)`, non-negative, or None for 1 each.
      count: Number of micro-batches; at most the number of examples.
      kind: The reduction.
      rows: The numbers of examples are multiples of it; the remainder is in the last
        micro-batch.
      replacing: Whether an example that counts takes the place of those of weight 0,
        for a backward pass.

    Raises:
      TypeError: The batch is no mapping.
      ValueError: It has fewer examples than `count`, or than `rows` for each
        micro-batch; its leaves have unequal length; the weights are of another shape,
        negative, not finite, or all zero; those of a sum are beyond float32.

    Example:
      >>> parts = split_batch({"x": np.arange(5.0)}, None, 2, "mean")
      >>> [part.batch["x"].tolist() for part in parts]
      [[0.0, 1.0, 2.0], [3.0, 4.0]]
    """
    examples = _examples(batch, "Pipeline.value_and_grad")
    if examples < count:
        rule = f"must have an example for each of the {count} micro-batches"
        remedy = "Make the batch larger, or the schedule with fewer micro-batches."
        call = "Pipeline.value_and_grad(batch)"
        raise value_error(call, rule, f"{examples} examples", remedy)
    checked = None
    if weights is not None:
        checked = check_weights(weights, examples, "Pipeline.value_and_grad")
    if examples < count * rows:
        rule = f"must have {rows} examples for each of the {count} micro-batches, one "
        rule += "for each part of the data axis"
        remedy = "Make the batch larger, the schedule with fewer micro-batches, or the "
        remedy += "data axis shorter."
        call = "Pipeline.value_and_grad(batch)"
        raise value_error(call, rule, f"{examples} examples", remedy)
    # Multiples of `rows` divide over the data axis; only the last micro-batch, which
    # has the remainder, may be whole on every device.
    lots, left = divmod(examples, rows)
    sizes = [rows * (lots // count + (i < lots % count)) for i in range(count)]
    sizes[-1] += left
    bounds = tuple(itertools.pairwise([0, *np.cumsum(sizes).tolist()]))
    leaves, structure = jax.tree.flatten(batch)
    some = None if checked is None or checked.all() or not replacing else checked
    pieces = [_cut(x, bounds, some) for x in leaves]
    if checked is None:
        parts = _of_weight_one(bounds, kind, jnp.result_type(float))
    else:
        parts = _without_entries(checked, bounds, kind)
    return [
        part._replace(batch=jax.tree.unflatten(structure, [x[i] for x in pieces]))
        for i, part in enumerate(parts)
    ]


# Cached, because it takes 50 us a micro-batch and most batches have no weights.
@functools.lru_cache(maxsize=64)
def _of_weight_one(
    bounds: "Bounds", kind: str, precision: np.dtype
) -> list[MicroBatch]:
    parts = _without_entries(np.ones(bounds[-1][1], precision), bounds, kind)
    for part in parts:
        part.weights.flags.writeable = False
    return parts


def _without_entries(
    weights: np.ndarray, bounds: "Bounds", kind: str
) -> list[MicroBatch]:
    """Micro-batches with the weights between the bounds, normalised."""
    whole = normalized(weights, kind, "Pipeline.value_and_grad")
    numbered = enumerate(bounds)
    return [_weighted(i, {}, whole[start:end]) for i, (start, end) in numbered]


def normalized(weights: np.ndarray, kind: str, call: str) -> np.ndarray:
    """The weights of a whole batch as shares, for a mean.

    Those are as wide as the precision in use allows, as in `reduction.shares`. For max
    and min they become 0 or 1. For a sum they are unchanged.

    Args:
      weights: Weights of all examples, of which one is above 0.
      kind: The reduction.
      call: The public function, for the error's text.

    Raises:
      ValueError: A weight of a sum is beyond float32.

    Example:
      >>> normalized(np.array([5.0, 1.0, 2.0]), "mean", "train_step").tolist()
      [0.625, 0.125, 0.25]
    """
    if kind == "sum":
        _check_sum(weights, call)
        return weights
    if kind != "mean":
        return (weights > 0).astype(weights.dtype)
    # In float64, and rounded once: with the losses, if they can be float64.
    wide = _in_units(weights, weights)
    # A positive weight must stay positive, because its example counts. Beside a total
    # of 1 the smallest float32 adds nothing.
    tiny = float(np.finfo(np.float32).tiny)
    shares = np.where(weights > 0, np.maximum(wide / wide.sum(), tiny), 0.0)
    return shares.astype(jnp.result_type(float))


def total_beside(weights: np.ndarray, others: np.ndarray) -> float:
    """The total of some weights, in units of a power of two near that of others.

    Args:
      weights: Some weights.
      others: Others, of which one is above 0.

    Example:
      >>> [total_beside(np.array(own), np.array([2.0, 3.0])) for own in ([5.0], [4.0])]
      [0.625, 0.5]
    """
    # A power of two rounds nothing: no bit of an average depends on the unit.
    _, exponent = np.frexp(_in_units(others, others).sum())
    with np.errstate(over="ignore"):
        return float(np.ldexp(_in_units(weights, others).sum(), -exponent))


def _in_units(weights: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Weights in float64, in units of a power of two near the largest of others."""
    # So that the sum of weights in float64 does not overflow.
    _, exponent = np.frexp(others.max())
    with np.errstate(over="ignore"):
        return np.ldexp(weights.astype(np.float64), -exponent)


def _check_sum(weights: np.ndarray, call: str) -> None:
    """Refuses weights of a sum that are beyond float32.

    Raises:
      ValueError: A weight is beyond float32.
    """
    # A sum changes with a factor of its weights, so that these cannot be normalised.
    largest = weights.max()
    if largest > np.finfo(np.float32).max:
        rule = "must be within float32 where losses are added up"
        remedy = "Divide them, or use the mean, which does not change with a factor."
        raise value_error(f"{call}(weights=...)", rule, largest, remedy)


def _weighted(number: int, batch: PyTree, weights: np.ndarray) -> MicroBatch:
    return MicroBatch(number, batch, weights, _total(weights))


def _total(weights: np.ndarray) -> float:
    # In float64: gradients in double precision may have weights in float32.
    with np.errstate(over="ignore"):
        return float(weights.sum(dtype=np.float64))


Bounds = tuple[tuple[int, int], ...]


def _cut(array: Any, bounds: Bounds, weights: np.ndarray | None) -> Sequence[PyTree]:
    """Slices an array, or a shape, at the bounds, without excluded examples.

    Args:
      array: `(examples, ...)`.
      bounds: The first and the last example of each slice.
      weights: `(examples,)`, 0 where an example is excluded; None if none is.
    """
    if is_shape(array):
        rows = [end - start for start, end in bounds]
        return [array.update(shape=(size, *array.shape[1:])) for size in rows]
    if isinstance(array, jax.Array):
        # One compiled call for all slices costs as much as dispatching one of them.
        return _cut_compiled(array, bounds, weights)
    if weights is None:
        return [array[start:end] for start, end in bounds]
    # As in `without_excluded`, and without a copy of slices where all count.
    order = np.where(weights == 0, np.argmax(weights != 0), np.arange(len(weights)))
    return [
        array[start:end] if weights[start:end].all() else array[order[start:end]]
        for start, end in bounds
    ]


@functools.partial(jax.jit, static_argnums=1)
def _cut_compiled(
    array: jax.Array, bounds: Bounds, weights: jax.Array | None
) -> list[jax.Array]:
    if weights is not None:
        array = without_excluded(array, weights)
    return [array[start:end] for start, end in bounds]


def in_epoch(part: MicroBatch, kind: str, first: MicroBatch, call: str) -> MicroBatch:
    """A whole batch as a micro-batch of an epoch, normalised by itself.

    Args:
      part: The return value of `micro_batch_of`.
      kind: The reduction, "mean" or "sum".
      first: The first such batch of the epoch that has a weight above 0.
      call: The public function, for the error's text.

    Raises:
      ValueError: A weight of a sum is beyond float32; or the total of a mean's weights
        is too far from the first one's.
    """
    weights = part.weights
    # Nothing of it counts, and there is no example to put in the place of the others.
    if not weights.any():
        return part
    if not weights.all():
        leaves, structure = jax.tree.flatten(part.batch)
        whole = [_cut(x, ((0, len(weights)),), weights)[0] for x in leaves]
        part = part._replace(batch=jax.tree.unflatten(structure, whole))
    own = normalized(weights, kind, call)
    if kind == "sum":
        return part._replace(weights=own)
    total = total_beside(weights, first.weights)
    # Beyond that float32 could not hold the smaller totals beside the larger ones.
    if not 2.0**-64 <= total <= 2.0**64:
        rule = "must have totals within a factor of 2^64 of the first one's"
        got = f"totals of {first.total:.3g} in batch {first.number} and "
        got += f"{part.total:.3g} in batch {part.number}"
        raise value_error(f"{call}(weights=...)", rule, got)
    return part._replace(weights=own, total=total)


def micro_batch_of(
    number: int, batch: PyTree, weights: ArrayLike | None, call: str
) -> MicroBatch:
    """Makes a whole batch one micro-batch, whose weights may all be 0, as given.

    Args:
      number: Number of the micro-batch.
      batch: As for `split_batch`.
      weights: As for `split_batch`.
      call: The public function, for the error's text.

    Raises: what `split_batch` raises.
    """
    checked = check_weights(weights, _examples(batch, call), call, some=False)
    return _weighted(number, batch, checked)


def _examples(batch: PyTree, call: str) -> int:
    if not isinstance(batch, dict):
        rule = "must be a dict of named arrays, from which stages and loss take theirs"
        raise type_error(f"{call}(batch)", rule, type_name(batch))
    return examples_in(batch, call)


def size_of_batch(batch: PyTree, weights: ArrayLike | None) -> tuple[int, float]:
    """Number of examples with a weight above 0, and the sum of the weights."""
    if weights is None:
        examples = len(jax.tree.leaves(batch)[0])
        return examples, float(examples)
    given = np.asarray(weights)
    return int((given > 0).sum()), _total(given)


def check_weights(
    weights: ArrayLike | None, examples: int, call: str, *, some: bool = True
) -> np.ndarray:
    """Checks the weights of a batch; returns them as an array on the host.

    Args:
      weights: As for `split_batch`.
      examples: Number of examples of the batch.
      call: The public function, for the error's text.
      some: Whether one of them must be above 0.

    Raises:
      ValueError: See `split_batch`.
    """
    if weights is None:
        return np.ones(examples, np.float32)
    call = f"{call}(weights=...)"
    found = host_weights(call, weights)
    if found.shape != (examples,):
        rule = f"must be one number for each of the {examples} examples"
        raise value_error(call, rule, f"shape {found.shape}")
    if not (np.isfinite(found).all() and (found >= 0).all()):
        rule = "must be finite and not negative"
        raise value_error(call, rule, f"{found.min()} to {found.max()}")
    if some and not found.any():
        raise value_error(call, "must not all be zero", f"{examples} zeros")
    return found


def entry_of(batch: Mapping[str, PyTree], name: str, taker: str) -> PyTree:
    """Looks up an entry of the batch.

    Raises:
      ValueError: It is neither in the batch nor an output of a stage.
    """
    if name in batch:
        return batch[name]
    rule = f"must output {name!r}, or the batch have it, because {taker} takes it"
    raise value_error("Pipeline(stages)", rule, f"a batch of {sorted(batch)}")
