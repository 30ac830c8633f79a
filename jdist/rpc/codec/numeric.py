"""Arrays of NumPy and JAX, their scalars, dtypes and keys."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._compat import is_traced
from jdist._errors import requirement
from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.codec import codes
from jdist.rpc.codec.arrays import dtype_name, dtype_named
from jdist.rpc.codec.tree import Decoder, Decoding, Encoder, Encoding, parts

__all__ = ["DECODERS", "ENCODERS", "KINDS", "jax_array"]


def _numpy_array(encoding: Encoding, value: np.ndarray) -> Any:
    dtype_name(value.dtype)  # Refused here, so that no transport takes more.
    return encoding.leaf(value)


def _zero_cotangent(encoding: Encoding, value: np.ndarray) -> Any:
    return encoding.leaf(np.asarray(value))


def jax_array(encoding: Encoding, value: jax.Array) -> Any:
    """The tree of a JAX array that is no tracer and holds no keys."""
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


def _any_jax_array(encoding: Encoding, value: jax.Array) -> Any:
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
    return [codes.KEY, str(jax.random.key_impl(value)), *encoding.trees((data,))]


def _scalar(encoding: Encoding, value: np.generic) -> Any:
    # An empty text has no size, but NumPy gives it room for one character.
    data = value.tobytes()[: value.dtype.itemsize]
    return [codes.SCALAR, dtype_name(value.dtype), data]


def _dtype(encoding: Encoding, value: np.dtype) -> Any:
    return [codes.DTYPE, dtype_name(value)]


def _dtype_class(encoding: Encoding, value: type[np.generic]) -> Any:
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


def _leaf(decoding: Decoding, node: list[Any]) -> Any:
    if len(node) != 2:
        raise ProtocolError("An array's node is malformed.")
    return decoding.leaf(node[1])


def _decoded_scalar(decoding: Decoding, node: list[Any]) -> Any:
    name, data = parts(node, str, bytes)
    dtype = dtype_named(name)
    if len(data) != dtype.itemsize:
        raise ProtocolError(f"A scalar of {name} does not have {len(data)} bytes.")
    return np.frombuffer(data, dtype)[0] if data else np.zeros((), dtype)[()]


def _key(decoding: Decoding, node: list[Any]) -> jax.Array:
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
