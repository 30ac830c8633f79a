"""Splits a batch into micro-batches and normalises their weights."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from numpy.typing import ArrayLike

from jdist._errors import requirement
from jdist._tree import PyTree, examples_in, is_shape
from jdist.reduction import weight_array


class MicroBatch(NamedTuple):
    """A part of a batch.

    Attributes:
      number: Number of the micro-batch, from 0.
      batch: Its entries.
      weights: `(examples,)`, float32 or wider, normalised by `normalized`.
      total: The sum of the normalised weights.
      given: The sum of the weights that the user gave.
    """

    number: int
    batch: dict[str, PyTree]
    weights: np.ndarray
    total: float
    given: float


class MicroBatchSource(Protocol):
    """Micro-batches by number: a list, a dict or a `BatchStream`."""

    def __getitem__(self, number: int, /) -> MicroBatch: ...


def split_batch(
    batch: PyTree, weights: ArrayLike | None, count: int, kind: str, rows: int = 1
) -> list[MicroBatch]:
    """Splits a batch into `count` micro-batches of nearly equal size.

    Where the examples do not divide, the first ones have more. No example is added or
    left out: each counts by its weight, so that uneven parts add up to the gradient of
    the whole batch.

    Args:
      batch: Mapping of names to pytrees of arrays, each `(examples, ...)`.
      weights: `(examples,)`, non-negative, or None for 1 each.
      count: Number of micro-batches; at most the number of examples.
      kind: The reduction.
      rows: The numbers of examples are multiples of it; the remainder is in the last
        micro-batch.

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
        raise ValueError(requirement(call, rule, f"{examples} examples", remedy))
    checked = None
    if weights is not None:
        checked = check_weights(weights, examples, "Pipeline.value_and_grad")
    if examples < count * rows:
        rule = f"must have {rows} examples for each of the {count} micro-batches, one "
        rule += "for each part of the data axis"
        remedy = "Make the batch larger, the schedule with fewer micro-batches, or the "
        remedy += "data axis shorter."
        call = "Pipeline.value_and_grad(batch)"
        raise ValueError(requirement(call, rule, f"{examples} examples", remedy))
    # Multiples of `rows` divide over the data axis; only the last micro-batch, which
    # has the remainder, may be whole on every device.
    lots, left = divmod(examples, rows)
    sizes = [rows * (lots // count + (i < lots % count)) for i in range(count)]
    sizes[-1] += left
    bounds = tuple(itertools.pairwise([0, *np.cumsum(sizes).tolist()]))
    leaves, structure = jax.tree.flatten(batch)
    pieces = [_cut(x, bounds) for x in leaves]
    if checked is None:
        parts = _of_weight_one(bounds, kind)
    else:
        parts = _without_entries(checked, bounds, kind)
    return [
        part._replace(batch=jax.tree.unflatten(structure, [x[i] for x in pieces]))
        for i, part in enumerate(parts)
    ]


# Cached, because it takes 50 us a micro-batch and most batches have no weights.
@functools.lru_cache(maxsize=64)
def _of_weight_one(bounds: "Bounds", kind: str) -> list[MicroBatch]:
    parts = _without_entries(np.ones(bounds[-1][1], np.float32), bounds, kind)
    for part in parts:
        part.weights.flags.writeable = False
    return parts


def _without_entries(
    weights: np.ndarray, bounds: "Bounds", kind: str
) -> list[MicroBatch]:
    """Micro-batches with the weights between the bounds, normalised."""
    numbered = enumerate(bounds)
    parts = [_weighted(i, {}, weights[start:end]) for i, (start, end) in numbered]
    return normalized(parts, kind, "Pipeline.value_and_grad")


def normalized(parts: Sequence[MicroBatch], kind: str, call: str) -> list[MicroBatch]:
    """Normalises the weights of micro-batches so that float32 can add them up.

    For a mean the largest total is in (1/2, 1]. For max and min weights are 0 or 1.
    For a sum they are unchanged.

    Args:
      parts: All micro-batches that are joined with each other.
      kind: The reduction.
      call: The public function, for the error's text.

    Raises:
      ValueError: A weight of a sum is beyond float32.

    Example:
      >>> parts = split_batch({"x": np.arange(3.0)}, [1e38, 3e38, 2e38], 1, "mean")
      >>> parts[0].weights.round(3), round(parts[0].total, 3)
      (array([0.147, 0.441, 0.294]), 0.882)
    """
    if kind == "sum":
        check_sum([part.weights for part in parts], call)
        return list(parts)
    if kind == "mean":
        # A mean does not change with a factor of all weights, and a power of two
        # rounds nothing: neither totals nor the cotangents of 16-bit losses overflow,
        # and no total vanishes.
        exponent = exponent_of(parts)
        return [scaled_down(part, exponent) for part in parts]
    chosen = [(part.weights > 0).astype(part.weights.dtype) for part in parts]
    return [
        part._replace(weights=own, total=_total(own))
        for part, own in zip(parts, chosen, strict=True)
    ]


def exponent_of(parts: Sequence[MicroBatch]) -> int:
    """The exponent of the smallest power of two not below any total of weights.

    Args:
      parts: Micro-batches, of which one has a weight above 0.
    """
    # Divided by a power near the largest weight first, so that the sum of float64
    # weights does not overflow.
    _, top = np.frexp(max(part.weights.max() for part in parts))
    scaled = [np.ldexp(part.weights.astype(np.float64), -top) for part in parts]
    fraction, exponent = np.frexp(max(own.sum() for own in scaled))
    return int(top + (exponent - 1 if fraction == 0.5 else exponent))


def scaled_down(part: MicroBatch, exponent: int) -> MicroBatch:
    """Divides the weights of a micro-batch by a power of two.

    Args:
      part: The micro-batch.
      exponent: Exponent of the power; see `exponent_of`.
    """
    # In float64: a division in float32 may round to denormal numbers, or to 0.
    wide = np.ldexp(part.weights.astype(np.float64), -exponent)
    # A positive weight must stay positive, because its example counts, also where the
    # quotient is 0 in float64. Beside totals near 1 the smallest float32 adds nothing.
    tiny = float(np.finfo(np.float32).tiny)
    wide = np.where(part.weights > 0, np.maximum(wide, tiny), 0.0)
    own = wide.astype(part.weights.dtype)
    return part._replace(weights=own, total=_total(own))


def check_sum(weights: Sequence[np.ndarray], call: str) -> None:
    """Refuses weights of a sum that are beyond float32.

    Raises:
      ValueError: A weight is beyond float32.
    """
    # A sum changes with a factor of its weights, so that these cannot be normalised.
    largest = max(own.max() for own in weights)
    if largest > np.finfo(np.float32).max:
        rule = "must be within float32 where losses are added up"
        remedy = "Divide them, or use the mean, which does not change with a factor."
        raise ValueError(requirement(f"{call}(weights=...)", rule, largest, remedy))


def _weighted(number: int, batch: PyTree, weights: np.ndarray) -> MicroBatch:
    total = _total(weights)
    return MicroBatch(number, batch, weights, total, total)


def _total(weights: np.ndarray) -> float:
    # In float64: gradients in double precision may have weights in float32.
    with np.errstate(over="ignore"):  # Normalised totals, which count, are near 1.
        return float(weights.sum(dtype=np.float64))


Bounds = tuple[tuple[int, int], ...]


def _cut(array: Any, bounds: Bounds) -> Sequence[PyTree]:
    """Slices an array, or a shape, at the bounds."""
    if is_shape(array):
        rows = [end - start for start, end in bounds]
        return [array.update(shape=(size, *array.shape[1:])) for size in rows]
    if isinstance(array, jax.Array):
        # One compiled call for all slices costs as much as dispatching one of them.
        return _cut_compiled(array, bounds)
    return [array[start:end] for start, end in bounds]


@functools.partial(jax.jit, static_argnums=1)
def _cut_compiled(array: jax.Array, bounds: Bounds) -> list[jax.Array]:
    return [array[start:end] for start, end in bounds]


def micro_batch_of(
    number: int, batch: PyTree, weights: ArrayLike | None, call: str
) -> MicroBatch:
    """Makes a whole batch one micro-batch, whose weights may all be 0.

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
        got = f"a {type(batch).__name__}"
        raise TypeError(requirement(f"{call}(batch)", rule, got))
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
    found = np.asarray(weight_array(call, weights))
    # float64 is kept for models in double precision.
    if found.dtype != np.float64:
        found = found.astype(np.float32)
    if found.shape != (examples,):
        rule = f"must be one number for each of the {examples} examples"
        raise ValueError(requirement(call, rule, f"shape {found.shape}"))
    if not (np.isfinite(found).all() and (found >= 0).all()):
        rule = "must be finite and not negative"
        raise ValueError(requirement(call, rule, f"{found.min()} to {found.max()}"))
    if some and not found.any():
        rule = "must not all be zero"
        raise ValueError(requirement(call, rule, f"{examples} zeros"))
    return found


def entry_of(batch: Mapping[str, PyTree], name: str, taker: str) -> PyTree:
    """Looks up an entry of the batch.

    Raises:
      ValueError: It is neither in the batch nor an output of a stage.
    """
    if name in batch:
        return batch[name]
    rule = f"must put out {name!r}, or the batch have it, because {taker} takes it"
    got = f"a batch of {sorted(batch)}"
    raise ValueError(requirement("Pipeline(stages)", rule, got))
