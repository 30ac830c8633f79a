"""What the processes of one mesh tell each other, beside the programs that they run."""

import functools
import json

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist._tree import PyTree

__all__ = ["processes_of", "rows_of_processes", "told_by_processes"]


def processes_of(mesh: Mesh) -> list[int]:
    """The process of each device, in the mesh's order."""
    return [device.process_index for device in mesh.devices.flat]


def rows_of_processes(mesh: Mesh, row: np.ndarray) -> dict[int, np.ndarray]:
    """The row of numbers of each process; a collective.

    Args:
      mesh: All processes that have a device of it call this.
      row: Of this process, of one size in all of them.
    """
    layout = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (mesh.devices.size, row.size)
    rows = jax.make_array_from_callback(shape, layout, lambda _: row[None])
    found = np.asarray(_everywhere(mesh)(rows).addressable_data(0))
    return dict(zip(processes_of(mesh), found, strict=True))


def told_by_processes(mesh: Mesh, value: PyTree) -> list[PyTree]:
    """What every process tells, in the order of their numbers; a collective.

    Args:
      mesh: All processes that have a device of it call this.
      value: Of numbers, texts and lists.
    """
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = rows_of_processes(mesh, np.array([text.size], np.int32))
    most = max(int(size[0]) for size in sizes.values())
    padded = np.zeros(most, np.uint8)
    padded[: text.size] = text
    found = rows_of_processes(mesh, padded)
    texts = [bytes(found[p][: int(sizes[p][0])]) for p in sorted(found)]
    return [json.loads(each) for each in texts]


@functools.lru_cache(maxsize=16)
def _everywhere(mesh: Mesh) -> jax.stages.Wrapped:
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda rows: rows, out_shardings=whole)
