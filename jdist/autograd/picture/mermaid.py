"""A graph as a Mermaid flow chart."""

from collections.abc import Iterable, Sequence

from jdist.autograd.picture.graph_node import FUNCTION, LEAF, RECEIVE, SEND, Vertex

_SHAPES = {
    LEAF: ("([", "])"),
    FUNCTION: ("[", "]"),
    SEND: ("[/", "/]"),
    RECEIVE: ("[\\", "\\]"),
}


def mermaid(
    vertices: Sequence[Vertex], labels: Sequence[str], arcs: Iterable[tuple[int, int]]
) -> str:
    """The text of the chart: a box for each worker, dashed arrows for messages."""
    lines = ["flowchart LR"]
    workers = dict.fromkeys(vertex.worker for vertex in vertices)
    for number, worker in enumerate(workers):
        lines.append(f'  subgraph w{number}["{_escaped(worker)}"]')
        for place, vertex in enumerate(vertices):
            if vertex.worker == worker:
                left, right = _SHAPES[vertex.kind]
                lines.append(f'    n{place}{left}"{_escaped(labels[place])}"{right}')
        lines.append("  end")
    for source, target in arcs:
        is_message = vertices[source].worker != vertices[target].worker
        is_message |= vertices[target].kind == RECEIVE
        arrow = "-.->" if is_message else "-->"
        lines.append(f"  n{source} {arrow} n{target}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Mermaid's own entities; the sign that begins one is escaped itself."""
    return "".join(f"#{ord(c)};" if c in '"<>#' else c for c in text)
