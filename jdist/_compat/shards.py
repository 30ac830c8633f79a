"""Computations over the devices of a mesh."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

KEEPS_EXPLICIT_SHARDS = jax.__version_info__ >= (0, 12)
"""Whether arrays stay divided over an explicit axis where they enter a `shard_map` that
is manual over another one. XLA gathers them before JAX 0.12."""


def varying_axes(array: jax.Array) -> frozenset[Hashable]:
    """The mesh axes over which shard_map *knows* that `array` differs.

    Empty outside shard_map, and inside shard_map with `check_vma=False`. JAX renamed
    the attribute: `vma` up to 0.9, `manual_axis_type.varying` from 0.10.
    """
    kind = getattr(jax.typeof(array), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def tracks_varying_axes(axis_name: Hashable) -> bool:
    """Whether the surrounding shard_map checks what varies over `axis_name`."""
    # Only a checking shard_map gives `axis_index` a varying type. False under pmap and
    # vmap, whose tracers carry no such type.
    return axis_name in varying_axes(jax.lax.axis_index(axis_name))


def map_shards(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_specs: Sequence[Any],
    out_specs: Any,
    axis: str | None = None,
) -> Callable[..., Any]:
    """`jax.shard_map` without the check of varying axes, for any type of mesh.

    Without the check, gradients taken inside `fn` are each shard's own, loops need no
    casts of their carries, and the outputs of `all_gather` count as replicated. A mesh
    with explicit axes refuses inputs that are laid out differently; they are
    re-sharded here, as a mesh with automatic axes does by itself.

    With `axis` the function sees the shards of that axis only, and the specs name no
    other. Over the mesh's further axes, which are automatic, arrays stay divided as
    they were given, and the compiler adds the communication that this takes.
    """
    mapped = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        axis_names=frozenset(mesh.axis_names if axis is None else (axis,)),
        check_vma=False,
    )
    # With automatic axes JAX lays the inputs out itself.
    if AxisType.Explicit not in mesh.axis_types:
        return mapped

    def reshard(array: jax.Array, spec: PartitionSpec) -> jax.Array:
        if axis is not None:
            spec = _beside(jax.typeof(array).sharding.spec, axis, spec, array.ndim)
        return _reshard(array, mesh, spec)

    def resharded(*arguments: Any) -> Any:
        placed = (
            jax.tree.map(lambda x, spec=spec: reshard(x, spec), argument)
            for argument, spec in zip(arguments, in_specs, strict=True)
        )
        return mapped(*placed)

    return resharded


def shards_of(array: jax.Array) -> list[jax.Array]:
    """The data on each device of this process, in the order of its sharding's devices.

    `addressable_shards` also makes what is not wanted here, an index of each: 160 us
    against 24 for an array that is whole on 8 devices.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):  # PRNG keys
        return [shard.data for shard in array.addressable_shards]
    return list(array._arrays)  # type: ignore[attr-defined]


def after(array: jax.Array, earlier: jax.Array) -> jax.Array:
    """`array`, bit for bit, but never before `earlier` has been computed."""
    if not array.size or not earlier.size:
        return array
    # One element suffices for a dependence, and the rest is not copied through `where`.
    own = jax.lax.slice(array, (0,) * array.ndim, (1,) * array.ndim)
    signal = jax.lax.slice(earlier, (0,) * earlier.ndim, (1,) * earlier.ndim)
    # XLA merges collectives that do not depend on each other (on CPU in its pass
    # `cpu-all-reduce-combiner`) and takes `optimization_barrier` out before it looks.
    # What it respects is a dependence on data: the comparison is false for every number
    # and for NaN, and XLA does not know.
    never = signal.real.reshape(()) < -jnp.inf
    kept = jnp.where(never, jnp.zeros_like(own), own)
    return jax.lax.dynamic_update_slice(array, kept, (0,) * array.ndim)


def zeros_of(shape: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of an array's shape, dtype and explicit axes, for a trace."""
    if not isinstance(shape, jax.ShapeDtypeStruct) or shape.sharding is None:
        return jnp.zeros_like(shape)
    # `zeros_like` drops the explicit axes of a shape.
    return jnp.zeros(shape.shape, shape.dtype, out_sharding=shape.sharding)


def laid_out(array: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """`array` with a layout over any type of mesh, inside jit and outside."""
    # To automatic axes a layout is a constraint on the compiler, to explicit ones a
    # part of the array's type.
    if AxisType.Explicit in mesh.axis_types:
        return _reshard(array, mesh, spec)
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def _beside(
    given: PartitionSpec, axis: str, own: PartitionSpec, dimensions: int
) -> PartitionSpec:
    """`own`, which names `axis` alone, and what `given` has of the other axes."""

    def names(spec: PartitionSpec, dimension: int) -> tuple[str, ...]:
        entry = spec[dimension] if dimension < len(spec) else None
        return entry if isinstance(entry, tuple) else (entry,) if entry else ()

    entries = (
        (*names(own, d), *(name for name in names(given, d) if name != axis))
        for d in range(dimensions)
    )
    return PartitionSpec(*(entry or None for entry in entries))


def _reshard(array: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return jax.sharding.reshard(array, NamedSharding(mesh, spec))
