"""Arrays on their way: 64-byte aligned memory, views of bytes, placing on a device.

JAX on CPU takes NumPy memory over without a copy exactly when it is 64-byte aligned, so
everything is received into such memory.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdist._compat import double_precision

ALIGNMENT = 64


def aligned(nbytes: int) -> memoryview:
    """Uninitialised writable memory whose address is a multiple of 64.

    Example:
      >>> len(aligned(100))
      100
    """
    whole = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -whole.__array_interface__["data"][0] % ALIGNMENT
    return memoryview(whole)[start : start + nbytes]


def host(leaf: Any) -> np.ndarray:
    """The leaf's elements as a C-contiguous NumPy array; a view where possible."""
    array = leaf if type(leaf) is np.ndarray else np.asarray(leaf)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def place(arrays: Sequence[np.ndarray], device: jax.Device | None) -> list[jax.Array]:
    """JAX arrays on `device` over the memory of `arrays`, which nobody else writes.

    The dtype stays what it is, also where 64-bit types are switched off.
    """
    if jax.config.jax_enable_x64 or all(a.dtype.itemsize < 8 for a in arrays):
        return [jax.device_put(array, device) for array in arrays]
    with double_precision():
        return [jax.device_put(array, device) for array in arrays]


def adopt(leaves: Sequence[Any], device: jax.Device | None) -> list[Any]:
    """What a worker in the same process receives of another one's leaves.

    JAX arrays are shared, or moved when they are not on `device`; NumPy arrays are
    copied, because either side may write to its own.
    """
    return [_adopted(leaf, device) for leaf in leaves]


def _adopted(leaf: Any, device: jax.Device | None) -> Any:
    if type(leaf) is np.ndarray:
        return leaf.copy()
    if device is None or leaf.devices() == {device}:
        return leaf
    return jax.device_put(leaf, device)
