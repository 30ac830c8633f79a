"""One worker's part of a graph, as plain data that can be sent."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

import jax
import msgspec

from jdist._tree import abbreviated
from jdist.autograd.contexts import Context
from jdist.autograd.engine.engine import dependencies
from jdist.autograd.recording.node import Node, RecvNode, SendNode
from jdist.autograd.recording.variable import LeafNode
from jdist.rpc import ProtocolError
from jdist.rpc.extension import unpacked

NodeKind = Literal["leaf", "function", "send", "receive"]
LEAF: Final = "leaf"
FUNCTION: Final = "function"
SEND: Final = "send"
RECEIVE: Final = "receive"


class GraphNode(NamedTuple):
    """A function of the graph.

    Attributes:
      worker: Name of the worker that has it.
      kind: "leaf" for a variable, "function", "send" or "receive".
      name: Name of the function; for a variable its name, or its dtypes and shapes.
      message_id: Id of the message that a send or receive function belongs to, or 0.
      inputs: Places of the functions whose outputs it uses, in the list that it is in.
      dependencies: Number of gradients it waits for in a backward pass; 0 if that does
        not reach it.
    """

    worker: str
    kind: NodeKind
    name: str
    message_id: int
    inputs: tuple[int, ...]
    dependencies: int


# As in `jdist.autograd.engine.messages`: read in the one thread of an import.
msgspec.msgpack.Decoder(GraphNode)


def graph_nodes(
    context: Context,
    roots: Iterable[Node] = (),
    values: Iterable[Node] = (),
    names: Mapping[Any, str] | None = None,
    marks: Collection[int] | None = None,
) -> list[GraphNode]:
    """List this worker's functions of a graph, each after those that it uses.

    Args:
      context: Its sends and receptions, and all that leads to them, are listed.
      roots: Where a backward pass would begin on this worker.
      values: Functions to be listed too.
      names: Names of this worker's variables.
      marks: Message ids of the sends that the pass waits for; None for all.
    """
    sends = context.send_functions()
    awaited = [send for key, send in sorted(sends.items()) if _is_in(key, marks)]
    counts = dependencies([*roots, *awaited])
    recvs = context.recv_functions()
    # By message id, not by arrival: the same program lists the same order.
    crossing = [node for _, node in sorted([*sends.items(), *recvs.items()])]
    listed = _in_order([*crossing, *roots, *values])
    places = {node: place for place, node in enumerate(listed)}
    worker = context.container.agent.info.name
    return [
        GraphNode(
            worker,
            _kind(node),
            _name(node, names or {}),
            getattr(node, "message_id", 0),  # only send and receive functions have one
            tuple(places[edge.node] for edge in node.inputs if edge is not None),
            counts.get(node, 0),
        )
        for node in listed
    ]


def checked(rows: object) -> list[GraphNode]:
    """Check the graph nodes that another worker has sent.

    Raises:
      ProtocolError: They are none.
    """
    found: list[GraphNode]
    found = unpacked(rows, list[GraphNode], "A part of a graph is a list of functions")
    for place, node in enumerate(found):
        # A peer may send anything; an index out of range would fail far from here.
        if not all(0 <= n < place for n in node.inputs):
            raise ProtocolError("A function uses only what comes before it.")
    return found


def _is_in(message_id: int, marks: Collection[int] | None) -> bool:
    return marks is None or message_id in marks


def _in_order(starts: Iterable[Node]) -> list[Node]:
    """List `starts` and their history, inputs first."""
    # Without recursion: a history may be deeper than Python's stack.
    listed: dict[Node, None] = {}
    for start in starts:
        waiting = [(start, False)]
        while waiting:
            node, is_ready = waiting.pop()
            if node in listed:
                continue
            if is_ready:
                listed[node] = None
                continue
            # Visited again once its inputs are listed.
            waiting.append((node, True))
            below = [edge.node for edge in node.inputs if edge is not None]
            waiting += [(one, False) for one in reversed(below)]
    return list(listed)


def _kind(node: Node) -> NodeKind:
    # All other classes of nodes are functions to the user.
    kinds: dict[type, NodeKind]
    kinds = {LeafNode: LEAF, SendNode: SEND, RecvNode: RECEIVE}
    return kinds.get(type(node), FUNCTION)


def _name(node: Node, names: Mapping[Any, str]) -> str:
    if not isinstance(node, LeafNode):
        return node.name
    known = names.get(node.variable)
    if known is not None:
        return known
    return ", ".join(map(abbreviated, jax.tree.leaves(node.variable.value)))
