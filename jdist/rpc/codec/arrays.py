"""Arrays on their way: dtypes by name, aligned memory, arrays within a process.

JAX on CPU takes NumPy memory over without a copy exactly when its address is a multiple
of 64, so large arrays are received into such memory.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding

from jdist._errors import requirement
from jdist.rpc.base.device_maps import Table, device_of, number_of
from jdist.rpc.base.errors import ProtocolError

__all__ = ["adopt", "aligned", "dtype_name", "dtype_named", "host"]


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
    # A sharding and not the device: with that, the type of an array from a mesh with
    # explicit axes would go on naming the mesh (JAX 0.10.2), and no `jit` take it.
    return jax.device_put(leaf, SingleDeviceSharding(device))


# --- dtypes ---

_PLAIN = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_SMALL = (  # bfloat16, the float8 kinds, int4 and so on.
    kind
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
)
_NATIVE = {name: np.dtype(name) for name in _PLAIN}
_NATIVE |= {np.dtype(kind).name: np.dtype(kind) for kind in _SMALL}
_NATIVE["float0"] = np.dtype(jax.dtypes.float0)
_NAMES = {dtype: name for name, dtype in _NATIVE.items()}

# In NumPy's own notation: the other byte order, dates, texts of fixed length. Not
# `longdouble`, which is another format on another machine.
_OTHER = re.compile(
    r">[iu][248]|>f[248]|>c(8|16)|[<>][mM]8(\[\d{0,9}[A-Za-z]{1,7}\])?"
    r"|[<>]U\d{1,9}|\|S\d{1,9}"
)


def dtype_name(dtype: np.dtype) -> str:
    """The name under which a dtype travels.

    Raises:
      TypeError: Arrays of this dtype cannot travel: Python objects, records.

    Example:
      >>> dtype_name(np.dtype("float32")), dtype_name(np.dtype(">i4"))
      ('float32', '>i4')
    """
    name = _NAMES.get(dtype)
    if name is not None:
        return name
    if _OTHER.fullmatch(dtype.str) and np.dtype(dtype.str) == dtype:
        return dtype.str
    rule = "must be numbers, booleans, dates or texts of fixed length"
    remedy = "Send the fields of a record as arrays of their own."
    raise TypeError(requirement("rpc(array.dtype)", rule, str(dtype), remedy))


def dtype_named(name: str) -> np.dtype:
    """The dtype of this name.

    Raises:
      ProtocolError: There is none.
    """
    dtype = _NATIVE.get(name)
    if dtype is not None:
        return dtype
    if _OTHER.fullmatch(name):
        try:
            return np.dtype(name)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"No dtype has the name {name!r}: {error}") from error
    raise ProtocolError(f"No dtype has the name {name[:40]!r}.")
