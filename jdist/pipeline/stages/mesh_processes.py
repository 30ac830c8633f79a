"""Collectives on host data between the processes of one mesh."""

import json

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist._tree import PyTree
from jdist.pipeline.stages.place import on_host

__all__ = ["processes_of", "rows_of_processes", "told_by_processes"]


def processes_of(mesh: Mesh) -> list[int]:
    """The process of each device, in the mesh's order."""
    return [device.process_index for device in mesh.devices.flat]


def rows_of_processes(mesh: Mesh, row: np.ndarray) -> dict[int, np.ndarray]:
    """Gather a row of numbers from each process; a collective.

    Args:
      mesh: The mesh; all processes that have a device of it call this.
      row: The row of this process, of the same size in all of them.
    """
    layout = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (mesh.devices.size, row.size)
    rows = jax.make_array_from_callback(shape, layout, lambda _: row[None])
    return dict(zip(processes_of(mesh), on_host(rows), strict=True))


def told_by_processes(mesh: Mesh, value: PyTree) -> list[PyTree]:
    """Gather a value from each process, in the order of their numbers; a collective.

    Args:
      mesh: The mesh; all processes that have a device of it call this.
      value: A value of numbers, strings and lists.
    """
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    # Sizes first: all rows of one collective have the same size.
    sizes = rows_of_processes(mesh, np.array([text.size], np.int32))
    most = max(int(size[0]) for size in sizes.values())
    padded = np.zeros(most, np.uint8)
    padded[: text.size] = text
    found = rows_of_processes(mesh, padded)
    texts = [bytes(found[p][: int(sizes[p][0])]) for p in sorted(found)]
    return [json.loads(each) for each in texts]
