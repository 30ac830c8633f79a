"""The call inside a compiled program: a callback of XLA.

Everything in it is NumPy: its inputs are views of XLA's buffers, and it writes results
into buffers of XLA's. To put an array on a device there could need the very thread that
it runs on.
"""

import traceback
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback
from jax.typing import ArrayLike, DTypeLike

from jdist.autograd.call_primitive.arguments import AbstractArray, abstract_of
from jdist.autograd.call_primitive.callback_threads import callback_threads
from jdist.autograd.call_primitive.caller import Target, calling
from jdist.autograd.call_primitive.transforms import Transform
from jdist.rpc import RemoteError


def staged_on_cpu(
    target: Target,
    operations: tuple[Transform, ...],
    results: Sequence[AbstractArray],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """The call as part of the program that is being traced."""

    kinds = [abstract_of(x) for x in arrays]

    def run(context: object, buffers: Sequence[Any], *inputs: ArrayLike) -> None:
        views = zip(map(np.asarray, inputs), kinds, strict=True)
        # Back from the dtype in which the buffer carries them.
        given = [view.astype(kind.dtype, copy=False) for view, kind in views]
        found = _waited_for(target, operations, results, given)
        for buffer, result in zip(buffers, found, strict=True):
            np.asarray(buffer)[...] = result

    # A side effect: XLA neither drops it nor makes it twice.
    shapes = [jax.ShapeDtypeStruct(k.shape, _carrier(k.dtype)) for k in results]
    staged = buffer_callback(run, shapes, has_side_effect=True)
    found = staged(
        *[x.astype(_carrier(k.dtype)) for x, k in zip(arrays, kinds, strict=True)]
    )
    return [x.astype(k.dtype) for x, k in zip(found, results, strict=True)]


def staged_elsewhere(
    target: Target,
    operations: tuple[Transform, ...],
    results: Sequence[AbstractArray],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """The same on accelerators, whose buffers NumPy cannot read."""

    def run(*inputs: ArrayLike) -> list[jax.Array]:
        return _waited_for(target, operations, results, inputs)

    shapes = [jax.ShapeDtypeStruct(k.shape, k.dtype) for k in results]
    return io_callback(run, shapes, *arrays)


def _waited_for(
    target: Target,
    operations: tuple[Transform, ...],
    results: Sequence[AbstractArray],
    inputs: Sequence[ArrayLike],
) -> list[jax.Array]:
    try:
        arrays = [np.asarray(x) for x in inputs]
        with callback_threads().occupied(str(target)), calling(target) as caller:
            return caller.call(target, operations, arrays, results, host=True)
    except Exception as error:  # noqa: BLE001 - XLA hands it to the caller
        # XLA makes one text of type and message, and drops notes, among which is the
        # traceback of the other worker.
        raise RemoteError("".join(traceback.format_exception(error))) from None


def _carrier(dtype: np.dtype) -> DTypeLike:
    """The dtype in which a buffer holds such numbers, exactly."""
    # Two numbers of 4 bits share a byte in XLA's memory, but not in NumPy's: a view of
    # theirs would be a copy, and what is written to it would be lost.
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return jnp.float32
    return dtype
