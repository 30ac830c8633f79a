"""Arrays on their way: aligned memory, bytes of an array, arrays within a process.

JAX on CPU takes NumPy memory over without a copy exactly when its address is a multiple
of 64, so large arrays are received into such memory.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdist.rpc.base.device_maps import Table, device_of, number_of

__all__ = ["adopt", "aligned", "host"]


_ALIGNMENT = 64


def aligned(nbytes: int) -> memoryview:
    """Writable memory, not initialised, whose address is a multiple of 64.

    Example:
      >>> len(aligned(100))
      100
    """
    # NumPy itself aligns to 16 bytes only.
    whole = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -whole.__array_interface__["data"][0] % _ALIGNMENT
    return whole.data[start : start + nbytes]


def host(leaf: Any) -> np.ndarray:
    """The elements of a leaf in C order: a view where that is possible.

    Waits for a JAX array that is being computed, and gathers one that is sharded.
    """
    array = leaf if type(leaf) is np.ndarray else np.asarray(leaf)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def adopt(
    leaves: Sequence[Any], device: jax.Device | None, devices: Table | None = None
) -> list[Any]:
    """Leaves as another worker of the same process receives them.

    NumPy arrays are copied, because either side may write to its own. JAX arrays
    cannot be written: they are shared, or moved if they are not on `device`, nor on
    what `devices` says instead.
    """
    return [_adopted(leaf, device, devices) for leaf in leaves]


def _adopted(leaf: Any, device: jax.Device | None, devices: Table | None) -> Any:
    if type(leaf) is np.ndarray:
        return leaf.copy()
    if devices is not None:
        number = number_of(leaf, devices)
        device = device if number is None else device_of(number)
    if device is None or leaf.devices() == {device}:
        return leaf
    if not leaf.is_fully_addressable:  # but each process has the whole of it
        # `device_put` refuses arrays with shards in other processes.
        leaf = leaf.addressable_data(0)
    return jax.device_put(leaf, device)
