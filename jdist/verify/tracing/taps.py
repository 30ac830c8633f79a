"""Taps: identities that mark values, without an equation outside of recordings."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jdist._errors import quoted, requirement
from jdist._tree import PyTree, path_of
from jdist.verify.tracing.primitive import show
from jdist.verify.tracing.recording import Delivery, MeshAxis, under_way

Tree = TypeVar("Tree")


def tap(x: Tree, /, name: str, **axes: int | None) -> Tree:
    """Marks a value for `verify.trace`; the identity, also to derivatives.

    Inside `shard_map` a device has a shard of the value. `tap(x, "k", cp=1, tp=2)` says
    that dimension 1 is divided over the mesh axis "cp" and dimension 2 over "tp", and
    `tap(x, "h", tp=None)` that all devices along "tp" have the same value. Each shard
    is compared with the reference's part, and each copy with the whole. Where these
    axes do not exist, as on one device, they are ignored.

    Args:
      x: Array or pytree of arrays, of any shapes. Its floating leaves are marked,
        integers, such as the experts that are chosen, and masks.
      name: The value's name, such as "block3/attention". It may occur again: in a
        loop, or where a layer is called twice. Leaves of a tree get their paths added.
      **axes: Mesh axes to the dimension that is divided over them, in equal blocks in
        the order of the devices; negative ones count from the last. None for copies.
        Axes over which the examples are divided need no mention. Without a mention, a
        division is inferred from the shapes, if only one explains them.

    Returns:
      `x`. Outside of a recording no equation is added to the program.

    Raises:
      ValueError: The name is not a string, or empty; a dimension that the value does
        not have.
      TypeError: A dimension is neither a whole number nor None.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> hidden = lambda w, x: tap(jnp.tanh(x * w), "hidden")
      >>> [str(e.primitive) for e in jax.make_jaxpr(hidden)(2.0, 3.0).eqns]
      ['mul', 'tanh']
    """
    if not (isinstance(name, str) and name):
        rule = "must be a string that is not empty"
        raise ValueError(requirement("tap(name=...)", rule, quoted(name)))
    for axis, dim in axes.items():
        if not (dim is None or isinstance(dim, int)) or isinstance(dim, bool):
            rule = "must be a dimension of the value, or None for copies"
            raise TypeError(requirement(f"tap({axis}=...)", rule, quoted(dim)))
    # Part of the key of JAX's caches: programs are traced again in a recording.
    if not under_way.value:
        return x

    def marked(keys: tuple[Any, ...], leaf: PyTree) -> PyTree:
        kinds = jnp.number, jnp.bool_
        if not any(jnp.issubdtype(getattr(leaf, "dtype", object), x) for x in kinds):
            return leaf
        own = f"{name}/{path_of(keys)}" if keys else name
        mesh = _mesh_axes(axes, jnp.ndim(leaf))
        if not mesh:
            return show(leaf, name=own, receive=Delivery())
        place = jnp.stack([lax.axis_index(each.name) for each in mesh])
        return show(leaf, place, name=own, receive=Delivery(mesh), kept=2)

    found: Tree = jax.tree.map_with_path(marked, x)
    return found


def _mesh_axes(axes: Mapping[str, int | None], ndim: int) -> tuple[MeshAxis, ...]:
    """The axes along which devices have values of their own, and what is declared."""
    mesh = jax.sharding.get_abstract_mesh()
    names = dict.fromkeys(
        [*axes, *(a for a in mesh.axis_names if a in mesh.manual_axes)]
    )
    found = []
    for name in names:
        try:
            size = lax.axis_size(name)
        except NameError:
            continue  # The program is on one device, or XLA divides it.
        dim = axes.get(name)
        if dim is not None and not -ndim <= dim < ndim:
            rule = f"must be a dimension of a value with {ndim}"
            raise ValueError(requirement(f"tap({name}=...)", rule, quoted(dim)))
        if size > 1:
            own = dim if dim is None else dim % ndim
            found.append(MeshAxis(name, size, own, name in axes))
    return tuple(found)
