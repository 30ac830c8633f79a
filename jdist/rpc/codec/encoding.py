"""From values to trees: one `Encoding` per value sent."""

import collections
import dataclasses
import enum
import functools
import pickle
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdist._compat import is_traced
from jdist._errors import requirement
from jdist.rpc.codec import codes
from jdist.rpc.errors import ForbiddenFunction
from jdist.rpc.functions import FunctionTable
from jdist.rpc.remote_exception import describe
from jdist.rpc.wire import dtype_name

LONG = 4096
"""Bytes and texts of this length and more travel as leaves, not in the header."""

Handler = Callable[["Encoding", Any], Any]


class Encoding:
    """The tree of one value under construction, and its leaves so far."""

    __slots__ = ("allow_pickle", "depth", "functions", "handlers", "leaves", "places")

    def __init__(
        self,
        functions: FunctionTable,
        handlers: dict[type, Handler],
        depth: int,
        allow_pickle: bool,
    ) -> None:
        self.functions = functions
        self.handlers = handlers
        self.depth = depth
        self.allow_pickle = allow_pickle
        self.leaves: list[Any] = []
        self.places: dict[int, int] = {}

    def node(self, value: Any) -> Any:
        """The tree of one value inside the whole."""
        handler = self.handlers.get(type(value))
        if handler is None:
            handler = self._unusual
        else:
            return handler(self, value)
        return handler(value)

    def nodes(self, code: int, values: Any) -> list[Any]:
        """`[code, node, ...]`, one level deeper."""
        self.enter()
        tree = [code, *map(self.node, values)]
        self.depth += 1
        return tree

    def enter(self) -> None:
        """One level deeper; what takes this method undoes it by `depth += 1`."""
        self.depth -= 1
        if self.depth < 0:
            rule = "must not be nested so deeply, nor contain itself"
            raise ValueError(requirement("rpc(value)", rule, "a value too deep"))

    def leaf(self, array: Any) -> list[int]:
        """An array of the frame; the same array twice is sent once."""
        index = self.places.get(id(array))
        if index is None:
            # `leaves` keeps the array alive, so its id stays its own.
            index = self.places[id(array)] = len(self.leaves)
            self.leaves.append(array)
        return [codes.LEAF, index]

    def _unusual(self, value: Any) -> Any:
        """A value whose type alone does not say how it travels."""
        for base in type(value).__mro__[1:]:
            if base in self.handlers and base in _OPEN_TO_SUBCLASSES:
                return self.handlers[base](self, value)
        for fits, handler in _KINDS:
            if fits(value):
                break
        else:
            handler = _refused
        if not self.allow_pickle:
            return handler(self, value)
        try:
            return handler(self, value)
        except (TypeError, ValueError, ForbiddenFunction):
            return _pickled(self, value)


def _integer(e: Encoding, value: int) -> Any:
    if -(1 << 63) <= value < 1 << 63:
        return value
    size = value.bit_length() // 8 + 1
    return [codes.BIG_INT, *_raw(e, value.to_bytes(size, "little", signed=True))]


def _raw(e: Encoding, value: bytes) -> tuple[Any]:
    return (_bytes(e, value),)


def _bytes(e: Encoding, value: bytes) -> Any:
    if len(value) < LONG:
        return value
    array = np.frombuffer(value, np.uint8)
    return [codes.BYTES, e.leaf(array)[1]]


def _text(e: Encoding, value: str) -> Any:
    if len(value) < LONG:
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            pass  # A lone surrogate is not UTF-8: it goes as a leaf.
        else:
            return value
    array = np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8)
    return [codes.TEXT, e.leaf(array)[1]]


def _tuple(e: Encoding, value: tuple) -> Any:
    return e.nodes(codes.TUPLE, value)


def _pairs(value: dict) -> Any:
    return (part for pair in value.items() for part in pair)


def _dict(e: Encoding, value: dict) -> Any:
    return e.nodes(codes.DICT, _pairs(value)) if value else [codes.DICT]


def _default_dict(e: Encoding, value: collections.defaultdict) -> Any:
    return e.nodes(codes.DEFAULT_DICT, (value.default_factory, *_pairs(value)))


def _array(e: Encoding, value: np.ndarray) -> Any:
    dtype_name(value.dtype)
    return e.leaf(value)


def _jax_array(e: Encoding, value: jax.Array) -> Any:
    if value.is_deleted():
        rule = "must not be deleted"
        remedy = "It was donated to a compiled function: send it before, or a copy."
        raise ValueError(requirement("rpc(array)", rule, "a deleted array", remedy))
    if not value.is_fully_addressable:
        rule = "must be addressable by this process as a whole"
        remedy = (
            "Gather it first, with `jax.experimental.multihost_utils."
            "process_allgather`, or send `array.addressable_data(0)`."
        )
        raise ValueError(requirement("rpc(array)", rule, str(value.sharding), remedy))
    return e.leaf(value)


def _any_jax_array(e: Encoding, value: jax.Array) -> Any:
    if is_traced(value):
        rule = "must have a value"
        remedy = (
            "Inside jit, grad or vmap an array has none yet. Make the call outside, or "
            "from a host callback."
        )
        raise ValueError(requirement("rpc(array)", rule, str(value), remedy))
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        name = str(jax.random.key_impl(value))
        return [codes.KEY, name, *e.nodes(0, (jax.random.key_data(value),))[1:]]
    # From now on found at once. Its type is known only when an array exists.
    e.handlers[type(value)] = _jax_array
    return _jax_array(e, value)


def _scalar(e: Encoding, value: np.generic) -> Any:
    return [codes.SCALAR, dtype_name(value.dtype), value.tobytes()]


def _dtype(e: Encoding, value: np.dtype) -> Any:
    return [codes.DTYPE, dtype_name(value)]


def _class(e: Encoding, value: type) -> Any:
    if issubclass(value, np.generic):
        return [codes.DTYPE_CLASS, dtype_name(np.dtype(value))]
    return _reference(e, value)


def _reference(e: Encoding, value: Any) -> Any:
    return [codes.REFERENCE, e.functions.reference(value)]


def _method(e: Encoding, value: types.MethodType) -> Any:
    owner, name = value.__self__, value.__name__
    if e.functions.method(owner, name) != value:
        rule = "must be what its name means in its class"
        raise ValueError(requirement("rpc(method)", rule, value))
    return [*e.nodes(codes.METHOD, (owner,)), name]


def _partial(e: Encoding, value: functools.partial) -> Any:
    return e.nodes(codes.PARTIAL, (value.func, value.args, value.keywords))


def _type_of(e: Encoding, value: Any) -> str:
    return e.functions.reference(type(value))


def _dataclass(e: Encoding, value: Any) -> Any:
    ref = _type_of(e, value)
    names = [field.name for field in dataclasses.fields(value)]
    parts = (part for name in names for part in (name, getattr(value, name)))
    return [codes.DATACLASS, ref, *e.nodes(0, parts)[1:]]


def _namedtuple(e: Encoding, value: Any) -> Any:
    return [codes.NAMEDTUPLE, _type_of(e, value), *e.nodes(0, value)[1:]]


def _enum(e: Encoding, value: enum.Enum) -> Any:
    ref = _type_of(e, value)
    if value.name in type(value).__members__:
        return [codes.ENUM, ref, value.name]
    return [codes.FLAG, ref, value.value]


def _pytree(e: Encoding, value: Any) -> Any:
    children, static = value.tree_flatten()
    ref = _type_of(e, value)
    return [codes.PYTREE, ref, *e.nodes(0, (static, *children))[1:]]


def _exception(e: Encoding, value: BaseException) -> Any:
    return e.nodes(codes.EXCEPTION, (describe(value, ""),))


def _pickled(e: Encoding, value: Any) -> Any:
    try:
        data = pickle.dumps(value, protocol=5)
    except Exception as error:
        raise TypeError(
            requirement("rpc(value)", "cannot be pickled", type(value), str(error))
        ) from error
    return [codes.PICKLE, _bytes(e, data)]


def _refused(e: Encoding, value: Any) -> Any:
    kind = type(value)
    rule = "must be made of scalars, containers, arrays, dataclasses and functions"
    remedy = (
        "Make its class a dataclass, register it with `rpc.register_type`, keep it "
        "where it is and send an RRef, or start all workers with `allow_pickle=True`."
    )
    shown = f"{kind.__module__}.{kind.__qualname__}"
    raise TypeError(requirement("rpc(value)", rule, shown, remedy))


def _as_is(e: Encoding, value: Any) -> Any:
    return value


HANDLERS: dict[type, Handler] = {
    type(None): _as_is,
    bool: _as_is,
    float: _as_is,
    int: _integer,
    str: _text,
    bytes: _bytes,
    tuple: _tuple,
    dict: _dict,
    list: lambda e, v: e.nodes(codes.LIST, v),
    set: lambda e, v: e.nodes(codes.SET, v),
    frozenset: lambda e, v: e.nodes(codes.FROZENSET, v),
    collections.OrderedDict: lambda e, v: e.nodes(codes.ORDERED_DICT, _pairs(v)),
    collections.defaultdict: _default_dict,
    complex: lambda e, v: [codes.COMPLEX, v.real, v.imag],
    range: lambda e, v: e.nodes(codes.RANGE, (v.start, v.stop, v.step)),
    slice: lambda e, v: e.nodes(codes.SLICE, (v.start, v.stop, v.step)),
    type(...): lambda e, v: [codes.ELLIPSIS],
    bytearray: lambda e, v: [codes.BYTE_ARRAY, _bytes(e, bytes(v))],
    np.ndarray: _array,
    types.FunctionType: _reference,
    types.MethodType: _method,
    functools.partial: _partial,
}

_OPEN_TO_SUBCLASSES: set[type] = set()

_KINDS: list[tuple[Callable[[Any], bool], Handler]] = [
    (lambda v: isinstance(v, jax.Array), _any_jax_array),
    (lambda v: isinstance(v, np.generic), _scalar),
    (lambda v: isinstance(v, np.dtype), _dtype),
    (lambda v: isinstance(v, type), _class),
    (lambda v: isinstance(v, enum.Enum), _enum),
    (lambda v: isinstance(v, tuple) and hasattr(v, "_fields"), _namedtuple),
    (lambda v: hasattr(type(v), "__dataclass_fields__"), _dataclass),
    (lambda v: isinstance(v, BaseException), _exception),
    (lambda v: hasattr(type(v), "tree_flatten"), _pytree),
    (callable, _reference),
]
