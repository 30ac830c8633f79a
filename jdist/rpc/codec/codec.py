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
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._compat import is_traced
from jdist._errors import quoted, requirement, type_error, value_error
from jdist._tree import type_name
from jdist.rpc.base.current import Meta, Operation
from jdist.rpc.base.errors import ForbiddenFunction, ProtocolError, RpcError
from jdist.rpc.base.future import Future
from jdist.rpc.base.ids import GloballyUniqueId
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.codec import codes, nnx
from jdist.rpc.codec.codes import DTYPE_NAMES, Tree, dtype_name, dtype_named
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.codec.remote_exception import describe, rebuild

_NONE = Operation("")


@dataclasses.dataclass(slots=True, eq=False, weakref_slot=True)
class MessageContext:
    """Context of one call or answer, for the codec's hooks of registered types.

    The hooks fill it in; the caller of the codec reads it. Most messages need none of
    it, so an empty one is cheap: its lists are shared empty tuples.

    Attributes:
      worker: The receiver of a message that is sent, the sender of one that came.
      meta: The message's metadata. Entries of encode hooks travel with it.
      operation: The call that a sent message belongs to.
      forks: The references that are sent in it.
      unsettled: Futures that must be complete before the decoded value may be used.
      crossing: State of a package built upon rpc, from the message's first value on.
      if_lost: Called when the call that it is of has failed: encoding it, on its way,
        or on the callee. Of answers, when encoding one failed.
    """

    worker: WorkerInfo
    meta: Meta = dataclasses.field(default_factory=dict)
    operation: Operation = _NONE
    crossing: Any = None
    # Shared empty tuples: most messages need none of the three.
    forks: Sequence[GloballyUniqueId] = ()
    unsettled: Sequence[Future[Any]] = ()
    if_lost: Sequence[Callable[[], None]] = ()


# --- one value being encoded, or one tree being decoded ---

Encoder = Callable[["Encoding", Any], Tree]
"""Makes a tree of a value of one kind; asks the `Encoding` for the trees within."""


class Encoding:
    """One value being encoded: its leaves so far.

    Args:
      codec: Has the encoders, and names functions and classes.
      message: For the hooks of registered types.
    """

    __slots__ = ("_places", "codec", "depth", "leaves", "message")

    def __init__(self, codec: "Codec", message: MessageContext | None) -> None:
        self.codec = codec
        self.depth = codec.depth  # how many levels are left
        self.message = message
        self.leaves: list[Any] = []
        # By id: arrays cannot be hashed.
        self._places: dict[int, int] = {}

    def tree(self, value: Any) -> Tree:
        """Encodes a value as a tree."""
        encoder = self.codec.encoders.get(type(value), self.codec.otherwise)
        return value if encoder is None else encoder(self, value)

    def node(self, values: Iterable[Any], code: int, *more: Tree) -> list[Tree]:
        """Makes a node: its code, what else is given, and the trees of values.

        Raises:
          ValueError: There is no level left: the value probably contains itself.
        """
        if not self.depth:
            rule = "must not be nested that deeply, nor contain itself"
            raise value_error("rpc(value)", rule, "one level too many")
        # Counted, not left to RecursionError: the peer counts the same levels.
        self.depth -= 1
        node: list[Tree] = [code, *more]
        encoder_of, otherwise = self.codec.encoders.get, self.codec.otherwise
        for value in values:
            # As in `tree`, without a call for each value.
            encoder = encoder_of(type(value), otherwise)
            node.append(value if encoder is None else encoder(self, value))
        self.depth += 1
        return node

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Refuses keys of a dictionary, or elements of a set, that change their type.

        Raises:
          TypeError: One arrives as something that cannot be found by it.
        """
        kinds = self.codec.not_keys
        for kind in map(type, keys):
            if kind not in kinds:
                continue
            name = kind.__name__
            rule = f"must have no {name} as a key or in a set: it arrives as its arrays"
            remedy = (
                f"Send what belongs to it under a name of your own, or an RRef to the "
                f"{name} as the key."
            )
            raise type_error("rpc(value)", rule, f"a {name}", remedy)

    def leaf(self, array: Any) -> list[Tree]:
        """Makes the node of an array; the same array is one leaf only."""
        # `leaves` keeps each array alive, so that its id stays its own.
        new = len(self.leaves)
        index = self._places.setdefault(id(array), new)
        if index == new:
            self.leaves.append(array)
        return [codes.LEAF, index]

    def undo(self, leaves: int, depth: int) -> None:
        """Restores an earlier state after a failed attempt."""
        self.depth = depth
        for array in self.leaves[leaves:]:
            del self._places[id(array)]
        del self.leaves[leaves:]


Decoder = Callable[["Decoding", list[Tree]], Any]
"""Makes the value of a node of one kind."""

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})


class Decoding:
    """One tree being decoded.

    Args:
      codec: Has the decoders, and finds functions and classes by name.
      leaves: The frame's arrays.
      message: For the hooks of registered types.
    """

    __slots__ = ("_decoders", "_depth", "codec", "leaves", "message")

    def __init__(
        self, codec: "Codec", leaves: Sequence[Any], message: MessageContext | None
    ) -> None:
        self.codec = codec
        self.leaves = leaves
        self.message = message
        self._decoders = codec.decoders
        self._depth = codec.depth

    def value(self, tree: Tree) -> Any:
        """Decodes a tree."""
        if type(tree) is not list:
            if type(tree) in _SCALARS:
                return tree
            raise ProtocolError(f"A tree holds a {type(tree).__name__}.")
        # All that follows was sent by a peer and is not trusted.
        code = tree[0] if tree else None
        decoder = self._decoders.get(code) if type(code) is int else None
        if decoder is None:
            raise ProtocolError("A tree has a node of unknown kind.")
        if not self._depth:
            raise ProtocolError("A tree is nested too deeply.")
        # A tree of a hostile peer could exhaust the stack.
        self._depth -= 1
        value = decoder(self, tree)
        self._depth += 1
        return value

    def values(self, node: list[Tree]) -> list[Any]:
        """Decodes the trees in a node."""
        # Scalars as in `value`, without a call for each.
        return [
            tree if type(tree) in _SCALARS else self.value(tree) for tree in node[1:]
        ]

    def parts(self, node: list[Tree], *kinds: Any) -> list[Any]:
        """Decodes the trees in a node: exactly one of each of `kinds`."""
        values = self.values(node)
        if len(values) != len(kinds) or not all(map(isinstance, values, kinds)):
            raise ProtocolError(f"A node of kind {node[0]!r} is malformed.")
        return values

    def leaf(self, index: Any) -> Any:
        """Returns the array of this index."""
        if type(index) is not int or not 0 <= index < len(self.leaves):
            raise ProtocolError("A tree names an array that the frame does not have.")
        return self.leaves[index]

    def type_named(self, name: Any) -> type:
        """Finds the class of this name.

        Raises:
          ForbiddenFunction: It is not allowed.
        """
        # By `resolve`, not `named`: the class is put together from fields, not called.
        found = self.codec.functions.resolve(name) if type(name) is str else None
        if not isinstance(found, type):
            raise ProtocolError("A node must name a class here.")
        return found


def _made(make: Callable[..., Any], *values: Any) -> Any:
    """What `make` makes of values that a peer has sent."""
    try:
        return make(*values)
    except RpcError:
        raise
    except Exception as error:
        raise ProtocolError(f"A value cannot be made: {error}") from error


# --- the codec of a worker ---

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
        self.depth = depth
        self.encoders = dict(_ENCODERS)
        self.decoders = dict(_DECODERS)
        self.registered: dict[str, Hook] = {}
        # Types whose instances arrive as something else: useless as keys.
        self.not_keys: set[type] = set()
        self.otherwise: Encoder = self._by_kind
        if allow_pickle:
            self.decoders[codes.PICKLE] = _unpickled
            self.otherwise = _or_pickled(self._by_kind)
            # Functions without a name that others could look up: lambdas, closures.
            for kind, encoder in _CALLABLES.items():
                self.encoders[kind] = _or_pickled(encoder)

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
        encoding = Encoding(self, message)
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
        return Decoding(self, leaves, message).value(tree)

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
        if code in self.registered:
            raise value_error("Codec.register(code=...)", "must be new", quoted(code))

        def encoder(encoding: Encoding, value: Any) -> Tree:
            other = encode(value, encoding.message)
            return encoding.node((other,), codes.REGISTERED, code)

        self.encoders[kind] = encoder
        self.registered[code] = decode
        if not key:
            self.not_keys.add(kind)

    def substitute(self, kind: type, other: Hook) -> None:
        """Registers a value to send in place of objects of exactly the type `kind`.

        They cannot be keys of a dictionary or elements of a set, where they are found
        by their own type.

        Args:
          kind: The type.
          other: `other(object, message)` makes the value, each time one is sent.
        """
        self.encoders[kind] = lambda encoding, value: encoding.tree(
            other(value, encoding.message)
        )
        self.not_keys.add(kind)

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
            self.encoders[type(value)] = _jax_array
        return tree


def _registered(decoding: Decoding, node: list[Tree]) -> Any:
    code, value = decoding.parts(node, str, object)
    decode = decoding.codec.registered.get(code)
    if decode is None:
        raise ProtocolError(f"No type is registered as {code[:40]!r} on this worker.")
    return decode(value, decoding.message)


def _refusal(value: Any) -> str:
    rule = "must be made of scalars, containers, arrays, dataclasses and functions"
    remedy = (
        "Make its class a dataclass, keep it where it is and send an RRef to it, or "
        "start every worker with `allow_pickle=True`."
    )
    kind = type(value)
    # With its module, as several may have a class of this name.
    home = "" if kind.__module__ == "builtins" else f" of {kind.__module__}"
    return requirement("rpc(value)", rule, f"{type_name(value)}{home}", remedy)


# --- Python's own scalars, texts, bytes, ranges, slices and containers ---

_LONG = 4096
"""Length in bytes or characters from which on bytes and texts travel as leaves: in the
body, not copied."""

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
    return encoding.node((value.start, value.stop, value.step), code)


def _set(code: int, encoding: Encoding, elements: Collection[Any]) -> Tree:
    encoding.check_keys(elements)
    return encoding.node(elements, code)


def _mapping(code: int, encoding: Encoding, mapping: Mapping[Any, Any]) -> Tree:
    return encoding.node(_items(encoding, mapping), code)


def _items(encoding: Encoding, mapping: Mapping[Any, Any]) -> Iterable[Any]:
    encoding.check_keys(mapping)
    return chain.from_iterable(mapping.items())


def _default_dict(encoding: Encoding, value: defaultdict[Any, Any]) -> Tree:
    items = _items(encoding, value)
    return encoding.node(chain((value.default_factory,), items), codes.DEFAULT_DICT)


def _leaf_bytes(decoding: Decoding, node: list[Tree]) -> bytes:
    leaf = decoding.leaf(*decoding.parts(node, int))
    if type(leaf) is not np.ndarray or leaf.dtype != np.uint8:
        raise ProtocolError("Bytes must travel as bytes.")
    return leaf.tobytes()


def _leaf_text(decoding: Decoding, node: list[Tree]) -> Any:
    return _made(str, _leaf_bytes(decoding, node), "utf-8", "surrogatepass")


def _pairs(values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    if len(values) % 2:
        raise ProtocolError("A node has a key without a value.")
    return zip(values[::2], values[1::2], strict=True)


def _decoded_default_dict(factory: Any, *values: Any) -> Any:
    return defaultdict(factory, _pairs(values))


# --- arrays, NumPy scalars, dtypes and keys ---


def _numpy_array(encoding: Encoding, value: np.ndarray) -> Tree:
    if value.dtype not in DTYPE_NAMES:
        dtype_name(value.dtype)  # raises here, so that no transport accepts more
    return encoding.leaf(value)


def _zero_cotangent(encoding: Encoding, value: np.ndarray) -> Tree:
    return encoding.leaf(np.asarray(value))


def _jax_array(encoding: Encoding, value: jax.Array) -> Tree:
    """Encode a JAX array that is no tracer and holds no keys."""
    # Checked here, with a remedy: JAX's own error would come from the transport.
    if value.is_deleted():
        rule = "must not have been deleted"
        remedy = "It was donated to a compiled function: send it before, or a copy."
        raise value_error("rpc(array)", rule, "a deleted array", remedy)
    if not (value.is_fully_addressable or value.is_fully_replicated):
        rule = "must be addressable by this process as a whole, to be gathered"
        remedy = (
            "Gather it with `jax.experimental.multihost_utils.process_allgather`, or "
            "send the shards of this process: `array.addressable_data(0)`."
        )
        raise value_error("rpc(array)", rule, str(value.sharding), remedy)
    return encoding.leaf(value)


def _any_jax_array(encoding: Encoding, value: jax.Array) -> Tree:
    if is_traced(value):
        remedy = (
            "Inside jit, grad or vmap an array has none yet: make the call outside, or "
            "from a host callback."
        )
        raise value_error("rpc(array)", "must have a value", str(value), remedy)
    if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return _jax_array(encoding, value)
    # A key array has no bytes of its own; its implementation travels by name.
    data = jax.random.key_data(value)
    return encoding.node((data,), codes.KEY, str(jax.random.key_impl(value)))


def _scalar(encoding: Encoding, value: np.generic) -> Tree:
    # An empty text has no size, but NumPy gives it room for one character.
    data = value.tobytes()[: value.dtype.itemsize]
    return [codes.SCALAR, dtype_name(value.dtype), data]


def _is_zero_cotangent(value: Any) -> bool:
    # JAX's gradient of an integer, in an array class of its own.
    return isinstance(value, np.ndarray) and value.dtype == jax.dtypes.float0


def _leaf(decoding: Decoding, node: list[Tree]) -> Any:
    if len(node) != 2:
        raise ProtocolError("An array's node is malformed.")
    return decoding.leaf(node[1])


def _decoded_scalar(decoding: Decoding, node: list[Tree]) -> Any:
    name, data = decoding.parts(node, str, bytes)
    dtype = dtype_named(name)
    if len(data) != dtype.itemsize:
        raise ProtocolError(f"A scalar of {name} does not have {len(data)} bytes.")
    return np.frombuffer(data, dtype)[0] if data else np.zeros((), dtype)[()]


def _key(name: str, data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(data, impl=name)


# --- functions, classes and methods: by name, never by their code ---


def _reference(encoding: Encoding, value: Any) -> Tree:
    return [codes.REFERENCE, encoding.codec.functions.reference(value)]


def _method(encoding: Encoding, value: types.MethodType) -> Tree:
    owner, name = value.__self__, value.__name__
    if encoding.codec.functions.method(owner, name) != value:
        rule = "must be what its name means in the class of its object"
        raise value_error("rpc(method)", rule, value)
    return encoding.node((owner, name), codes.METHOD)


def _partial(encoding: Encoding, value: partial) -> Tree:
    inner = (value.func, value.args, value.keywords)
    return encoding.node(inner, codes.PARTIAL)


def _decoded_partial(decoding: Decoding, node: list[Tree]) -> Any:
    function, args, keywords = decoding.parts(node, Callable, tuple, dict)
    if not all(type(name) is str for name in keywords):
        raise ProtocolError("A partial's keyword is no text.")
    return partial(function, *args, **keywords)


# --- objects of classes that both sides can import ---

# No `__init__`, `__new__` or `__post_init__` runs on arrival: an object is put together
# again from its fields, as `copy.copy` does, so that it is what was sent.


def _name_of(encoding: Encoding, value: Any) -> str:
    return encoding.codec.functions.reference(type(value))


def _dataclass(encoding: Encoding, value: Any) -> Tree:
    name = _name_of(encoding, value)
    try:
        # Raises for a class with C state, which the fields would not carry.
        object.__new__(type(value))
    except TypeError as error:
        rule = "must not be a dataclass with contents beside its fields"
        raise type_error("rpc(value)", rule, name, f"{error}.") from error
    fields = [field.name for field in dataclasses.fields(value)]
    pairs = ((field, getattr(value, field)) for field in fields)
    return encoding.node(chain.from_iterable(pairs), codes.DATACLASS, name)


def _namedtuple(encoding: Encoding, value: Any) -> Tree:
    return encoding.node(value, codes.NAMEDTUPLE, _name_of(encoding, value))


def _enum(encoding: Encoding, value: enum.Enum) -> Tree:
    # A combination of flags has no name among the members.
    named = value.name in type(value).__members__
    key = value.name if named else value.value
    return encoding.node((key,), codes.ENUM, _name_of(encoding, value))


def _pytree(encoding: Encoding, value: Any) -> Tree:
    name = _name_of(encoding, value)
    children, static = value.tree_flatten()
    return encoding.node((static, *children), codes.PYTREE, name)


def _exception(encoding: Encoding, value: BaseException) -> Tree:
    return encoding.node((describe(value, ""),), codes.EXCEPTION)


def _future(encoding: Encoding, value: Any) -> Tree:
    # torch's words, because its users search for them.
    rule = 'must not be a future: "Can not pickle torch.futures.Future"'
    remedy = (
        "Send what it waits for, `future.wait()`, or return it from a function "
        "decorated with `@rpc.async_execution`."
    )
    raise type_error("rpc(value)", rule, value, remedy)


def _of_class(make: Callable[..., Any]) -> Decoder:
    """Decodes the name of a class and values, of which `make` makes an object."""

    def decode(decoding: Decoding, node: list[Tree]) -> Any:
        name, *values = decoding.values(node) or (None,)
        return _made(make, decoding.type_named(name), *values)

    return decode


def _decoded_dataclass(kind: type, *values: Any) -> Any:
    if not dataclasses.is_dataclass(kind) or issubclass(kind, BaseException):
        raise TypeError(f"{kind.__name__} is no dataclass that can travel")
    fields = [field.name for field in dataclasses.fields(kind)]
    found = dict(_pairs(values))
    if list(found) != fields:
        raise TypeError(f"the fields of {kind.__name__} are others here: {fields}")
    # Neither constructor runs: it could do anything, and need other arguments.
    made = object.__new__(kind)
    for name, value in found.items():
        object.__setattr__(made, name, value)
    return made


def _decoded_namedtuple(kind: type, *values: Any) -> Any:
    fields = getattr(kind, "_fields", None)
    if not issubclass(kind, tuple) or type(fields) is not tuple:
        raise TypeError(f"{kind.__name__} is no named tuple")
    if len(fields) != len(values):
        raise TypeError(f"the fields of {kind.__name__} are others here: {fields}")
    # Past the class's own `__new__`, for the same reason.
    return tuple.__new__(kind, values)


def _member(kind: type, key: Any) -> enum.Enum:
    if type(key) is int and issubclass(kind, enum.Flag):
        return kind(key)
    if not issubclass(kind, enum.Enum) or key not in kind.__members__:
        raise TypeError(f"{kind.__name__} has no member {quoted(key)} here")
    return kind.__members__[key]


def _decoded_pytree(kind: Any, static: Any, *children: Any) -> Any:
    return kind.tree_unflatten(static, children)


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
        remedy = f"{refusal} {error}"
        message = requirement("rpc(value)", rule, type_name(value), remedy)
        raise TypeError(message) from error


def _unpickled(decoding: Decoding, node: list[Tree]) -> Any:
    """Decodes a pickle; for a codec with allow_pickle=True only."""
    return _made(pickle.loads, *decoding.parts(node, bytes))


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
    tuple: partial(Encoding.node, code=codes.TUPLE),
    list: partial(Encoding.node, code=codes.LIST),
    set: partial(_set, codes.SET),
    frozenset: partial(_set, codes.FROZENSET),
    dict: partial(_mapping, codes.DICT),
    types.MappingProxyType: partial(_mapping, codes.DICT),
    OrderedDict: partial(_mapping, codes.ORDERED_DICT),
    defaultdict: _default_dict,
    np.ndarray: _numpy_array,
    **_CALLABLES,
}
"""Encoders of frequent types, by exact type."""

_KINDS: list[tuple[Callable[[Any], bool], Encoder]] = [
    (_is_zero_cotangent, _zero_cotangent),
    (lambda v: isinstance(v, jax.Array), _any_jax_array),
    (lambda v: isinstance(v, np.generic), _scalar),
    (lambda v: isinstance(v, np.dtype), lambda e, v: [codes.DTYPE, dtype_name(v)]),
    (
        lambda v: isinstance(v, type) and issubclass(v, np.generic),
        lambda e, v: [codes.DTYPE_CLASS, dtype_name(np.dtype(v))],
    ),
    (lambda v: isinstance(v, Future | concurrent.futures.Future), _future),
    (lambda v: isinstance(v, enum.Enum), _enum),
    (lambda v: isinstance(v, tuple) and hasattr(v, "_fields"), _namedtuple),
    (lambda v: isinstance(v, BaseException), _exception),
    (lambda v: dataclasses.is_dataclass(v) and not isinstance(v, type), _dataclass),
    (lambda v: hasattr(type(v), "tree_unflatten"), _pytree),
    (callable, _reference),
]
"""Tests and encoders for values of all other types, tried in this order."""

_DECODERS: dict[int, Decoder] = {
    codes.REGISTERED: _registered,
    codes.BIG_INT: lambda d, n: int.from_bytes(
        d.parts(n, bytes)[0], "little", signed=True
    ),
    codes.BYTES: _leaf_bytes,
    codes.TEXT: _leaf_text,
    codes.BYTE_ARRAY: lambda d, n: bytearray(*d.parts(n, bytes)),
    codes.COMPLEX: lambda d, n: complex(*d.parts(n, float, float)),
    codes.RANGE: lambda d, n: _made(range, *d.parts(n, object, object, object)),
    codes.SLICE: lambda d, n: slice(*d.parts(n, object, object, object)),
    codes.ELLIPSIS: lambda d, n: ...,
    codes.TUPLE: lambda d, n: tuple(d.values(n)),
    codes.LIST: lambda d, n: d.values(n),
    codes.SET: lambda d, n: _made(set, d.values(n)),
    codes.FROZENSET: lambda d, n: _made(frozenset, d.values(n)),
    codes.DICT: lambda d, n: _made(dict, _pairs(d.values(n))) if len(n) > 1 else {},
    codes.ORDERED_DICT: lambda d, n: _made(OrderedDict, _pairs(d.values(n))),
    codes.DEFAULT_DICT: lambda d, n: _made(_decoded_default_dict, *d.values(n)),
    codes.LEAF: _leaf,
    codes.SCALAR: _decoded_scalar,
    codes.DTYPE: lambda d, n: dtype_named(*d.parts(n, str)),
    codes.DTYPE_CLASS: lambda d, n: dtype_named(*d.parts(n, str)).type,
    codes.KEY: lambda d, n: _made(_key, *d.parts(n, str, jax.Array)),
    codes.REFERENCE: lambda d, n: d.codec.functions.named(*d.parts(n, str)),
    codes.METHOD: lambda d, n: d.codec.functions.method(*d.parts(n, object, str)),
    codes.PARTIAL: _decoded_partial,
    codes.DATACLASS: _of_class(_decoded_dataclass),
    codes.NAMEDTUPLE: _of_class(_decoded_namedtuple),
    codes.ENUM: _of_class(_member),
    codes.PYTREE: _of_class(_decoded_pytree),
    codes.EXCEPTION: lambda d, n: rebuild(d.parts(n, object)[0], d.codec.functions),
    codes.PICKLE: _forbidden_pickle,
}
