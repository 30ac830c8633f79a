"""A tree on its way back to a value: whatever it says is checked before it is used."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.message_context import MessageContext
from jdist.rpc.codec.functions import FunctionTable

__all__ = ["Decoder", "Decoding", "parts", "parts_at_least"]


Decoder = Callable[["Decoding", list[Any]], Any]
"""Makes the value of a node of one kind."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


class Decoding:
    """One tree being decoded.

    Args:
      functions: Finds functions and classes by name.
      decoders: By code.
      registered: Decode hooks of `Codec.register`, by their codes.
      leaves: The frame's arrays.
      depth: How many levels are left.
      message: For the hooks of registered types.
    """

    __slots__ = ("_decoders", "_depth", "functions", "leaves", "message", "registered")

    def __init__(
        self,
        functions: FunctionTable,
        decoders: Sequence[Decoder],
        registered: Mapping[str, Callable[[Any, MessageContext | None], Any]],
        leaves: Sequence[Any],
        depth: int,
        message: MessageContext | None,
    ) -> None:
        self.functions = functions
        self.registered = registered
        self.leaves = leaves
        self.message = message
        self._decoders = decoders
        self._depth = depth

    def value(self, tree: Any) -> Any:
        """The value of a tree."""
        if type(tree) is not list:
            if type(tree) in _PLAIN:
                return tree
            raise ProtocolError(f"A tree holds a {type(tree).__name__}.")
        # Everything below is what a peer sent, and nothing of it is believed.
        code = tree[0] if tree else None
        if type(code) is not int or not 0 <= code < len(self._decoders):
            raise ProtocolError("A tree has a node of unknown kind.")
        if not self._depth:
            raise ProtocolError("A tree is nested too deeply.")
        # A tree of a hostile peer could exhaust the stack.
        self._depth -= 1
        value = self._decoders[code](self, tree)
        self._depth += 1
        return value

    def values(self, node: list[Any], start: int = 1) -> Iterator[Any]:
        """The values of the trees in a node, from `start` on."""
        return map(self.value, node[start:])

    def pairs(self, node: list[Any], start: int = 1) -> Iterator[tuple[Any, Any]]:
        """The values of the trees in a node, two by two."""
        if (len(node) - start) % 2:
            raise ProtocolError("A node has a key without a value.")
        values = self.values(node, start)
        return zip(values, values, strict=True)

    def leaf(self, index: Any) -> Any:
        """The array of this index."""
        if type(index) is not int or not 0 <= index < len(self.leaves):
            raise ProtocolError("A tree names an array that the frame does not have.")
        return self.leaves[index]

    def type_named(self, name: Any) -> type:
        """The class of this name.

        Raises:
          ForbiddenFunction: It is not allowed.
        """
        # By `resolve`, not `named`: the class is put together from fields, not called.
        found = self.functions.resolve(name) if type(name) is str else None
        if not isinstance(found, type):
            raise ProtocolError("A node must name a class here.")
        return found


def parts(node: list[Any], *kinds: type) -> list[Any]:
    """The elements after the code of a node: exactly one of each of `kinds`."""
    rest = node[1:]
    if len(rest) != len(kinds) or not all(map(isinstance, rest, kinds)):
        raise ProtocolError(f"A node of kind {node[0]} is malformed.")
    return rest


def parts_at_least(node: list[Any], count: int) -> list[Any]:
    """The elements after the code of a node: `count` or more."""
    if len(node) <= count:
        raise ProtocolError(f"A node of kind {node[0]} is malformed.")
    return node[1:]
