"""Encoding of arrays, scalars, dtypes and keys, and the memory that they arrive in.

JAX on CPU takes NumPy memory over without a copy exactly when its address is a multiple
of 64, so large arrays are received into such memory.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding

from jdist._compat import is_traced
from jdist._errors import requirement
from jdist.rpc.base.device_maps import Table, device_of, number_of
from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.codec import codes
from jdist.rpc.codec.codes import Tree
from jdist.rpc.codec.tree import Decoder, Decoding, Encoder, Encoding, parts

__all__ = [
    "DECODERS", "ENCODERS", "KINDS", "adopt", "aligned", "dtype_name", "dtype_named",
    "host", "jax_array",
]  # fmt: skip


_ALIGNMENT = 64


def aligned(nbytes: int) -> memoryview:
    """Allocate uninitialised, writable memory whose address is a multiple of 64.

    Example:
      >>> len(aligned(100))
      100
    """
    # NumPy itself aligns to 16 bytes only.
    whole = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -whole.__array_interface__["data"][0] % _ALIGNMENT
    return whole.data[start : start + nbytes]


def host(leaf: Any) -> np.ndarray:
    """Return the elements of a leaf in C order, as a view if possible.

    Waits for a JAX array that is being computed, and gathers one that is sharded.
    """
    array = leaf if type(leaf) is np.ndarray else np.asarray(leaf)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def adopt(
    leaves: Sequence[Any], device: jax.Device | None, devices: Table | None = None
) -> list[Any]:
    """Convert leaves for another worker of the same process.

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
    # explicit axes would still name the mesh (JAX 0.10.2), and `jit` would refuse it.
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
    """Return the name under which a dtype travels.

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
    """Return the dtype of a name.

    Raises:
      ProtocolError: No dtype has this name.
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


# --- trees of arrays, scalars, dtypes and keys ---


def _numpy_array(encoding: Encoding, value: np.ndarray) -> Tree:
    dtype_name(value.dtype)  # raises here, so that no transport accepts more
    return encoding.leaf(value)


def _zero_cotangent(encoding: Encoding, value: np.ndarray) -> Tree:
    return encoding.leaf(np.asarray(value))


def jax_array(encoding: Encoding, value: jax.Array) -> Tree:
    """Encode a JAX array that is no tracer and holds no keys."""
    # Checked here, with a remedy: JAX's own error would come from the transport.
    if value.is_deleted():
        rule = "must not have been deleted"
        remedy = "It was donated to a compiled function: send it before, or a copy."
        raise ValueError(requirement("rpc(array)", rule, "a deleted array", remedy))
    if not (value.is_fully_addressable or value.is_fully_replicated):
        rule = "must be addressable by this process as a whole, to be gathered"
        remedy = (
            "Gather it with `jax.experimental.multihost_utils.process_allgather`, or "
            "send the shards of this process: `array.addressable_data(0)`."
        )
        raise ValueError(requirement("rpc(array)", rule, str(value.sharding), remedy))
    return encoding.leaf(value)


def _any_jax_array(encoding: Encoding, value: jax.Array) -> Tree:
    if is_traced(value):
        rule = "must have a value"
        remedy = (
            "Inside jit, grad or vmap an array has none yet: make the call outside, or "
            "from a host callback."
        )
        raise ValueError(requirement("rpc(array)", rule, str(value), remedy))
    if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax_array(encoding, value)
    # A key array has no bytes of its own; its implementation travels by name.
    data = jax.random.key_data(value)
    return encoding.node([codes.KEY, str(jax.random.key_impl(value))], (data,))


def _scalar(encoding: Encoding, value: np.generic) -> Tree:
    # An empty text has no size, but NumPy gives it room for one character.
    data = value.tobytes()[: value.dtype.itemsize]
    return [codes.SCALAR, dtype_name(value.dtype), data]


def _dtype(encoding: Encoding, value: np.dtype) -> Tree:
    return [codes.DTYPE, dtype_name(value)]


def _dtype_class(encoding: Encoding, value: type[np.generic]) -> Tree:
    return [codes.DTYPE_CLASS, dtype_name(np.dtype(value))]


ENCODERS: dict[type, Encoder] = {np.ndarray: _numpy_array}


def _is_zero_cotangent(value: Any) -> bool:
    # JAX's gradient of an integer, in an array class of its own.
    return isinstance(value, np.ndarray) and value.dtype == jax.dtypes.float0


KINDS: list[tuple[Callable[[Any], bool], Encoder]] = [
    (_is_zero_cotangent, _zero_cotangent),
    (lambda v: isinstance(v, jax.Array), _any_jax_array),
    (lambda v: isinstance(v, np.generic), _scalar),
    (lambda v: isinstance(v, np.dtype), _dtype),
    (lambda v: isinstance(v, type) and issubclass(v, np.generic), _dtype_class),
]


def _leaf(decoding: Decoding, node: list[Tree]) -> Any:
    if len(node) != 2:
        raise ProtocolError("An array's node is malformed.")
    return decoding.leaf(node[1])


def _decoded_scalar(decoding: Decoding, node: list[Tree]) -> Any:
    name, data = parts(node, str, bytes)
    dtype = dtype_named(name)
    if len(data) != dtype.itemsize:
        raise ProtocolError(f"A scalar of {name} does not have {len(data)} bytes.")
    return np.frombuffer(data, dtype)[0] if data else np.zeros((), dtype)[()]


def _key(decoding: Decoding, node: list[Tree]) -> jax.Array:
    name, tree = parts(node, str, object)
    data = decoding.value(tree)
    if not isinstance(data, jax.Array):
        raise ProtocolError("The data of a PRNG key must be a JAX array.")
    try:
        return jax.random.wrap_key_data(data, impl=name)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"No PRNG key: {error}") from error


DECODERS: dict[int, Decoder] = {
    codes.LEAF: _leaf,
    codes.SCALAR: _decoded_scalar,
    codes.DTYPE: lambda d, n: dtype_named(*parts(n, str)),
    codes.DTYPE_CLASS: lambda d, n: dtype_named(*parts(n, str)).type,
    codes.KEY: _key,
}
