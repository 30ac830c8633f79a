"""The inputs of an SPMD program from the batch, laid out over the devices.

One program needs micro-batches of one shape: shorter ones repeat their last example
with weight 0. And it needs arrays of one shape on all devices: on devices that
do not read them they are blanks, made once.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike

from jdist._tree import PyTree, examples_in
from jdist.pipeline.run.micro_batch import split_batch
from jdist.pipeline.run.stage_channels import Places
from jdist.pipeline.stages.array_spec import ArraySpec
from jdist.pipeline.stages.place import moved


class Lots(NamedTuple):
    """The examples of a batch in micro-batches of one size.

    Attributes:
      order: Their numbers, `(micro_batches, rows)`.
      weights: Likewise; 0 for padding.
      totals: The sum of each micro-batch's weights, float64, `(micro_batches,)`.
    """

    order: np.ndarray
    weights: np.ndarray
    totals: np.ndarray

    def of(self, leaf: PyTree) -> PyTree:
        """The rows of an array, `(micro_batches, rows, ...)`."""
        shape = (*self.order.shape, *leaf.shape[1:])
        # No copy where nothing is padded.
        return leaf.reshape(shape) if self._is_even else leaf[self.order]

    @property
    def _is_even(self) -> bool:
        return bool(self.order[-1, -1] == self.order.size - 1)


def lots(batch: PyTree, weights: ArrayLike | None, count: int, kind: str) -> Lots:
    """Cuts a batch as `split_batch` does, and pads it.

    Raises: what `split_batch` raises.

    Example:
      >>> found = lots({"x": np.arange(5.0)}, None, 2, "sum")
      >>> found.order.tolist(), found.weights.tolist()
      ([[0, 1, 2], [3, 4, 4]], [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    """
    numbered = batch
    if isinstance(batch, dict):
        examples = examples_in(batch, "Pipeline.value_and_grad")
        # The numbers of the examples are cut, by the same rule as arrays elsewhere; the
        # arrays are copied once, by `Lots.of`.
        numbered = {"number": np.arange(examples)}
    parts = split_batch(numbered, weights, count, kind)
    rows = len(parts[0].weights)  # the first ones are the longest

    def padded(own: np.ndarray, mode: Any) -> np.ndarray:
        return np.pad(own, (0, rows - len(own)), mode=mode)

    return Lots(
        np.stack([padded(part.batch["number"], "edge") for part in parts]),
        np.stack([padded(part.weights, "constant") for part in parts]),
        np.array([part.total for part in parts]),
    )


class Spread:
    """Lays arrays out over the devices of a pipeline, as one array each.

    Args:
      places: The worker of each stage.
      mesh: The devices, along one axis.
    """

    def __init__(self, places: Places, mesh: Mesh) -> None:
        self._places = places
        self._sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
        self._blanks: dict[tuple[int, ArraySpec], jax.Array] = {}

    def together(self, parts: Sequence[PyTree]) -> jax.Array:
        """One array of the parts on this process's devices, which are not copied.

        Args:
          parts: One for each worker of this process, of one shape; a scalar counts as
            an array of length 1.
        """
        placed = [
            _placed(part, self._places.devices[rank])
            for rank, part in zip(self._places.own, parts, strict=True)
        ]
        first, *others = placed[0].shape
        shape = (first * self._places.schedule.workers, *others)
        return jax.make_array_from_single_device_arrays(shape, self._sharding, placed)

    def shape(self, part: PyTree) -> jax.ShapeDtypeStruct:
        """The shape of one array of such parts on the devices of all workers."""
        first, *others = np.shape(part) or (1,)
        shape = (first * self._places.schedule.workers, *others)
        kind = jnp.result_type(part)
        return jax.ShapeDtypeStruct(shape, kind, sharding=self._sharding)

    def only(self, worker: int, kind: ArraySpec, value: Callable[[], Any]) -> jax.Array:
        """A value on the device of one worker, and blanks on the others."""
        own = self._places.own
        return self.together(
            [value() if rank == worker else self._blank(rank, kind) for rank in own]
        )

    def _blank(self, rank: int, kind: ArraySpec) -> jax.Array:
        if (rank, kind) not in self._blanks:
            device = self._places.devices[rank]
            self._blanks[rank, kind] = kind.blank(device)
        return self._blanks[rank, kind]


def _placed(part: PyTree, device: jax.Device | None) -> PyTree:
    if not isinstance(part, jax.Array):
        part = np.asarray(part, jnp.result_type(part))
    return moved(part if part.ndim else part.reshape(1), device)
