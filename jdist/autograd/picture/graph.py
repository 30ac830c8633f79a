"""`graph`: the autograd graph of a context over all workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jdist._errors import check_choice, check_sequence, check_type
from jdist.autograd.contexts import Container, Context, here
from jdist.autograd.engine import engine as engines
from jdist.autograd.picture.graph_node import (
    FUNCTION,
    LEAF,
    RECEIVE,
    SEND,
    GraphNode,
    checked,
    graph_nodes,
)
from jdist.autograd.recording.node import Node
from jdist.autograd.recording.recorded import Recorded
from jdist.autograd.recording.variable import Variable
from jdist.rpc import ProtocolError, WorkerInfo
from jdist.rpc.extension import current, incarnation_of

_KIND = "autograd.graph"
_MODES = ("smart", "fast")
_SHAPES = {
    LEAF: ("([", "])"),
    FUNCTION: ("[", "]"),
    SEND: ("[/", "/]"),
    RECEIVE: ("[\\", "\\]"),
}


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
        sends = {v.message_id: n for n, v in enumerate(self.nodes) if v.kind == SEND}
        found: dict[tuple[int, int], None] = {}
        for place, node in enumerate(self.nodes):
            found.update(dict.fromkeys((source, place) for source in node.inputs))
            if node.kind == RECEIVE and node.message_id in sends:
                found[sends[node.message_id], place] = None
        return list(found)

    def labels(self) -> list[str]:
        """Returns the functions' labels in a picture, with their dependency counts.

        Messages are numbered by their ids: the send and receive functions of one have
        its number, as `send1` and `recv1`.
        """
        # Numbered from 1 in the order of ids: the ids themselves have 64 bits.
        ids = sorted({v.message_id for v in self.nodes if v.message_id})
        numbers = {message_id: n for n, message_id in enumerate(ids, start=1)}
        words = {SEND: "send", RECEIVE: "recv"}
        return [
            f"{words[v.kind]}{numbers[v.message_id]} ({v.dependencies})"
            if v.kind in words
            else f"{v.name} ({v.dependencies})"
            for v in self.nodes
        ]

    def mermaid(self) -> str:
        """Draws the graph as a Mermaid flow chart, from variables to roots.

        There is a box for each worker, and dashed arrows are messages.
        """
        lines, labels = ["flowchart LR"], self.labels()
        # A dict, not a set: workers come in the order of the nodes, in every run.
        for number, worker in enumerate(dict.fromkeys(v.worker for v in self.nodes)):
            lines.append(f'  subgraph w{number}["{_escaped(worker)}"]')
            for place, node in enumerate(self.nodes):
                if node.worker == worker:
                    left, right = _SHAPES[node.kind]
                    label = _escaped(labels[place])
                    lines.append(f'    n{place}{left}"{label}"{right}')
            lines.append("  end")
        for source, target in self.arcs():
            # Only there does a value arrive: a worker may call itself.
            is_message = self.nodes[target].kind == RECEIVE
            lines.append(f"  n{source} {'-.->' if is_message else '-->'} n{target}")
        return "\n".join(lines) + "\n"


def graph(
    context_id: int,
    roots: Sequence[Recorded] = (),
    values: Sequence[Recorded] = (),
    names: Mapping[Variable, str] | None = None,
    mode: str = "fast",
    timeout: float = current.DEFAULT,
) -> Graph:
    """Returns the graph of a context over all workers.

    It includes send and receive functions. A worker's part is the history of the values
    that it sent; on this worker also that of `roots` and `values`.

    Args:
      context_id: Id of the context.
      roots: Where a backward pass would begin, which defines the dependency counts.
      values: Other values to show.
      names: Names of this worker's variables; others are shown as dtype and shape.
      mode: "fast": a pass waits for all sends; "smart": for those that the roots reach.
      timeout: Seconds for each worker to answer; as for `rpc.rpc_sync`.

    Raises:
      ContextNotFound: This worker has no such context.
      TypeError, ValueError: An argument is wrong.
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
    check_choice("graph(mode=...)", mode, _MODES)
    current.check_timeout("graph(timeout=...)", timeout)
    if names is not None:
        rule = "must be a mapping from variables to their names"
        check_type("graph(names=...)", names, Mapping, rule)
    container = here()
    context = container.retrieve(context_id)
    starts, more = _nodes("roots", roots), _nodes("values", values)
    marks = None
    if mode == "smart":
        seconds = (
            container.agent.default_timeout if timeout == current.DEFAULT else timeout
        )
        marks = engines.of(container).mark(context_id, starts, seconds)
    own = (container.agent.info, graph_nodes(context, starts, more, names, marks))
    parts = [own, *_others(context, marks, timeout)]
    found: list[GraphNode] = []
    # By rank, and not by arrival: the same program draws the same picture.
    for _, part in sorted(parts, key=lambda pair: pair[0].id):
        shift = len(found)
        found += [
            node._replace(inputs=tuple(n + shift for n in node.inputs)) for node in part
        ]
    return Graph(context_id, tuple(found))


def install(container: Container) -> None:
    """Registers the handler that sends others this worker's part of a graph."""

    def show(caller: WorkerInfo, body: object, meta: dict[str, Any]) -> object:
        match body:
            case (int() as context_id, None | list() | tuple() | set() as marks):
                pass
            case _:
                raise ProtocolError("A graph is asked for by a context's id and marks.")
        context = container.find(context_id)
        # No error: the asking worker may learn of the end of the context later.
        if context is None:  # released meanwhile, or never reached
            return [], []
        rows = [tuple(node) for node in graph_nodes(context, marks=marks)]
        return sorted(context.known_incarnations()), rows

    container.agent.register(_KIND, show)


def _others(
    context: Context, marks: Collection[int] | None, timeout: float
) -> list[tuple[WorkerInfo, list[GraphNode]]]:
    """Collects the parts of all workers, from one to those that it knows."""
    agent = context.container.agent
    seen = {incarnation_of(agent.info)}
    found: list[tuple[WorkerInfo, list[GraphNode]]] = []
    ask = context.known_incarnations() - seen
    while ask:
        # Before their answers: two workers may name each other.
        seen |= ask
        body = (context.id, marks)
        asked = []
        # Sorted, because the iteration order of a set differs between runs.
        for number in sorted(ask):
            worker = context.container.peer(number).info
            answer = agent.call_async(worker, _KIND, body, timeout)
            # All are asked before one is waited for, so that they work in parallel.
            asked.append((worker, answer))
        ask = set()
        for worker, answer in asked:
            known, rows = answer.wait()
            found.append((worker, checked(rows)))
            ask |= set(known) - seen
    return found


def _escaped(text: str) -> str:
    """Escape a text by Mermaid's entities."""
    # `#` begins an entity, so it is escaped itself.
    return "".join(f"#{ord(c)};" if c in '"<>#' else c for c in text)


def _nodes(argument: str, values: Sequence[Recorded]) -> list[Node]:
    rule = "must be a list of recorded values"
    check_sequence(f"graph({argument}=...)", values, Recorded, rule)
    return [value.edge.node for value in values]
