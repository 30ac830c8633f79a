"""The layout of one array for another, also where only the compiler knows it.

JAX has this as `jax.experimental.shard_alike` up to 0.11; newer versions do not.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_alike_p = Primitive("alike")
# Groups of JAX's own `shard_alike` in the same program count from 0.
_groups = itertools.count(1 << 32)


def gathered(array: jax.Array) -> jax.Array:
    """`array`, whole on each device if explicit axes divide it; in jit and outside."""
    sharding: Any = jax.typeof(array).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    if not explicit or sharding.is_fully_replicated:
        return array
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))


def alike(array: jax.Array, like: jax.Array) -> jax.Array:
    """`array` with the layout of `like`, which has its shape; in jit and outside."""
    sharding: Any = jax.typeof(like).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        array = jax.sharding.reshard(array, sharding)
    # Under jit a layout over automatic axes is known to the compiler alone, and it is
    # the compiler that is told to make the two the same. `like` becomes an input of the
    # program by that, which jit otherwise forgets, together with the devices it lies
    # on, if no value depends on it.
    return _alike_p.bind(array, like)


def _batch(
    arrays: Sequence[jax.Array], axes: Sequence[int | None]
) -> tuple[jax.Array, int]:
    """Batches both arrays in front: a sharding group has arrays of one shape."""
    size = next(x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None)
    batched = (
        jnp.broadcast_to(x, (size, *x.shape)) if a is None else jnp.moveaxis(x, a, 0)
        for x, a in zip(arrays, axes, strict=True)
    )
    return _alike_p.bind(*batched), 0


def _lower(context: Any, array: Any, like: Any) -> list[Any]:
    group = next(_groups)
    for value in (array, like):
        sdy.sharding_group(value, group)
    return [array]


_alike_p.def_impl(lambda array, like: jax.jit(_alike_p.bind)(array, like))
_alike_p.def_abstract_eval(lambda array, like: array)
mlir.register_lowering(_alike_p, _lower)
batching.primitive_batchers[_alike_p] = _batch
# The layout is of the value: its tangent gets one where it is used.
ad.primitive_jvps[_alike_p] = lambda values, tangents: (
    _alike_p.bind(*values),
    tangents[0],
)
