"""The state of encoding one value as a tree, and of decoding one tree.

`codes` has the format of a tree. A peer's tree is checked before it is used.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from jdist._errors import requirement
from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.invocation import MessageContext
from jdist.rpc.codec.codes import LEAF, Tree
from jdist.rpc.codec.functions import FunctionTable

__all__ = ["Decoder", "Decoding", "Encoder", "Encoding", "parts", "parts_at_least"]


Encoder = Callable[["Encoding", Any], Tree]
"""Makes a tree of a value of one kind; asks the `Encoding` for the trees within."""


class Encoding:
    """One value being encoded: its leaves so far, and the encoders.

    Args:
      functions: Names functions and classes.
      encoders: By exact type, for what is frequent; None for values that are trees.
      otherwise: For a value of any other type.
      depth: How many levels are left.
      message: For the hooks of registered types.
      not_keys: Types that arrive as something else than they are.
    """

    __slots__ = (
        "_encoders", "_not_keys", "_otherwise", "_places", "depth", "functions",
        "leaves", "message",
    )  # fmt: skip

    def __init__(
        self,
        functions: FunctionTable,
        encoders: Mapping[type, Encoder | None],
        otherwise: Encoder,
        depth: int,
        message: MessageContext | None,
        not_keys: Set[type],
    ) -> None:
        self.functions = functions
        self.depth = depth
        self.message = message
        self.leaves: list[Any] = []
        self._encoders = encoders
        self._otherwise = otherwise
        self._not_keys = not_keys
        # By id: arrays cannot be hashed.
        self._places: dict[int, int] = {}

    def tree(self, value: Any) -> Tree:
        """Encodes a value as a tree."""
        encoder = self._encoders.get(type(value), self._otherwise)
        return value if encoder is None else encoder(self, value)

    def node(self, head: list[Tree], values: Iterable[Any]) -> list[Tree]:
        """Appends the trees of values, one level deeper, to `head`.

        Raises:
          ValueError: There is no level left: the value probably contains itself.
        """
        if not self.depth:
            rule = "must not be nested that deeply, nor contain itself"
            raise ValueError(requirement("rpc(value)", rule, "one level too many"))
        # Counted, not left to RecursionError: the peer counts the same levels.
        self.depth -= 1
        encoder_of, otherwise = self._encoders.get, self._otherwise
        for value in values:
            # As in `tree`, without a call for each value.
            encoder = encoder_of(type(value), otherwise)
            head.append(value if encoder is None else encoder(self, value))
        self.depth += 1
        return head

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Refuses keys of a dictionary, or elements of a set, that change their type.

        Raises:
          TypeError: One arrives as something that cannot be found by it.
        """
        for key in keys if self._not_keys else ():
            if type(key) not in self._not_keys:
                continue
            kind = type(key).__name__
            rule = f"must have no {kind} as a key or in a set: it arrives as its arrays"
            remedy = (
                f"Send what belongs to it under a name of your own, or an RRef to the "
                f"{kind} as the key."
            )
            raise TypeError(requirement("rpc(value)", rule, f"a {kind}", remedy))

    def leaf(self, array: Any) -> list[Tree]:
        """Makes the node of an array; the same array is one leaf only."""
        # `leaves` keeps each array alive, so that its id stays its own.
        new = len(self.leaves)
        index = self._places.setdefault(id(array), new)
        if index == new:
            self.leaves.append(array)
        return [LEAF, index]

    def undo(self, leaves: int, depth: int) -> None:
        """Restores an earlier state after a failed attempt."""
        self.depth = depth
        for array in self.leaves[leaves:]:
            del self._places[id(array)]
        del self.leaves[leaves:]


Decoder = Callable[["Decoding", list[Tree]], Any]
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

    def value(self, tree: Tree) -> Any:
        """Decodes a tree."""
        if type(tree) is not list:
            if type(tree) in _PLAIN:
                return tree
            raise ProtocolError(f"A tree holds a {type(tree).__name__}.")
        # All that follows was sent by a peer and is not trusted.
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

    def values(self, node: list[Tree], start: int = 1) -> list[Any]:
        """Decodes the trees in a node, from `start` on."""
        # Scalars as in `value`, without a call for each.
        return [
            tree if type(tree) in _PLAIN else self.value(tree) for tree in node[start:]
        ]

    def pairs(self, node: list[Tree], start: int = 1) -> Iterator[tuple[Any, Any]]:
        """Decodes the trees in a node as pairs."""
        if (len(node) - start) % 2:
            raise ProtocolError("A node has a key without a value.")
        values = self.values(node, start)
        return zip(values[::2], values[1::2], strict=True)

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
        found = self.functions.resolve(name) if type(name) is str else None
        if not isinstance(found, type):
            raise ProtocolError("A node must name a class here.")
        return found


def parts(node: list[Tree], *kinds: type) -> list[Any]:
    """Return the elements after a node's code: exactly one of each of `kinds`."""
    rest = node[1:]
    if len(rest) != len(kinds) or not all(map(isinstance, rest, kinds)):
        raise ProtocolError(f"A node of kind {node[0]!r} is malformed.")
    return rest


def parts_at_least(node: list[Tree], count: int) -> list[Any]:
    """Return the elements after a node's code: `count` or more."""
    if len(node) <= count:
        raise ProtocolError(f"A node of kind {node[0]!r} is malformed.")
    return node[1:]
