"""The tap as a JAX primitive: an identity that passes its value to the host.

- Compiled, it calls the host with its value and passes the value on.
- `vmap` gives it one more leading axis, which it counts; it still calls once.
- Differentiated, its tangent passes through a linear identity, whose transpose is a tap
  again, of the cotangent and the value. So the rows of a cotangent are identified by
  those of its value, in whatever order micro-batches, shards and threads arrive.
- Inside of `shard_map` it has one array more: the device's coordinates in the mesh.

It has no effect in JAX's sense: checkpoints, loops and split backward passes treat it
like any other equation. To XLA it is a call with side effects, so that none is dropped.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

from jdist._compat import is_partitioned

Receiver = Callable[[str, int, Sequence[np.ndarray]], None]
"""`receive(name, axes, arrays)`: called by XLA's threads, with arrays of its own.

The arrays are the value, or the cotangent and the value, then the coordinates if there
are any; `axes` is how many of their leading axes are those of `vmap`.
"""

Deliver = Callable[[Sequence[np.ndarray]], None]
"""A receiver that has a tap's name and axes."""

tap_p = Primitive("tap")
# A primitive of its own, because only a linear one can be transposed.
tangent_p = Primitive("tap_tangent")


def show(*arrays: jax.Array, name: str, receive: Receiver, kept: int = 1) -> jax.Array:
    """Returns the first array; `receive` gets all of them when the program runs.

    The last `kept` arrays identify a cotangent, and are passed with it.
    """
    return tap_p.bind(*arrays, name=name, receive=receive, axes=0, kept=kept)


def _first(x: ShapedArray, *_: object, **__: object) -> ShapedArray:
    return x


# --- without a transformation, and compiled ---


def _run(*arrays: jax.Array, **params: Any) -> jax.Array:
    _delivery(**params)([np.array(x) for x in arrays])
    return arrays[0]


def _delivery(*, name: str, receive: Receiver, axes: int, **_: object) -> Deliver:
    return partial(receive, name, axes)


def _staged_on_cpu(
    deliver: Deliver, partitioned: bool, *arrays: jax.Array
) -> jax.Array:
    dtypes = [x.dtype for x in arrays]

    def run(_: object, buffers: Sequence[np.ndarray], *inputs: ArrayLike) -> None:
        # Copied, because XLA reuses this memory after the callback has returned.
        views = zip(map(np.asarray, inputs), dtypes, strict=True)
        own = [x.astype(d, copy=True) for x, d in views]
        for buffer in buffers:
            np.asarray(buffer)[...] = own[0]
        deliver(own)

    # Not `io_callback`: it puts its inputs on a device, which may need the very thread
    # that the callback runs on.
    if not partitioned:
        buffer_callback(run, (), has_side_effect=True)(*arrays)
        return arrays[0]
    # The partitioner refuses side effects on an unknown device. So every device makes
    # this call, with the whole value, and its result is used, which keeps the call.
    shapes = [jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)]
    return buffer_callback(run, shapes)(*arrays)[0]


def _staged_elsewhere(deliver: Deliver, _: bool, *arrays: jax.Array) -> jax.Array:
    def run(*inputs: ArrayLike) -> None:
        deliver([np.array(x) for x in inputs])

    io_callback(run, None, *arrays)
    return arrays[0]


def _lower(stage: Callable[..., jax.Array]) -> Callable[..., Any]:
    def lower(
        context: mlir.LoweringRuleContext, *values: object, **params: Any
    ) -> object:
        own = partial(stage, _delivery(**params), is_partitioned(context))
        staged = mlir.lower_fun(own, multiple_results=False)
        return staged(context, *values)

    return lower


tap_p.def_impl(_run)
tap_p.def_abstract_eval(_first)
mlir.register_lowering(tap_p, _lower(_staged_elsewhere))
mlir.register_lowering(tap_p, _lower(_staged_on_cpu), platform="cpu")
tangent_p.def_impl(lambda tangent, *_, **__: tangent)
tangent_p.def_abstract_eval(_first)
mlir.register_lowering(tangent_p, lambda context, tangent, *_, **__: [tangent])


# --- vmap ---


def _batched(primitive: Primitive) -> Callable[..., Any]:
    def batch(
        arrays: Sequence[Any],
        axes_of: Sequence[int | None],
        *,
        axes: int,
        **params: object,
    ) -> tuple[jax.Array, int]:
        pairs = list(zip(arrays, axes_of, strict=True))
        size = next(x.shape[axis] for x, axis in pairs if axis is not None)
        rows = [
            jnp.broadcast_to(x, (size, *x.shape))
            if axis is None
            else jnp.moveaxis(x, axis, 0)
            for x, axis in pairs
        ]
        return primitive.bind(*rows, axes=axes + 1, **params), 0

    return batch


for primitive in (tap_p, tangent_p):
    batching.primitive_batchers[primitive] = _batched(primitive)


# --- derivatives ---


def _differentiate(
    primitive: Primitive,
    primals: Sequence[jax.Array],
    tangents: Sequence[jax.Array | ad.Zero],
    kept: int,
    **params: object,
) -> tuple[jax.Array, jax.Array | ad.Zero]:
    found = primitive.bind(*primals, kept=kept, **params)
    if isinstance(tangents[0], ad.Zero):
        return found, tangents[0]
    # The value, one of the last arrays, identifies its tangent.
    return found, tangent_p.bind(tangents[0], *primals[-kept:], kept=kept, **params)


def _transpose(
    cotangent: jax.Array | ad.Zero,
    tangent: jax.Array,
    *kept: jax.Array,
    **params: object,
) -> tuple[jax.Array | ad.Zero | None, ...]:
    del tangent
    none = (None,) * len(kept)
    if type(cotangent) is ad.Zero:
        # A cotangent that is symbolically zero has nothing to show.
        return cotangent, *none
    return tap_p.bind(cotangent, *kept, **params), *none


for primitive in (tap_p, tangent_p):
    ad.primitive_jvps[primitive] = partial(_differentiate, primitive)
ad.primitive_transposes[tangent_p] = _transpose
