"""Values to trees and leaves, and back: what rpc can send, and how."""

from collections.abc import Callable, Sequence
from typing import Any

from jdist.rpc.codec import codes
from jdist.rpc.codec.decoding import Decoding
from jdist.rpc.codec.encoding import HANDLERS, Encoding
from jdist.rpc.functions import FunctionTable


class Codec:
    """Encodes values into a tree and leaves, and decodes them.

    Args:
      functions: Which functions and classes may be named.
      allow_pickle: Whether what is not otherwise encodable goes by pickle, which lets
        every peer run anything here.
      depth: How deeply values may be nested.
    """

    def __init__(
        self, functions: FunctionTable, allow_pickle: bool = False, depth: int = 100
    ) -> None:
        self.functions = functions
        self._allow_pickle = allow_pickle
        self._depth = depth
        self._handlers = dict(HANDLERS)
        self._registered: dict[str, Callable[[Any], Any]] = {}

    def encode(self, value: Any) -> tuple[Any, list[Any]]:
        """The value's structure as a tree, and its arrays in order of appearance."""
        encoding = Encoding(
            self.functions, self._handlers, self._depth, self._allow_pickle
        )
        return encoding.node(value), encoding.leaves

    def decode(self, tree: Any, leaves: Sequence[Any]) -> Any:
        """The value again."""
        return Decoding(
            self.functions, self._registered, leaves, self._depth, self._allow_pickle
        ).value(tree)

    def register(
        self,
        kind: type,
        code: str,
        encode: Callable[[Any], Any],
        decode: Callable[[Any], Any],
    ) -> None:
        """Lets objects of exactly this type travel.

        Args:
          kind: The type.
          code: Its name on the wire, the same on all workers.
          encode: Makes a value that is encodable of an object; may raise.
          decode: Makes an object of that value; may raise.
        """

        def handler(encoding: Encoding, value: Any) -> Any:
            return [codes.REGISTERED, code, *encoding.nodes(0, (encode(value),))[1:]]

        self._handlers[kind] = handler
        self._registered[code] = decode
