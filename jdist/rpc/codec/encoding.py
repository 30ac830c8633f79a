"""A value on its way to a tree."""

from collections.abc import Callable, Iterable, Set
from typing import Any

from jdist._errors import requirement
from jdist.rpc.base.message_context import MessageContext
from jdist.rpc.codec.codes import LEAF
from jdist.rpc.codec.functions import FunctionTable

__all__ = ["Encoder", "Encoding"]


Encoder = Callable[["Encoding", Any], Any]
"""Makes a tree of a value of one kind; asks the `Encoding` for the trees within."""


class Encoding:
    """One value being encoded: its leaves so far, and how to go on.

    Args:
      functions: Names functions and classes.
      encoders: By exact type, for what is frequent.
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
        encoders: dict[type, Encoder],
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

    def tree(self, value: Any) -> Any:
        """The tree of a value."""
        return self._encoders.get(type(value), self._otherwise)(self, value)

    def trees(self, values: Iterable[Any]) -> list[Any]:
        """The trees of values one level deeper.

        Raises:
          ValueError: There is no level left: the value probably contains itself.
        """
        if not self.depth:
            rule = "must not be nested that deeply, nor contain itself"
            raise ValueError(requirement("rpc(value)", rule, "one level too many"))
        # Counted, not left to RecursionError: the peer counts the same levels.
        self.depth -= 1
        trees = list(map(self.tree, values))
        self.depth += 1
        return trees

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Refuses keys of a dictionary, or elements of a set, that would be lost.

        Raises:
          TypeError: One arrives as something that cannot be found by it.
        """
        if not self._not_keys:
            return
        lost = next((key for key in keys if type(key) in self._not_keys), None)
        if lost is not None:
            kind = type(lost).__name__
            rule = f"must have no {kind} as a key or in a set: it arrives as its arrays"
            remedy = (
                f"Send what belongs to it under a name of your own, or an RRef to the "
                f"{kind} as the key."
            )
            raise TypeError(requirement("rpc(value)", rule, f"a {kind}", remedy))

    def leaf(self, array: Any) -> list[Any]:
        """The tree of an array that travels as it is; the same one only once."""
        # `leaves` keeps each array alive, so that its id stays its own.
        new = len(self.leaves)
        index = self._places.setdefault(id(array), new)
        if index == new:
            self.leaves.append(array)
        return [LEAF, index]

    def undo(self, leaves: int, depth: int) -> None:
        """Goes back to an earlier state, after an attempt that failed."""
        self.depth = depth
        for array in self.leaves[leaves:]:
            del self._places[id(array)]
        del self.leaves[leaves:]
