"""A frame: the one thing that travels between workers.

A frame is the same object over every transport. What differs is how its leaves get
there: through a socket as raw buffers, inside one process as references.
"""

from typing import Any, NamedTuple

# Kinds are plain strings so that a part built on rpc can add its own (autograd adds
# "autograd.backward", say) and so that faults can be injected per kind.
CALL = "call"
REPLY = "reply"
ERROR = "error"
CANCEL = "cancel"

ANSWERS = frozenset((REPLY, ERROR))
# These bear the number of the request that they are about, so it comes again.
UNNUMBERED = ANSWERS | {CANCEL}


class Frame(NamedTuple):
    """One message.

    Attributes:
      kind: What it is: a request kind ("call", "group.join", ...), or one of "reply"
        and "error" for the answer, or "cancel" for a request given up.
      id: Number of the request on its channel, rising from 1. An answer bears its
        request's number; a number seen before is a duplicate and ignored.
      meta: Small msgpack-able values by name: the deadline's remaining seconds, the
        caller, what interceptors add.
      tree: The body's structure as `codec.encode` makes it: scalars and nested lists.
      leaves: The body's arrays in order, `numpy.ndarray` or `jax.Array`.
      shared: The channel carries other requests meanwhile, so whoever reads it must
        not make them wait for this one.
    """

    kind: str
    id: int
    meta: dict[str, Any]
    tree: Any
    leaves: list[Any]
    shared: bool = False
