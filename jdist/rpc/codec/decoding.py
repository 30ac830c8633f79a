"""From trees back to values: everything is checked before it is used."""

import collections
import dataclasses
import enum
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdist.rpc.codec import codes
from jdist.rpc.errors import ForbiddenFunction, ProtocolError
from jdist.rpc.functions import FunctionTable
from jdist.rpc.remote_exception import rebuild
from jdist.rpc.wire import dtype_named

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


class Decoding:
    """One tree being read."""

    __slots__ = ("allow_pickle", "depth", "functions", "leaves", "registered")

    def __init__(
        self,
        functions: FunctionTable,
        registered: dict[str, Callable[[Any], Any]],
        leaves: Sequence[Any],
        depth: int,
        allow_pickle: bool,
    ) -> None:
        self.functions = functions
        self.registered = registered
        self.leaves = leaves
        self.depth = depth
        self.allow_pickle = allow_pickle

    def value(self, node: Any) -> Any:
        """The value of one node."""
        kind = type(node)
        if kind is list:
            code = node[0] if node else None
            if type(code) is not int or not 0 <= code < len(_DECODERS):
                raise ProtocolError("A tree has a node of an unknown kind.")
            self.depth -= 1
            if self.depth < 0:
                raise ProtocolError("A tree is nested too deeply.")
            value = _DECODERS[code](self, node)
            self.depth += 1
            return value
        if kind in _PLAIN:
            return node
        raise ProtocolError(f"A tree has a node of type {kind.__name__}.")

    def leaf(self, index: Any) -> Any:
        """The frame's leaf of this index."""
        if type(index) is not int or not 0 <= index < len(self.leaves):
            raise ProtocolError("A tree names an array that the frame does not have.")
        return self.leaves[index]

    def rest(self, node: list[Any], start: int = 1) -> Any:
        """The values of the node's remaining elements."""
        return map(self.value, node[start:])

    def kind(self, ref: Any) -> type:
        """The class of this name."""
        if type(ref) is not str:
            raise ProtocolError("A type's name is no text.")
        found = self.functions.resolve(ref)
        if not isinstance(found, type):
            raise ProtocolError(f"{ref!r} is no class.")
        return found


def _expect(node: list[Any], *kinds: type) -> list[Any]:
    if len(node) != len(kinds) + 1 or any(
        not isinstance(part, kind) for part, kind in zip(node[1:], kinds, strict=True)
    ):
        raise ProtocolError(f"A node of kind {node[0]} is malformed.")
    return node[1:]


def _pairs(d: Decoding, node: list[Any], start: int = 1) -> Any:
    if (len(node) - start) % 2:
        raise ProtocolError("A dictionary has a key without a value.")
    parts = d.rest(node, start)
    return zip(parts, parts, strict=True)


def _hashed(make: Callable[[Any], Any], items: Any) -> Any:
    try:
        return make(items)
    except TypeError as error:
        raise ProtocolError(f"A key or element cannot be hashed: {error}") from error


def _big_int(d: Decoding, node: list[Any]) -> int:
    (tree,) = _expect(node, object)
    return int.from_bytes(_bytes_value(d, tree), "little", signed=True)


def _bytes_value(d: Decoding, tree: Any) -> bytes:
    data = d.value(tree)
    if type(data) is not bytes:
        raise ProtocolError("Bytes are expected.")
    return data


def _raw_leaf(d: Decoding, node: list[Any]) -> bytes:
    (index,) = _expect(node, int)
    leaf = d.leaf(index)
    if type(leaf) is not np.ndarray or leaf.dtype != np.uint8:
        raise ProtocolError("Bytes must travel as bytes.")
    return leaf.tobytes()


def _text(d: Decoding, node: list[Any]) -> str:
    try:
        return _raw_leaf(d, node).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"A text is not UTF-8: {error}") from error


def _three(make: Callable[..., Any], d: Decoding, node: list[Any]) -> Any:
    if len(node) != 4:
        raise ProtocolError("A range or slice has three parts.")
    parts = list(d.rest(node))
    try:
        return make(*parts)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"No range: {error}") from error


def _scalar(d: Decoding, node: list[Any]) -> np.generic:
    name, data = _expect(node, str, bytes)
    dtype = dtype_named(name)
    if len(data) != dtype.itemsize:
        raise ProtocolError("A scalar has another size than its dtype.")
    return np.ndarray((), dtype, data)[()]


def _key(d: Decoding, node: list[Any]) -> jax.Array:
    name, tree = _expect(node, str, object)
    data = d.value(tree)
    if not isinstance(data, jax.Array):
        raise ProtocolError("A PRNG key is not made of an array.")
    try:
        return jax.random.wrap_key_data(data, impl=name)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"No PRNG key: {error}") from error


def _reference(d: Decoding, node: list[Any]) -> Any:
    (ref,) = _expect(node, str)
    return d.functions.resolve(ref)


def _method(d: Decoding, node: list[Any]) -> Any:
    owner, name = _expect(node, object, str)
    return d.functions.method(d.value(owner), name)


def _partial(d: Decoding, node: list[Any]) -> Any:
    _expect(node, object, object, object)
    function, args, kwargs = d.rest(node)
    if not callable(function) or type(args) is not tuple or type(kwargs) is not dict:
        raise ProtocolError("A partial is malformed.")
    if not all(type(name) is str for name in kwargs):
        raise ProtocolError("A partial's keyword is no text.")
    return functools.partial(function, *args, **kwargs)


def _dataclass(d: Decoding, node: list[Any]) -> Any:
    kind = d.kind(node[1] if len(node) > 1 else None)
    if not hasattr(kind, "__dataclass_fields__"):
        raise ProtocolError(f"{kind.__name__} is no dataclass.")
    values = _hashed(dict, _pairs(d, node, 2))
    names = [field.name for field in dataclasses.fields(kind)]
    if list(values) != names:
        raise ProtocolError(f"{kind.__name__} has other fields here: {names}.")
    # As `copy` does: neither __init__ nor __post_init__ runs again.
    made = object.__new__(kind)
    for name in names:
        object.__setattr__(made, name, values[name])
    return made


def _namedtuple(d: Decoding, node: list[Any]) -> Any:
    kind = d.kind(node[1] if len(node) > 1 else None)
    fields = getattr(kind, "_fields", None)
    if not issubclass(kind, tuple) or fields is None or len(fields) != len(node) - 2:
        raise ProtocolError(f"{kind.__name__} has other fields here: {fields}.")
    return tuple.__new__(kind, d.rest(node, 2))


def _enum(d: Decoding, node: list[Any]) -> Any:
    ref, name = _expect(node, str, str)
    kind = d.kind(ref)
    if not issubclass(kind, enum.Enum) or name not in kind.__members__:
        raise ProtocolError(f"{ref!r} has no member {name!r}.")
    return kind.__members__[name]


def _flag(d: Decoding, node: list[Any]) -> Any:
    ref, number = _expect(node, str, int)
    kind = d.kind(ref)
    try:
        if issubclass(kind, enum.Flag):
            return kind(number)
    except ValueError:
        pass
    raise ProtocolError(f"{ref!r} has no value {number}.")


def _pytree(d: Decoding, node: list[Any]) -> Any:
    if len(node) < 3:
        raise ProtocolError("A pytree is malformed.")
    kind = d.kind(node[1])
    if not hasattr(kind, "tree_unflatten"):
        raise ProtocolError(f"{kind.__name__} is no pytree.")
    static, *children = d.rest(node, 2)
    return kind.tree_unflatten(static, tuple(children))


def _exception(d: Decoding, node: list[Any]) -> Exception:
    (tree,) = _expect(node, object)
    try:
        return rebuild(d.value(tree), d.functions)
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def _registered(d: Decoding, node: list[Any]) -> Any:
    code, tree = _expect(node, str, object)
    if code not in d.registered:
        raise ProtocolError(f"No type is registered as {code[:40]!r} here.")
    return d.registered[code](d.value(tree))


def _pickled(d: Decoding, node: list[Any]) -> Any:
    (tree,) = _expect(node, object)
    if not d.allow_pickle:
        raise ForbiddenFunction(
            "This worker does not read pickles: allow_pickle=False."
        )
    return pickle.loads(_bytes_value(d, tree))


def _default_dict(d: Decoding, node: list[Any]) -> Any:
    factory = d.value(node[1]) if len(node) > 1 else None
    if factory is not None and not callable(factory):
        raise ProtocolError("A defaultdict's factory is not callable.")
    made: Any = collections.defaultdict(factory)
    _hashed(made.update, _pairs(d, node, 2))
    return made


_TABLE: dict[int, Callable[[Decoding, list[Any]], Any]] = {
    codes.LEAF: lambda d, n: d.leaf(*_expect(n, int)),
    codes.TUPLE: lambda d, n: tuple(d.rest(n)),
    codes.LIST: lambda d, n: list(d.rest(n)),
    codes.SET: lambda d, n: _hashed(set, d.rest(n)),
    codes.FROZENSET: lambda d, n: _hashed(frozenset, d.rest(n)),
    codes.DICT: lambda d, n: _hashed(dict, _pairs(d, n)),
    codes.ORDERED_DICT: lambda d, n: _hashed(collections.OrderedDict, _pairs(d, n)),
    codes.DEFAULT_DICT: _default_dict,
    codes.BIG_INT: _big_int,
    codes.COMPLEX: lambda d, n: complex(*_expect(n, float, float)),
    codes.RANGE: functools.partial(_three, range),
    codes.SLICE: functools.partial(_three, slice),
    codes.ELLIPSIS: lambda d, n: ...,
    codes.BYTES: _raw_leaf,
    codes.TEXT: _text,
    codes.BYTE_ARRAY: lambda d, n: bytearray(_bytes_value(d, *_expect(n, object))),
    codes.SCALAR: _scalar,
    codes.DTYPE: lambda d, n: dtype_named(*_expect(n, str)),
    codes.DTYPE_CLASS: lambda d, n: dtype_named(*_expect(n, str)).type,
    codes.KEY: _key,
    codes.REFERENCE: _reference,
    codes.METHOD: _method,
    codes.PARTIAL: _partial,
    codes.DATACLASS: _dataclass,
    codes.NAMEDTUPLE: _namedtuple,
    codes.ENUM: _enum,
    codes.FLAG: _flag,
    codes.PYTREE: _pytree,
    codes.EXCEPTION: _exception,
    codes.REGISTERED: _registered,
    codes.PICKLE: _pickled,
}
_DECODERS = [_TABLE[code] for code in range(len(_TABLE))]
