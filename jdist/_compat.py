"""The only file that knows JAX versions and what is not plain public API.

Everything else in jdist uses names that JAX documents. What differs between the
supported releases (0.10.2 and newer), or is reachable but undocumented, is wrapped
here, with a test in `tests/test_compat.py` that fails when JAX changes it.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def double_precision() -> AbstractContextManager[None]:
    """Within it JAX computes with 64-bit types, whatever the global setting."""
    return jax.enable_x64(True)


def set_cpu_device_count(count: int) -> None:
    """Gives this process `count` CPU devices; before the first JAX computation only.

    Raises:
      RuntimeError: A JAX computation has already started the backend. (JAX's own.)
    """
    jax.config.update("jax_num_cpu_devices", count)


def is_traced(value: object) -> bool:
    """Whether `value` is known only by shape and dtype, inside a JAX transformation."""
    return isinstance(value, jax.core.Tracer)


def varying_axes(array: jax.Array) -> frozenset[Hashable]:
    """The mesh axes over which shard_map *knows* that `array` differs.

    Empty outside shard_map, and inside shard_map with `check_vma=False`. JAX renamed
    the attribute: `vma` up to 0.9, `manual_axis_type.varying` from 0.10.
    """
    kind = getattr(jax.typeof(array), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def tracks_varying_axes(axis_name: Hashable) -> bool:
    """Whether the surrounding shard_map checks what varies over `axis_name`.

    Only a checking shard_map gives `axis_index` a varying type. False under pmap and
    vmap, whose tracers carry no such type.
    """
    return axis_name in varying_axes(jax.lax.axis_index(axis_name))


def map_shards(
    fn: Callable[..., Any], mesh: Mesh, in_specs: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` without the check of varying axes, for any type of mesh.

    Without the check, gradients taken inside `fn` are each shard's own, loops need no
    casts of their carries, and the outputs of `all_gather` count as replicated. A mesh
    with explicit axes refuses inputs that are laid out differently; they are
    re-sharded here, as a mesh with automatic axes does by itself.
    """
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False
    )
    if AxisType.Explicit not in mesh.axis_types:
        return mapped

    def resharded(*arguments: Any) -> Any:
        placed = (
            jax.tree.map(lambda x, spec=spec: _reshard(x, mesh, spec), argument)
            for argument, spec in zip(arguments, in_specs, strict=True)
        )
        return mapped(*placed)

    return resharded


def _reshard(array: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return jax.sharding.reshard(array, NamedSharding(mesh, spec))
