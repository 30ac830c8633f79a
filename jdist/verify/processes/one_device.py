"""The reference on one device, whatever mesh its arguments lie on or is set.

Along explicit axes layouts are types, and a loss may name the axes: by `reshard`, or by
`out_sharding=` where JAX could not decide. Such a loss cannot be traced without its
mesh, nor for a single example on that mesh, which would have to divide it. So it is
traced on a mesh of the same axes, each of one device: names mean what they meant, and
nothing is divided. The same mesh is in the place of that of `jax.set_mesh`, under which
JAX computes on no other devices. Candidates run under the caller's own.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdist._compat import axes_of_one_device_untyped
from jdist._tree import PyTree

_context: ContextVar[tuple[Mesh, ExitStack] | None] = ContextVar(
    "reference's mesh, and what sets it", default=None
)


def _enter(mesh: Mesh, settings: ExitStack) -> None:
    """Sets the reference's mesh until the settings are closed."""
    settings.enter_context(jax.set_mesh(mesh))
    settings.enter_context(axes_of_one_device_untyped())


@contextmanager
def on_one_device(*arguments: PyTree) -> Iterator[None]:
    """Sets the mesh of one device, if these arguments or the caller's mesh need one."""
    mesh = _mesh_of(arguments)
    if mesh is None:
        yield
        return
    first = np.array(mesh.local_devices[:1]).reshape((1,) * len(mesh.axis_names))
    single = Mesh(first, mesh.axis_names, axis_types=mesh.axis_types)
    with ExitStack() as settings:
        _enter(single, settings)
        token = _context.set((single, settings))
        try:
            yield
        finally:
            _context.reset(token)


@contextmanager
def as_the_caller() -> Iterator[None]:
    """Restores the caller's mesh for a block inside `on_one_device`."""
    context = _context.get()
    if context is None:
        yield
        return
    token = _context.set(None)
    _, settings = context
    settings.close()
    try:
        yield
    finally:
        _enter(*context)
        _context.reset(token)


def brought(tree: PyTree) -> PyTree:
    """The tree with its arrays on the reference's device."""
    context = _context.get()
    if context is None:
        return tree
    there = NamedSharding(context[0], PartitionSpec())

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf  # What has no place yet is put there as it is used.
        if not leaf.is_fully_addressable:
            leaf = _whole(leaf)
        return jax.device_put(leaf, there)

    return jax.tree.map(one, tree)


def _whole(array: jax.Array) -> jax.Array:
    """An array over several processes, all of which make this call, on one device."""
    sharding: Any = array.sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    with as_the_caller(), jax.set_mesh(None):
        gathered = jax.jit(lambda x: x, out_shardings=everywhere)(array)
    return gathered.addressable_data(0)


def _mesh_of(arguments: PyTree) -> Mesh | None:
    """The mesh that is set; else one with explicit axes that an argument lies on."""
    own = jax.sharding.get_mesh()
    if not own.empty:
        return own
    # An iterator, which is refused later, is not a tree to JAX.
    for leaf in jax.tree.leaves(arguments, lambda x: isinstance(x, Iterator)):
        place = leaf.sharding if isinstance(leaf, jax.Array) else None
        # With automatic axes the compiler divides the work, as it did before.
        if isinstance(place, NamedSharding) and (
            AxisType.Explicit in place.mesh.axis_types or not leaf.is_fully_addressable
        ):
            mesh: Any = place.mesh
            return mesh
    return None
