"""`graph`: the autograd graph of a context over all workers."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import msgspec

from jdist._errors import check_sequence, check_type
from jdist._tree import abbreviated
from jdist.autograd.contexts import Container, Context, here
from jdist.autograd.engine.engine import dependencies
from jdist.autograd.recording.node import Node, RecvNode, SendNode
from jdist.autograd.recording.recorded import Recorded
from jdist.autograd.recording.variable import LeafNode, Variable
from jdist.rpc import ProtocolError, WorkerInfo
from jdist.rpc.extension import incarnation_of, unpacked

_MESSAGE = "autograd.graph"
_SHAPES = {
    "leaf": ("([", "])"),
    "function": ("[", "]"),
    "send": ("[/", "/]"),
    "receive": ("[\\", "\\]"),
}
_KINDS: dict[type, Any] = {LeafNode: "leaf", SendNode: "send", RecvNode: "receive"}


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
    kind: Literal["leaf", "function", "send", "receive"]
    name: str
    message_id: int
    inputs: tuple[int, ...]
    dependencies: int


# As in `jdist.autograd.engine.messages`: read in the one thread of an import.
msgspec.msgpack.Decoder(GraphNode)


@dataclasses.dataclass(frozen=True)
class Graph:
    """A graph over several workers.

    Attributes:
      context_id: Id of the context whose graph it is.
      nodes: Its functions, by the ranks of their workers; each after those of the
        same worker that it uses.
    """

    context_id: int
    nodes: tuple[GraphNode, ...]

    def arcs(self) -> list[tuple[int, int]]:
        """Returns pairs of indices into `nodes`: the second uses outputs of the first.

        Each pair once. A receive function uses what the send function of the same
        message has sent.
        """
        # Message ids are unique over all workers, so that one map serves them all.
        sends = {v.message_id: n for n, v in enumerate(self.nodes) if v.kind == "send"}
        found: dict[tuple[int, int], None] = {}
        for place, node in enumerate(self.nodes):
            found.update(dict.fromkeys((source, place) for source in node.inputs))
            if node.kind == "receive" and node.message_id in sends:
                found[sends[node.message_id], place] = None
        return list(found)

    def labels(self) -> list[str]:
        """Returns the functions' labels in a picture, with their dependency counts.

        Messages are numbered by their ids: the send and receive functions of one have
        its number, as `send1` and `recv1`.
        """
        # Numbered from 1 in the order of ids: the ids themselves have 64 bits.
        ids = sorted({v.message_id for v in self.nodes if v.message_id})
        words = {"send": "send", "receive": "recv"}
        return [
            f"{words[v.kind]}{ids.index(v.message_id) + 1} ({v.dependencies})"
            if v.kind in words
            else f"{v.name} ({v.dependencies})"
            for v in self.nodes
        ]

    def mermaid(self) -> str:
        """Draws the graph as a Mermaid flow chart, from variables to roots.

        There is a box for each worker, and dashed arrows are messages.
        """
        lines, labels = ["flowchart LR"], list(map(_escaped, self.labels()))
        # A dict, not a set: workers come in the order of the nodes, in every run.
        for number, worker in enumerate(dict.fromkeys(v.worker for v in self.nodes)):
            lines.append(f'  subgraph w{number}["{_escaped(worker)}"]')
            for place, node in enumerate(self.nodes):
                if node.worker == worker:
                    left, right = _SHAPES[node.kind]
                    lines.append(f'    n{place}{left}"{labels[place]}"{right}')
            lines.append("  end")
        for source, target in self.arcs():
            # Only there does a value arrive: a worker may call itself.
            arrow = "-.->" if self.nodes[target].kind == "receive" else "-->"
            lines.append(f"  n{source} {arrow} n{target}")
        return "\n".join(lines) + "\n"


def graph(
    context_id: int,
    roots: Sequence[Recorded] = (),
    names: Mapping[Variable, str] | None = None,
) -> Graph:
    """Returns the graph of a context over all workers.

    It includes send and receive functions. A worker's part is the history of the values
    that it sent; on this worker also that of `roots`.

    Args:
      context_id: Id of the context.
      roots: Where a backward pass in FAST mode would begin, which defines the
        dependency counts.
      names: Names of this worker's variables; others are shown as dtype and shape.

    Raises:
      ContextNotFound: This worker has no such context.
      TypeError: An argument is wrong.
      WorkerLost, RpcTimeout: A worker did not answer.

    Source: the figures of "Distributed Autograd Design", PyTorch's documentation.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import autograd, rpc
      >>> with rpc.local_cluster(["w0", "w1"]), autograd.context() as context_id:
      ...     x = autograd.variable(2.0)
      ...     y = rpc.rpc_sync("w1", jnp.sin, args=(x,))
      ...     found = autograd.graph(context_id, [y], names={x: "x"})
      >>> [node.worker for node in found.nodes]
      ['w0', 'w0', 'w0', 'w1', 'w1', 'w1']
      >>> found.labels()
      ['x (1)', 'send1 (1)', 'recv2 (1)', 'recv1 (1)', 'sin (1)', 'send2 (1)']
    """
    if names is not None:
        rule = "must be a mapping from variables to their names"
        check_type("graph(names=...)", names, Mapping, rule)
    rule = "must be a list of recorded values"
    check_sequence("graph(roots=...)", roots, Recorded, rule)
    context = here().retrieve(context_id)
    starts = [root.edge.node for root in roots]
    own = context.container.agent.info, graph_nodes(context, starts, names or {})
    found: list[GraphNode] = []
    # By rank, and not by arrival: the same program draws the same picture.
    for _, part in sorted([own, *_others(context)], key=lambda pair: pair[0].id):
        shift = len(found)
        found += [
            node._replace(inputs=tuple(n + shift for n in node.inputs)) for node in part
        ]
    return Graph(context_id, tuple(found))


def install(container: Container) -> None:
    """Registers the handler that sends others this worker's part of a graph."""

    def show(caller: WorkerInfo, body: object, meta: dict[str, Any]) -> object:
        if type(body) is not int:
            raise ProtocolError("A graph is asked for by a context's id.")
        context = container.find(body)
        # No error: the asking worker may learn of the end of the context later.
        if context is None:  # released meanwhile, or never reached
            return [], []
        rows = [tuple(node) for node in graph_nodes(context)]
        return sorted(context.known_incarnations()), rows

    container.agent.register(_MESSAGE, show)


def graph_nodes(
    context: Context, roots: Sequence[Node] = (), names: Mapping[Variable, str] = {}
) -> list[GraphNode]:
    """List this worker's functions of a graph, each after those that it uses."""
    sends, recvs = context.send_functions(), context.recv_functions()
    counts = dependencies([*roots, *sends.values()])
    # By message id, not by arrival: the same program lists the same order.
    crossing = [node for _, node in sorted([*sends.items(), *recvs.items()])]
    listed = _in_order([*crossing, *roots])
    places = {node: place for place, node in enumerate(listed)}
    return [
        GraphNode(
            context.container.agent.info.name,
            _KINDS.get(type(node), "function"),
            _name(node, names),
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


def _others(context: Context) -> list[tuple[WorkerInfo, list[GraphNode]]]:
    """Collects the parts of all workers, from one to those that it knows."""
    agent = context.container.agent
    seen, found = {incarnation_of(agent.info)}, []
    ask = context.known_incarnations() - seen
    while ask:
        # Before their answers: two workers may name each other.
        seen |= ask
        # Sorted, because the iteration order of a set differs between runs.
        workers = [context.container.worker(number) for number in sorted(ask)]
        # All are asked before one is waited for, so that they work in parallel.
        answers = [agent.call_async(one, _MESSAGE, context.id) for one in workers]
        ask = set()
        for worker, answer in zip(workers, answers, strict=True):
            known, rows = answer.wait()
            found.append((worker, checked(rows)))
            ask |= set(known) - seen
    return found


def _in_order(starts: Iterable[Node]) -> list[Node]:
    """List `starts` and their history, inputs first."""
    # Without recursion: a history may be deeper than Python's stack.
    listed: dict[Node, None] = {}
    waiting = [(start, False) for start in reversed([*starts])]
    while waiting:
        node, is_ready = waiting.pop()
        if is_ready:
            listed[node] = None
        elif node not in listed:
            # Visited again once its inputs are listed.
            waiting.append((node, True))
            below = [edge.node for edge in node.inputs if edge is not None]
            waiting += [(one, False) for one in reversed(below)]
    return list(listed)


def _name(node: Node, names: Mapping[Variable, str]) -> str:
    if not isinstance(node, LeafNode):
        return node.name
    shown = ", ".join(map(abbreviated, jax.tree.leaves(node.variable.value)))
    return names.get(node.variable, shown)


def _escaped(text: str) -> str:
    """Escape a text by Mermaid's entities."""
    # `#` begins an entity, so it is escaped itself.
    return "".join(f"#{ord(c)};" if c in '"<>#' else c for c in text)
