"""Layouts of parameters over the mesh: those that are kept, and those refused.

A mesh may have further axes beside that of the replicas, and parameters may be divided
over them (tensor parallelism). The library's programs are manual over the axis of
replicas only. Over the further axes each array keeps its layout, the compiler adds the
communication that the model needs, and a gradient has its parameter's layout:

    mesh (data 4, model 2)          w: P(None, "model")      batch: P("data")
    replica (2 devices)             half of w on each        a quarter of the rows
    gradient                        P(None, "model"): one all-reduce over "data" of half
                                    the gradient on each device

Options that would gather such an array are refused: buckets and hooks, which join
gradients in flat buffers; the method "all_gather"; and parameters that are divided over
the replicas themselves, since each replica computes with whole parameters.
"""

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from jdist._compat import KEEPS_EXPLICIT_SHARDS, is_traced
from jdist._errors import value_error
from jdist._tree import PyTree, is_shape, named_leaves
from jdist.data_parallel.replicas.placement import Placement


def check_mesh(call: str, placement: Placement) -> bool:
    """Whether a mesh has further axes, which may be explicit from JAX 0.12 on.

    Raises:
      ValueError: A further axis is explicit, and this JAX is older.
    """
    mesh, further = placement.mesh, placement.further_axes()
    if mesh is None:
        return False
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axis = placement.axis
    for name in further:
        if types[name] == AxisType.Explicit and not KEEPS_EXPLICIT_SHARDS:
            rule = f"must have axes of type Auto beside {axis!r} before JAX 0.12"
            got = f"the explicit axis {name!r} and JAX {jax.__version__}"
            remedy = "This JAX would gather the parameters that are divided over it."
            raise value_error(f"{call}(mesh=...)", rule, got, remedy)
    return bool(further)


def check_alone(call: str, placement: Placement) -> None:
    """Checks that a mesh has no further axes, for options that would gather arrays.

    Raises:
      ValueError: There are some.
    """
    further = placement.further_axes()
    if further:
        rule = f"must have no axis beside {placement.axis!r}, over which a parameter "
        rule += "may be divided"
        got = f"axes {', '.join(map(repr, further))}"
        raise value_error(f"{call}(mesh=...)", rule, got)


def check_params(argument: str, params: PyTree, placement: Placement) -> None:
    """Checks that no replica would have to gather parameters.

    The layout of traced parameters is unknown; their gradient is right all the same.

    Args:
      argument: For the error, such as `"fn(params=...)"`.
      params: Pytree; what is whole on its devices is never refused.
      placement: The replicas. On one device they have no layout of their own.

    Raises:
      ValueError: A leaf is divided over the replicas, or not over this mesh.
    """
    if placement.mesh is None or not any(map(is_divided, jax.tree.leaves(params))):
        return
    axis = placement.axis
    for path, leaf in named_leaves(params).items():
        if not is_divided(leaf) or _is_kept(leaf.sharding, placement):
            continue
        rule = f"must be whole on each replica, or divided over axes beside {axis!r}"
        remedy = (
            "Lay them out with jax.device_put. `data_parallel.zero` divides the "
            "optimizer's state over the replicas; parameters that only fit divided "
            "over all devices take `jax.jit` with shardings of your own."
        )
        raise value_error(argument, rule, f"{leaf.sharding} at {path}", remedy)


def is_divided(leaf: object) -> bool:
    """Whether a leaf is seen to lie on its devices in parts, or will by its shape."""
    if is_shape(leaf):
        place = leaf.sharding
        return place is not None and not place.is_fully_replicated
    return (
        isinstance(leaf, jax.Array)
        and not is_traced(leaf)
        and not leaf.sharding.is_fully_replicated
    )


def _is_kept(sharding: Any, placement: Placement) -> bool:
    mesh: Any = placement.mesh
    if not isinstance(sharding, NamedSharding):
        return False
    own: PyTree = sharding.mesh
    if own.axis_names != mesh.axis_names or (own.devices != mesh.devices).any():
        return False
    # Where there is one replica, its axis divides nothing, whatever a spec names.
    if placement.count == 1:
        return True
    # An entry of a spec is a name, a tuple of names, or None.
    names = (n if isinstance(n, tuple) else (n,) for n in sharding.spec)
    return placement.axis not in {name for entry in names for name in entry}
