"""A graph as a Mermaid flow chart."""

from collections.abc import Iterable, Sequence

from jdist.autograd.picture.graph_node import FUNCTION, LEAF, RECEIVE, SEND, GraphNode

_SHAPES = {
    LEAF: ("([", "])"),
    FUNCTION: ("[", "]"),
    SEND: ("[/", "/]"),
    RECEIVE: ("[\\", "\\]"),
}


def mermaid(
    nodes: Sequence[GraphNode], labels: Sequence[str], arcs: Iterable[tuple[int, int]]
) -> str:
    """The text of the chart: a box for each worker, dashed arrows for messages."""
    lines = ["flowchart LR"]
    workers = dict.fromkeys(node.worker for node in nodes)
    for number, worker in enumerate(workers):
        lines.append(f'  subgraph w{number}["{_escaped(worker)}"]')
        for place, node in enumerate(nodes):
            if node.worker == worker:
                left, right = _SHAPES[node.kind]
                lines.append(f'    n{place}{left}"{_escaped(labels[place])}"{right}')
        lines.append("  end")
    for source, target in arcs:
        is_message = nodes[source].worker != nodes[target].worker
        is_message |= nodes[target].kind == RECEIVE
        arrow = "-.->" if is_message else "-->"
        lines.append(f"  n{source} {arrow} n{target}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Mermaid's own entities; the sign that begins one is escaped itself."""
    return "".join(f"#{ord(c)};" if c in '"<>#' else c for c in text)
