"""Encoding of values as trees and leaves, and decoding.

A *tree* is made of plain scalars and lists (`jdist.rpc.codec.codes` has the format);
the *leaves* are the arrays of the value, unchanged. These values arrive as sent:

- None, bool, int of any size, float, complex, str, bytes, bytearray, range, slice, ...
- tuple, list, dict in its order, OrderedDict, defaultdict, sets, named tuples; a
  read-only view of a dictionary as a dictionary;
- dataclasses, enums, and pytrees with `tree_flatten` and `tree_unflatten`, of classes
  that `FunctionTable` lets one name;
- NumPy arrays of numbers, booleans, dates and fixed-length texts; in C order on
  arrival, writable, in memory of their own; NumPy scalars and dtypes;
- JAX arrays of every dtype, weak types and PRNG keys with their implementation; on the
  receiver's device, gathered if they were sharded over devices of the sender;
- functions, classes and bound methods by name, `partial` of them;
- exceptions, as `jdist.rpc.codec.remote_exception` describes them.

An array that occurs twice in a value is sent once and arrives as one; equal containers
arrive as two. Everything else is refused with a reason, unless pickle is allowed.
"""

import concurrent.futures
import dataclasses
import enum
import pickle
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._errors import requirement
from jdist.rpc.base.errors import ForbiddenFunction, ProtocolError
from jdist.rpc.base.future import Future
from jdist.rpc.base.invocation import MessageContext
from jdist.rpc.codec import arrays, codes, nnx
from jdist.rpc.codec.codes import Tree
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.codec.remote_exception import describe, rebuild
from jdist.rpc.codec.tree import (
    Decoder,
    Decoding,
    Encoder,
    Encoding,
    parts,
    parts_at_least,
)

__all__ = ["Codec"]


Hook = Callable[[Any, MessageContext | None], Any]
"""`hook(value, message)`: see `Codec.register`."""


class Codec:
    """Encodes the values that one worker sends, and decodes those it receives.

    Args:
      functions: Which functions and classes may be named, by this worker and by others.
      allow_pickle: Sends as pickles the values that cannot travel otherwise. A peer can
        then make this worker run anything.
      depth: How deeply a value may be nested.

    Example:
      >>> codec = Codec(FunctionTable())
      >>> tree, leaves = codec.encode({"step": 3, "shape": (2, 5)})
      >>> codec.decode(tree, leaves)
      {'step': 3, 'shape': (2, 5)}
    """

    def __init__(
        self, functions: FunctionTable, allow_pickle: bool = False, depth: int = 100
    ) -> None:
        self.functions = functions
        self._depth = depth
        self._encoders = dict(_ENCODERS)
        self._decoders = _decoders(allow_pickle)
        self._registered: dict[str, Hook] = {}
        # Types whose instances arrive as something else: useless as keys.
        self._not_keys: set[type] = set()
        self._otherwise: Encoder = self._by_kind
        if allow_pickle:
            self._otherwise = _or_pickled(self._by_kind)
            # Functions without a name that others could look up: lambdas, closures.
            for kind, encoder in _CALLABLES.items():
                self._encoders[kind] = _or_pickled(encoder)

    def encode(
        self, value: Any, message: MessageContext | None = None
    ) -> tuple[Tree, list[Any]]:
        """Encodes a value as a tree and its arrays in order of appearance.

        Args:
          value: The value.
          message: Given to the hooks of `register`, to be filled in by them.

        Raises:
          TypeError: Something in it is of a kind that cannot travel.
          ValueError: It is nested too deeply, or something has no value or no name:
            traced or deleted arrays, lambdas.
          ForbiddenFunction: It names a function or class that is not allowed.
          Exception: Whatever an encode hook raises.
        """
        encoding = Encoding(
            self.functions,
            self._encoders,
            self._otherwise,
            self._depth,
            message,
            self._not_keys,
        )
        return encoding.tree(value), encoding.leaves

    def decode(
        self, tree: Tree, leaves: Sequence[Any], message: MessageContext | None = None
    ) -> Any:
        """Decodes a tree and its leaves; `message` as for `encode`.

        Raises:
          ProtocolError: The tree is malformed, or does not fit the leaves.
          ForbiddenFunction: It names something that is not allowed here.
          Exception: Whatever a decode hook raises.
        """
        return Decoding(
            self.functions,
            self._decoders,
            self._registered,
            leaves,
            self._depth,
            message,
        ).value(tree)

    def register(
        self,
        kind: type,
        code: str,
        encode: Hook,
        decode: Hook,
        key: bool = True,
    ) -> None:
        """Registers an encoding for objects of exactly the type `kind`.

        Args:
          kind: The type.
          code: Stands for it on the wire; the same on all workers.
          encode: `encode(object, message)` makes an encodable value, each time one is
            sent. Its exceptions go to the caller of `encode`.
          decode: `decode(value, message)` makes an object again, each time one arrives.
          key: Whether one may be a key of a dictionary, or in a set.

        Raises:
          ValueError: The code is taken.
        """
        if code in self._registered:
            rule = "must be new"
            raise ValueError(requirement("Codec.register(code=...)", rule, repr(code)))

        def encoder(encoding: Encoding, value: Any) -> Tree:
            other = encode(value, encoding.message)
            return encoding.node([codes.REGISTERED, code], (other,))

        self._encoders[kind] = encoder
        self._registered[code] = decode
        if not key:
            self._not_keys.add(kind)

    def substitute(self, kind: type, other: Hook) -> None:
        """Registers a value to send in place of objects of exactly the type `kind`.

        They cannot be keys of a dictionary or elements of a set, where they are found
        by their own type.

        Args:
          kind: The type.
          other: `other(object, message)` makes the value, each time one is sent.
        """
        self._encoders[kind] = lambda encoding, value: encoding.tree(
            other(value, encoding.message)
        )
        self._not_keys.add(kind)

    def _by_kind(self, encoding: Encoding, value: Any) -> Any:
        """Encodes a value whose exact type has no encoder."""
        why_not = nnx.refusal(value)  # first: a module may be a dataclass, or callable
        if why_not:
            raise TypeError(why_not)
        encoder = next((encoder for fits, encoder in _KINDS if fits(value)), None)
        if encoder is None:
            raise TypeError(_refusal(value))
        tree = encoder(encoding, value)
        is_leaf = isinstance(tree, list) and tree[0] == codes.LEAF
        if is_leaf and isinstance(value, jax.Array):
            # JAX does not export the class of its arrays, so it is learned from the
            # first one; later ones are then found by type.
            self._encoders[type(value)] = arrays.jax_array
        return tree


def _decoders(allow_pickle: bool) -> list[Decoder]:
    table: dict[int, Decoder] = {
        **_DECODERS,
        codes.PICKLE: _unpickled if allow_pickle else _forbidden_pickle,
    }
    return [table[code] for code in range(len(table))]


def _registered(decoding: Decoding, node: list[Tree]) -> Any:
    code, tree = parts(node, str, object)
    decode = decoding.registered.get(code)
    if decode is None:
        raise ProtocolError(f"No type is registered as {code[:40]!r} on this worker.")
    return decode(decoding.value(tree), decoding.message)


def _refusal(value: Any) -> str:
    kind = type(value)
    rule = "must be made of scalars, containers, arrays, dataclasses and functions"
    remedy = (
        "Make its class a dataclass, keep it where it is and send an RRef to it, or "
        "start every worker with `allow_pickle=True`."
    )
    shown = f"a {kind.__module__}.{kind.__qualname__}"
    return requirement("rpc(value)", rule, shown, remedy)


# --- Python's own scalars, texts, bytes, ranges, slices and containers ---

_LONG = 4096
"""Bytes and texts of this length or more travel as leaves: in the body, not copied."""

_INT64 = 1 << 63


def _integer(encoding: Encoding, value: int) -> Tree:
    if -_INT64 <= value < _INT64:
        return value
    # One more bit for the sign.
    size = value.bit_length() // 8 + 1
    data = value.to_bytes(size, "little", signed=True)
    return [codes.BIG_INT, _bytes(encoding, data)]


def _bytes(encoding: Encoding, value: bytes) -> Tree:
    """Encodes short bytes unchanged, long ones as a leaf."""
    return value if len(value) < _LONG else _raw(encoding, codes.BYTES, value)


def _text(encoding: Encoding, value: str) -> Tree:
    # Short texts are copied into the header: a leaf of their own costs more.
    if len(value) < _LONG:
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            # Half a surrogate pair, as in odd file names: msgpack does not take it.
            return _raw(encoding, codes.TEXT, value.encode("utf-8", "surrogatepass"))
        return value
    return _raw(encoding, codes.TEXT, value.encode("utf-8", "surrogatepass"))


def _raw(encoding: Encoding, code: int, data: bytes) -> Tree:
    _, index = encoding.leaf(np.frombuffer(data, np.uint8))
    return [code, index]


def _three(code: int, encoding: Encoding, value: Any) -> Tree:
    return encoding.node([code], (value.start, value.stop, value.step))


def _sequence(code: int, encoding: Encoding, values: Iterable[Any]) -> Tree:
    return encoding.node([code], values)


def _set(code: int, encoding: Encoding, elements: Collection[Any]) -> Tree:
    encoding.check_keys(elements)
    return encoding.node([code], elements)


def _mapping(code: int, encoding: Encoding, mapping: Mapping[Any, Any]) -> Tree:
    return encoding.node([code], _items(encoding, mapping))


def _items(encoding: Encoding, mapping: Mapping[Any, Any]) -> Iterable[Any]:
    if mapping:
        encoding.check_keys(mapping)
    return chain.from_iterable(mapping.items())


def _default_dict(encoding: Encoding, value: defaultdict[Any, Any]) -> Tree:
    items = _items(encoding, value)
    return encoding.node([codes.DEFAULT_DICT], chain((value.default_factory,), items))


def _decoded_bytes(decoding: Decoding, node: list[Tree]) -> bytes:
    """Decodes a node that holds only bytes."""
    (tree,) = parts(node, object)
    data = decoding.value(tree)
    if type(data) is not bytes:
        raise ProtocolError(f"A node of kind {node[0]!r} must hold bytes.")
    return data


def _leaf_bytes(decoding: Decoding, node: list[Tree]) -> bytes:
    leaf = decoding.leaf(*parts(node, int))
    if type(leaf) is not np.ndarray or leaf.dtype != np.uint8:
        raise ProtocolError("Bytes must travel as bytes.")
    return leaf.tobytes()


def _leaf_text(decoding: Decoding, node: list[Tree]) -> str:
    try:
        return _leaf_bytes(decoding, node).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"A text is not UTF-8: {error}") from error


def _made(make: Callable[..., Any], decoding: Decoding, node: list[Tree]) -> Any:
    start, stop, step = map(decoding.value, parts(node, object, object, object))
    try:
        return make(start, stop, step)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"No {make.__name__}: {error}") from error


def _hashing(make: Callable[[Any], Any], items: Iterable[Any]) -> Any:
    """Builds a set or dictionary of elements or keys sent by a peer."""
    try:
        return make(items)
    except TypeError as error:
        raise ProtocolError(f"A key or element cannot be hashed: {error}") from error


def _decoded_default_dict(decoding: Decoding, node: list[Tree]) -> Any:
    factory = decoding.value(parts_at_least(node, 1)[0])
    if factory is not None and not callable(factory):
        raise ProtocolError("A defaultdict's factory cannot be called.")
    return _hashing(partial(defaultdict, factory), decoding.pairs(node, 2))


# --- functions, classes and methods: by name, never by their code ---


def _reference(encoding: Encoding, value: Any) -> Tree:
    return [codes.REFERENCE, encoding.functions.reference(value)]


def _method(encoding: Encoding, value: types.MethodType) -> Tree:
    owner, name = value.__self__, value.__name__
    if encoding.functions.method(owner, name) != value:
        rule = "must be what its name means in the class of its object"
        raise ValueError(requirement("rpc(method)", rule, value))
    return encoding.node([codes.METHOD], (owner, name))


def _partial(encoding: Encoding, value: partial) -> Tree:
    inner = (value.func, value.args, value.keywords)
    return encoding.node([codes.PARTIAL], inner)


def _referenced(decoding: Decoding, node: list[Tree]) -> Any:
    (name,) = parts(node, str)
    return decoding.functions.named(name)


def _decoded_method(decoding: Decoding, node: list[Tree]) -> Any:
    owner, name = parts(node, object, str)
    return decoding.functions.method(decoding.value(owner), name)


def _decoded_partial(decoding: Decoding, node: list[Tree]) -> Any:
    trees = parts(node, object, object, object)
    function, args, keywords = map(decoding.value, trees)
    if not callable(function) or type(args) is not tuple or type(keywords) is not dict:
        raise ProtocolError("A partial is malformed.")
    if not all(type(name) is str for name in keywords):
        raise ProtocolError("A partial's keyword is no text.")
    return partial(function, *args, **keywords)


# --- objects of classes that both sides can import ---

# No `__init__`, `__new__` or `__post_init__` runs on arrival: an object is put together
# again from its fields, as `copy.copy` does, so that it is what was sent.


def _name_of(encoding: Encoding, value: Any) -> str:
    return encoding.functions.reference(type(value))


def _dataclass(encoding: Encoding, value: Any) -> Tree:
    name = _name_of(encoding, value)
    try:
        # Raises for a class with C state, which the fields would not carry.
        object.__new__(type(value))
    except TypeError as error:
        rule = "must not be a dataclass with contents beside its fields"
        raise TypeError(requirement("rpc(value)", rule, name, f"{error}.")) from error
    fields = [field.name for field in dataclasses.fields(value)]
    trees = encoding.node([], (getattr(value, field) for field in fields))
    pairs = zip(fields, trees, strict=True)
    return [codes.DATACLASS, name, *(part for pair in pairs for part in pair)]


def _namedtuple(encoding: Encoding, value: Any) -> Tree:
    return encoding.node([codes.NAMEDTUPLE, _name_of(encoding, value)], value)


def _enum(encoding: Encoding, value: enum.Enum) -> Tree:
    name = _name_of(encoding, value)
    # A combination of flags has no name among the members.
    if value.name in type(value).__members__:
        return [codes.ENUM, name, value.name]
    return encoding.node([codes.FLAG, name], (value.value,))


def _pytree(encoding: Encoding, value: Any) -> Tree:
    name = _name_of(encoding, value)
    children, static = value.tree_flatten()
    return encoding.node([codes.PYTREE, name], (static, *children))


def _exception(encoding: Encoding, value: BaseException) -> Tree:
    return encoding.node([codes.EXCEPTION], (describe(value, ""),))


def _future(encoding: Encoding, value: Any) -> Tree:
    # torch's words, because its users search for them.
    rule = 'must not be a future: "Can not pickle torch.futures.Future"'
    remedy = (
        "Send what it waits for, `future.wait()`, or return it from a function "
        "decorated with `@rpc.async_execution`."
    )
    raise TypeError(requirement("rpc(value)", rule, value, remedy))


def _decoded_dataclass(decoding: Decoding, node: list[Tree]) -> Any:
    kind = decoding.type_named(parts_at_least(node, 1)[0])
    if not dataclasses.is_dataclass(kind) or issubclass(kind, BaseException):
        raise ProtocolError(f"{kind.__name__} is no dataclass that can travel.")
    fields = [field.name for field in dataclasses.fields(kind)]
    values = _hashing(dict, decoding.pairs(node, 2))
    if list(values) != fields:
        raise ProtocolError(f"The fields of {kind.__name__} are others here: {fields}.")
    try:
        # Neither constructor runs: it could do anything, and need other arguments.
        made = object.__new__(kind)
        for name, value in values.items():
            object.__setattr__(made, name, value)
    except (AttributeError, TypeError) as error:
        raise ProtocolError(f"A {kind.__name__} cannot be made: {error}") from error
    return made


def _decoded_namedtuple(decoding: Decoding, node: list[Tree]) -> Any:
    kind = decoding.type_named(parts_at_least(node, 1)[0])
    fields = getattr(kind, "_fields", None)
    if not issubclass(kind, tuple) or type(fields) is not tuple:
        raise ProtocolError(f"{kind.__name__} is no named tuple.")
    if len(fields) != len(node) - 2:
        raise ProtocolError(f"The fields of {kind.__name__} are others here: {fields}.")
    # Past the class's own `__new__`, for the same reason.
    return tuple.__new__(kind, decoding.values(node, 2))


def _member(decoding: Decoding, node: list[Tree]) -> enum.Enum:
    type_name, name = parts(node, str, str)
    kind = decoding.type_named(type_name)
    if not issubclass(kind, enum.Enum) or name not in kind.__members__:
        raise ProtocolError(f"{kind.__name__} has no member {name[:40]!r} here.")
    return kind.__members__[name]


def _flag(decoding: Decoding, node: list[Tree]) -> enum.Flag:
    name, tree = parts(node, str, object)
    kind, number = decoding.type_named(name), decoding.value(tree)
    try:
        if issubclass(kind, enum.Flag) and type(number) is int:
            return kind(number)
    except ValueError as error:
        raise ProtocolError(f"No {kind.__name__}: {error}") from error
    raise ProtocolError(f"{kind.__name__} has no such combination of members.")


def _decoded_pytree(decoding: Decoding, node: list[Tree]) -> Any:
    kind = decoding.type_named(parts_at_least(node, 2)[0])
    if not hasattr(kind, "tree_unflatten"):
        raise ProtocolError(f"{kind.__name__} is no pytree.")
    static, *children = decoding.values(node, 2)
    try:
        return kind.tree_unflatten(static, tuple(children))
    except Exception as error:
        raise ProtocolError(f"A {kind.__name__} cannot be made: {error}") from error


def _decoded_exception(decoding: Decoding, node: list[Tree]) -> Exception:
    (tree,) = parts(node, object)
    return rebuild(decoding.value(tree), decoding.functions)


# --- pickle as a fallback, with `allow_pickle=True` only ---

# A pickle can make its reader run any code. Without the option none is read.


def _or_pickled(encoder: Encoder) -> Encoder:
    """Wraps `encoder` so that values it refuses are pickled."""

    def encode(encoding: Encoding, value: Any) -> Tree:
        leaves, depth = len(encoding.leaves), encoding.depth
        try:
            return encoder(encoding, value)
        except (TypeError, ValueError, ForbiddenFunction) as refusal:
            encoding.undo(leaves, depth)
            return [codes.PICKLE, _bytes(encoding, _pickle(value, refusal))]

    return encode


def _pickle(value: Any, refusal: Exception) -> bytes:
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        rule = "must at least be something that pickle takes"
        shown = f"{type(value).__module__}.{type(value).__qualname__}"
        message = requirement("rpc(value)", rule, shown, f"{refusal} {error}")
        raise TypeError(message) from error


def _unpickled(decoding: Decoding, node: list[Tree]) -> Any:
    """Decodes a pickle; for a codec with allow_pickle=True only."""
    data = _decoded_bytes(decoding, node)
    try:
        return pickle.loads(data)
    except Exception as error:
        raise ProtocolError(f"A pickle cannot be read: {error}") from error


def _forbidden_pickle(decoding: Decoding, node: list[Tree]) -> Any:
    """Refuses a pickle."""
    raise ForbiddenFunction(
        "`rpc(value)` must not be a pickle: this worker runs with allow_pickle=False, "
        "the peer does not."
    )


# --- the tables ---

_CALLABLES: dict[type, Encoder] = {
    types.FunctionType: _reference,
    types.BuiltinFunctionType: _reference,
    type(jnp.sin): _reference,  # the class of jax.jit's results
    type(jnp.add): _reference,
    types.MethodType: _method,
    partial: _partial,
}

_ENCODERS: dict[type, Encoder | None] = {
    type(None): None,
    bool: None,
    float: None,
    int: _integer,
    str: _text,
    bytes: _bytes,
    bytearray: lambda e, v: [codes.BYTE_ARRAY, _bytes(e, bytes(v))],
    complex: lambda e, v: [codes.COMPLEX, v.real, v.imag],
    range: partial(_three, codes.RANGE),
    slice: partial(_three, codes.SLICE),
    type(...): lambda e, v: [codes.ELLIPSIS],
    tuple: partial(_sequence, codes.TUPLE),
    list: partial(_sequence, codes.LIST),
    set: partial(_set, codes.SET),
    frozenset: partial(_set, codes.FROZENSET),
    dict: partial(_mapping, codes.DICT),
    types.MappingProxyType: partial(_mapping, codes.DICT),
    OrderedDict: partial(_mapping, codes.ORDERED_DICT),
    defaultdict: _default_dict,
    **arrays.ENCODERS,
    **_CALLABLES,
}
"""By exact type, for what is frequent."""

_KINDS: list[tuple[Callable[[Any], bool], Encoder]] = [
    *arrays.KINDS,
    (lambda v: isinstance(v, Future | concurrent.futures.Future), _future),
    (lambda v: isinstance(v, enum.Enum), _enum),
    (lambda v: isinstance(v, tuple) and hasattr(v, "_fields"), _namedtuple),
    (lambda v: isinstance(v, BaseException), _exception),
    (lambda v: dataclasses.is_dataclass(v) and not isinstance(v, type), _dataclass),
    (lambda v: hasattr(type(v), "tree_unflatten"), _pytree),
    (callable, _reference),
]
"""In this order, for a value of any other type."""

_DECODERS: dict[int, Decoder] = {
    codes.REGISTERED: _registered,
    codes.BIG_INT: lambda d, n: int.from_bytes(
        _decoded_bytes(d, n), "little", signed=True
    ),
    codes.BYTES: _leaf_bytes,
    codes.TEXT: _leaf_text,
    codes.BYTE_ARRAY: lambda d, n: bytearray(_decoded_bytes(d, n)),
    codes.COMPLEX: lambda d, n: complex(*parts(n, float, float)),
    codes.RANGE: partial(_made, range),
    codes.SLICE: partial(_made, slice),
    codes.ELLIPSIS: lambda d, n: ...,
    codes.TUPLE: lambda d, n: tuple(d.values(n)),
    codes.LIST: lambda d, n: list(d.values(n)),
    codes.SET: lambda d, n: _hashing(set, d.values(n)),
    codes.FROZENSET: lambda d, n: _hashing(frozenset, d.values(n)),
    codes.DICT: lambda d, n: _hashing(dict, d.pairs(n)) if len(n) > 1 else {},
    codes.ORDERED_DICT: lambda d, n: _hashing(OrderedDict, d.pairs(n)),
    codes.DEFAULT_DICT: _decoded_default_dict,
    **arrays.DECODERS,
    codes.REFERENCE: _referenced,
    codes.METHOD: _decoded_method,
    codes.PARTIAL: _decoded_partial,
    codes.DATACLASS: _decoded_dataclass,
    codes.NAMEDTUPLE: _decoded_namedtuple,
    codes.ENUM: _member,
    codes.FLAG: _flag,
    codes.PYTREE: _decoded_pytree,
    codes.EXCEPTION: _decoded_exception,
}
