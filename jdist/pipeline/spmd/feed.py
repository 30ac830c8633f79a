"""Inputs of an SPMD program from the batch, laid out over the devices.

A program needs micro-batches of one shape: shorter ones repeat their last example with
weight 0. It also needs arrays of one shape on all devices: devices that do not read an
entry hold a blank array in its place.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from numpy.typing import ArrayLike

from jdist._compat import shards_of
from jdist._tree import PyTree, examples_in
from jdist.pipeline.run.micro_batch import split_batch
from jdist.pipeline.run.stage_channels import Places
from jdist.pipeline.stages.array_spec import blank
from jdist.pipeline.stages.place import StageMesh, devices_of, laid, moved, spec_of


class Lots(NamedTuple):
    """Examples of a batch in micro-batches of one size.

    Attributes:
      order: Indices of the examples, `(micro_batches, rows)`; where one is excluded,
        that of one which counts.
      weights: Their weights, `(micro_batches, rows)`; 0 for padding.
      totals: The sum of each micro-batch's weights, float64, `(micro_batches,)`.
    """

    order: np.ndarray
    weights: np.ndarray
    totals: np.ndarray

    def of(self, leaf: PyTree) -> PyTree:
        """The rows of an array, `(micro_batches, rows, ...)`."""
        shape = (*self.order.shape, *leaf.shape[1:])
        # Where the rows are in order already, a reshape makes no copy.
        in_order = (self.order.ravel() == np.arange(self.order.size)).all()
        return leaf.reshape(shape) if in_order else leaf[self.order]


def lots(
    batch: PyTree, weights: ArrayLike | None, count: int, kind: str, parts: int = 1
) -> Lots:
    """Cut a batch as `split_batch` does, and pad its micro-batches.

    Args:
      batch: Named arrays.
      weights: Weights of the examples, or None.
      count: Number of micro-batches.
      kind: The reduction.
      parts: Number of equal parts into which the rows of a micro-batch are split.

    Raises: what `split_batch` raises.

    Example:
      >>> found = lots({"x": np.arange(5.0)}, None, 2, "sum")
      >>> found.order.tolist(), found.weights.tolist()
      ([[0, 1, 2], [3, 4, 4]], [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    """
    numbered = batch
    if isinstance(batch, dict):
        examples = examples_in(batch, "Pipeline.value_and_grad")
        # Only indices are cut, by the same rule as arrays elsewhere: the arrays are
        # copied once, in `Lots.of`.
        numbered = {"number": np.arange(examples)}
    cut = split_batch(numbered, weights, count, kind, parts)
    # Rounded up to a multiple of `parts`: the last micro-batch has the remainder, and
    # may be the longest one.
    rows = -(max(len(part.weights) for part in cut) // -parts) * parts

    def padded(own: np.ndarray, mode: Any) -> np.ndarray:
        return np.pad(own, (0, rows - len(own)), mode=mode)

    return Lots(
        np.stack([padded(part.batch["number"], "edge") for part in cut]),
        np.stack([padded(part.weights, "constant") for part in cut]),
        np.array([part.total for part in cut]),
    )


class Spread:
    """Conversion between arrays of single workers and arrays over all devices.

    The parts of the workers are concatenated along the first dimension, which the axis
    of workers divides. Over further axes of the mesh each part is sharded as it is on
    the mesh of its worker.

    Args:
      places: The workers and their places.
      mesh: The devices of all workers.
      axis: The mesh's axis of workers.
      abstract: Whether it makes shapes with shardings in place of arrays.
    """

    def __init__(
        self, places: Places, mesh: Mesh, axis: str, *, abstract: bool = False
    ) -> None:
        self._places = places
        self.abstract = abstract
        self._mesh = mesh
        self._axis = axis
        # Positions of each worker's devices among those of this process, the order in
        # which JAX lists the shards of an array.
        here = list(enumerate(mesh.local_devices))
        self._numbers = {
            rank: [n for n, device in here if device in devices_of(place)]
            for rank, place in enumerate(places.devices)
        }
        self._blanks: dict[Any, jax.Array] = {}
        place = places.devices[0]
        in_rows = isinstance(place, StageMesh) and place.data_axis
        self.rows = PartitionSpec(None, in_rows) if in_rows else PartitionSpec()
        """How micro-batches, `(micro_batches, rows, ...)`, are divided."""

    def together(
        self, parts: Sequence[PyTree], spec: PartitionSpec | None = None
    ) -> Any:
        """Join the parts of this process's workers into one array, without a copy.

        Args:
          parts: One for each worker of this process, of one shape; a scalar counts as
            an array of length 1.
          spec: How a part is sharded over the mesh of its worker; None: as it is now.
        """
        if self.abstract:
            return self._shape(parts[0], spec)
        pairs = zip(self._places.own, parts, strict=True)
        placed = [self._placed(part, rank, spec) for rank, part in pairs]
        first = placed[0]
        layout = self.sharding(spec_of(first) if spec is None else spec)
        shards = [shard for part in placed for shard in _shards(part)]
        shape = self._whole(first.shape)
        return jax.make_array_from_single_device_arrays(shape, layout, shards)

    def everywhere(self, value: PyTree, spec: PartitionSpec) -> Any:
        """An array with the same value at all workers."""
        return self.together([value] * len(self._places.own), spec)

    def _shape(self, part: PyTree, spec: PartitionSpec | None) -> jax.ShapeDtypeStruct:
        layout = self.sharding(spec_of(part) if spec is None else spec)
        shape = self._whole(np.shape(part))
        return jax.ShapeDtypeStruct(shape, jnp.result_type(part), sharding=layout)

    def apart(
        self, array: jax.Array, rank: int, like: jax.ShapeDtypeStruct
    ) -> jax.Array:
        """Extract the part of one worker of this process, without a copy.

        Args:
          array: An array with the parts of all workers.
          rank: Rank of the worker.
          like: Shape and sharding of a part.
        """
        place = self._places.devices[rank]
        shards = shards_of(array)
        parts = [shards[number] for number in self._numbers[rank]]
        # A scalar has an axis of length 1 in the program, along which devices join.
        if not like.shape:
            parts = [part.reshape(()) for part in parts]
        layout: Sharding
        if isinstance(place, StageMesh):
            layout = NamedSharding(place.mesh, spec_of(like))
        elif len(shards) > 1:
            return parts[0]
        else:
            # The only shard of an array keeps its sharding, over the axis of workers.
            layout = SingleDeviceSharding(place)
        return jax.make_array_from_single_device_arrays(like.shape, layout, parts)

    def only(
        self,
        worker: int,
        kind: jax.ShapeDtypeStruct,
        value: Callable[[], Any],
        spec: PartitionSpec,
    ) -> Any:
        """An array with a value at one worker, and blanks at the others."""
        if self.abstract:
            return self._shape(kind, spec)
        own = self._places.own
        parts = [
            value() if rank == worker else self._blank(rank, kind, spec) for rank in own
        ]
        return self.together(parts, spec)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """The sharding of an array whose parts have this specification."""
        first, *others = tuple(spec) or (None,)
        names = first if isinstance(first, tuple) else () if first is None else (first,)
        return NamedSharding(self._mesh, PartitionSpec((self._axis, *names), *others))

    def _whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        first, *others = shape or (1,)
        return (first * self._places.schedule.workers, *others)

    def _placed(self, part: PyTree, rank: int, spec: PartitionSpec | None) -> jax.Array:
        place = self._places.devices[rank]
        if not isinstance(part, jax.Array):
            part = np.asarray(part, jnp.result_type(part))
        if spec is None or not isinstance(place, StageMesh):
            return moved(part, place)
        return laid(part, NamedSharding(place.mesh, spec))

    def _blank(
        self, rank: int, kind: jax.ShapeDtypeStruct, spec: PartitionSpec
    ) -> jax.Array:
        # Kept for all steps: a blank is as large as the entry that it stands for.
        known = rank, kind, spec
        if known not in self._blanks:
            place: Any = self._places.devices[rank]
            if isinstance(place, StageMesh):
                place = NamedSharding(place.mesh, spec)
            self._blanks[known] = blank(kind, place)
        return self._blanks[known]


def _shards(part: jax.Array) -> list[jax.Array]:
    """The data on each device of this process, with at least one dimension."""
    found = shards_of(part)
    return found if part.ndim else [each.reshape(1) for each in found]
