"""Values as trees and leaves, and back: what rpc can send.

A *tree* is made of plain scalars and lists (`jdist.rpc.codec.codes` has the format);
the *leaves* are the arrays of the value, untouched. What arrives is what was sent:

- None, bool, int of any size, float, complex, str, bytes, bytearray, range, slice, ...
- tuple, list, dict in its order, OrderedDict, defaultdict, sets, named tuples; a
  read-only view of a dictionary as a dictionary;
- dataclasses, enums, and pytrees with `tree_flatten` and `tree_unflatten`, of classes
  that `FunctionTable` lets one name;
- NumPy arrays of numbers, booleans, dates and fixed-length texts; in C order on
  arrival, writable, in memory of their own; NumPy scalars and dtypes;
- JAX arrays of every dtype, weak types and PRNG keys with their implementation; on the
  receiver's device, gathered if they were sharded over devices of the sender;
- functions, classes and bound methods by name, `functools.partial` of them;
- exceptions, as `jdist.rpc.codec.remote_exception` describes them.

An array that occurs twice in a value is sent once and arrives as one; equal containers
arrive as two. Everything else is refused with a reason, unless pickle is allowed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdist._errors import requirement
from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.message_context import MessageContext
from jdist.rpc.codec import callables, codes, nnx, numeric, objects, plain
from jdist.rpc.codec import pickled as pickles
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.codec.tree import Decoder, Decoding, Encoder, Encoding, parts

__all__ = ["Codec"]


Hook = Callable[[Any, MessageContext | None], Any]
"""`hook(value, message)`: see `Codec.register`."""

_ENCODERS = plain.ENCODERS | numeric.ENCODERS
_KINDS = [*numeric.KINDS, *objects.KINDS, *callables.KINDS]


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
        self._encoders = _ENCODERS | callables.ENCODERS
        self._decoders = _decoders(allow_pickle)
        self._registered: dict[str, Hook] = {}
        # Types whose instances arrive as something else: useless as keys.
        self._not_keys: set[type] = set()
        self._otherwise: Encoder = self._by_kind
        if allow_pickle:
            self._otherwise = pickles.or_pickled(self._by_kind)
            # Functions without a name that others could look up: lambdas, closures.
            for kind, encoder in callables.ENCODERS.items():
                self._encoders[kind] = pickles.or_pickled(encoder)

    def encode(
        self, value: Any, message: MessageContext | None = None
    ) -> tuple[Any, list[Any]]:
        """The tree of a value, and its arrays in the order in which they appear.

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
        self, tree: Any, leaves: Sequence[Any], message: MessageContext | None = None
    ) -> Any:
        """The value of a tree and its leaves; `message` as for `encode`.

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
        """Lets objects of exactly the type `kind` travel in a form of their own.

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

        def encoder(encoding: Encoding, value: Any) -> Any:
            return [
                codes.REGISTERED,
                code,
                *encoding.trees((encode(value, encoding.message),)),
            ]

        self._encoders[kind] = encoder
        self._registered[code] = decode
        if not key:
            self._not_keys.add(kind)

    def substitute(self, kind: type, other: Hook) -> None:
        """Lets objects of exactly the type `kind` travel as another value, and stay it.

        They may not be keys of a dictionary, nor in a set: there they are found by what
        they are.

        Args:
          kind: The type.
          other: `other(object, message)` makes the value, each time one is sent.
        """
        self._encoders[kind] = lambda encoding, value: encoding.tree(
            other(value, encoding.message)
        )
        self._not_keys.add(kind)

    def _by_kind(self, encoding: Encoding, value: Any) -> Any:
        """The tree of a value whose type alone does not tell how it travels."""
        why_not = nnx.refusal(value)  # first: a module may be a dataclass, or callable
        if why_not:
            raise TypeError(why_not)
        encoder = next((encoder for fits, encoder in _KINDS if fits(value)), None)
        if encoder is None:
            raise TypeError(_refusal(value))
        tree = encoder(encoding, value)
        if tree[0] == codes.LEAF and isinstance(value, jax.Array):
            # The class of JAX's arrays is known only from an array: found at once now.
            self._encoders[type(value)] = numeric.jax_array
        return tree


def _decoders(allow_pickle: bool) -> list[Decoder]:
    table: dict[int, Decoder] = {
        **plain.DECODERS,
        **numeric.DECODERS,
        **callables.DECODERS,
        **objects.DECODERS,
        codes.REGISTERED: _registered,
        codes.PICKLE: pickles.unpickled if allow_pickle else pickles.forbidden,
    }
    return [table[code] for code in range(len(table))]


def _registered(decoding: Decoding, node: list[Any]) -> Any:
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
