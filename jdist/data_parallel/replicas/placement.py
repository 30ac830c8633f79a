"""Where replicas run: on the devices of a mesh axis, or together on one device.

Public functions take a mesh, or a number of replicas that share one device as the rows
of a `vmap`. Inside, a `Placement` stands for either.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist._errors import check_at_least, check_type, quoted, type_error, value_error


@dataclass(frozen=True, slots=True)
class Placement:
    """The replicas of a program; made by `of` from what a public function is given.

    Attributes:
      mesh: The devices; None where all replicas share one.
      count: Number of replicas.
      axis: Name of the mesh axis that counts them, or of the `vmap`'s.
    """

    mesh: Mesh | None
    count: int
    axis: str

    @classmethod
    def of(
        cls, call: str, mesh: object, replicas: int | None = None, axis: str = "data"
    ) -> Placement:
        """The placement that the arguments of a public function say.

        Args:
          call: The function, for the error's text.
          mesh: Its argument `mesh`: a mesh, or None.
          replicas: Its argument `replicas`: a number, or None.
          axis: Its argument `data_axis`.

        Raises:
          ValueError: Both are given; the mesh has no such axis; fewer than one replica.
          TypeError: Neither is given, or one is of another type.
        """
        check_type(f"{call}(data_axis=...)", axis, str, "must be a name, a str")
        check_given(call, mesh, replicas)
        if not isinstance(mesh, Mesh):
            assert replicas is not None
            return cls(None, int(replicas), axis)
        if axis not in mesh.shape:
            remedy = f"Name one of its axes, as in `data_axis={mesh.axis_names[0]!r}`."
            rule = f"must have the axis {axis!r}"
            got = f"a mesh with the axes {mesh.axis_names}"
            raise value_error(f"{call}(mesh=...)", rule, got, remedy)
        return cls(mesh, int(mesh.shape[axis]), axis)

    @property
    def whole(self) -> NamedSharding:
        """The sharding of an array that each replica has whole, on a mesh."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """The sharding of an array that is divided over the replicas, on a mesh."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(self.axis))

    def further_axes(self) -> tuple[str, ...]:
        """The axes of the mesh beside the replicas' that can divide an array."""
        sizes = {} if self.mesh is None else self.mesh.shape
        # An axis of one device divides nothing.
        return tuple(n for n, size in sizes.items() if n != self.axis and size > 1)

    def devices(self) -> np.ndarray:
        """The devices of a mesh, `(replicas, devices of each)`."""
        assert self.mesh is not None
        # The axis of replicas may be any of the mesh.
        rows = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(self.axis), 0)
        return rows.reshape(self.count, -1)

    def own(self) -> list[int]:
        """The replicas with a device in this process, in the order of the mesh.

        Raises:
          ValueError: It has none: such a process has nothing to bring or to compute.
        """
        if self.mesh is None:
            return list(range(self.count))
        here = jax.process_index()
        own = [
            rank
            for rank, row in enumerate(self.devices())
            if any(device.process_index == here for device in row)
        ]
        if not own:
            rule = "must have devices of every process that takes part"
            remedy = "Make it over `jax.devices()`, as `process_group` does."
            raise value_error("mesh", rule, f"none of process {here}", remedy)
        return own


def check_given(call: str, mesh: object, replicas: int | None) -> None:
    """Checks that a function is given a mesh or a number of replicas, and not both.

    Raises:
      ValueError: Both are given, or fewer than one replica.
      TypeError: Neither is given, or one is of another type.
    """
    argument = f"{call}(mesh=...)"
    if replicas is None:
        rule = "must be a jax.sharding.Mesh, or left out where `replicas=` is given"
        remedy = "Replicas that share one device: `replicas=2`."
        if not isinstance(mesh, Mesh):
            raise type_error(argument, rule, quoted(mesh), remedy)
        return
    if mesh is not None:
        rule = f"must be left out where `replicas={replicas!r}` is given"
        remedy = "A mesh has as many replicas as its axis has devices."
        raise value_error(argument, rule, quoted(mesh), remedy)
    check_at_least(f"{call}(replicas=...)", replicas, 1)
