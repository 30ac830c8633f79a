"""Arrays on their way: aligned memory, bytes of an array, and placing on a device.

JAX on CPU takes NumPy memory over without a copy exactly when its address is a multiple
of 64, so large arrays are received into such memory.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jdist._compat import double_precision, weakly_typed

_ALIGNMENT = 64


def aligned(nbytes: int) -> memoryview:
    """Writable memory, not initialised, whose address is a multiple of 64.

    Example:
      >>> len(aligned(100))
      100
    """
    whole = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -whole.__array_interface__["data"][0] % _ALIGNMENT
    return whole.data[start : start + nbytes]


def host(leaf: Any) -> np.ndarray:
    """The elements of a leaf in C order: a view where that is possible.

    Waits for a JAX array that is being computed, and gathers one that is sharded.
    """
    array = leaf if type(leaf) is np.ndarray else np.asarray(leaf)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def place(
    array: np.ndarray, device: jax.Device | None, weak: bool = False
) -> jax.Array:
    """A JAX array on `device` with the elements of `array`, which nobody else writes.

    On CPU the memory itself is taken over if it is aligned. The dtype stays what it is
    even where JAX's 64-bit types are switched off: what arrives is what was sent.

    Args:
      array: C-contiguous; its dtype one that JAX knows.
      device: The array is committed to it. None for JAX's default, not committed.
      weak: Whether its type yields to others in promotion, as a Python number's does.
    """
    wide = array.dtype.itemsize >= 8
    with double_precision() if wide else contextlib.nullcontext():
        if device is None:
            placed = jax.device_put(array)
        else:
            # Does what device_put does in half the time: 13 us, not 28, at 3 x 3.
            placed = jax.make_array_from_callback(
                array.shape, _only_on(device), lambda index: array
            )
        return weakly_typed(placed) if weak else placed


@functools.cache
def _only_on(device: jax.Device) -> SingleDeviceSharding:
    return SingleDeviceSharding(device)


def adopt(leaves: Sequence[Any], device: jax.Device | None) -> list[Any]:
    """What a worker receives of the leaves of another one in the same process.

    NumPy arrays are copied, because either side may write to its own. JAX arrays
    cannot be written: they are shared, or moved if they are not on `device`.
    """
    return [_adopted(leaf, device) for leaf in leaves]


def _adopted(leaf: Any, device: jax.Device | None) -> Any:
    if type(leaf) is np.ndarray:
        return leaf.copy()
    if device is None or leaf.devices() == {device}:
        return leaf
    return jax.device_put(leaf, device)
