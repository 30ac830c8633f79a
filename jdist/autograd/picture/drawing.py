"""Drawings of a graph, as a Mermaid flow chart or an SVG picture.

In the picture each worker has a lane, and data flow from left to right.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter
from typing import NamedTuple
from xml.sax.saxutils import escape

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
    """Draw a flow chart with a box for each worker and dashed arrows for messages."""
    lines = ["flowchart LR"]
    # A dict, not a set: workers come in the order of the nodes, in every run.
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
        # A worker may call itself, so the names alone do not tell.
        is_message |= nodes[target].kind == RECEIVE
        arrow = "-.->" if is_message else "-->"
        lines.append(f"  n{source} {arrow} n{target}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Escape a text by Mermaid's entities."""
    # `#` begins an entity, so it is escaped itself.
    return "".join(f"#{ord(c)};" if c in '"<>#' else c for c in text)


_WIDTH, _HEIGHT = 140, 30
_ACROSS, _DOWN = 190, 50
_MARGIN, _TITLE = 20, 30
_FILL = {LEAF: "#e8f1e4", FUNCTION: "#ffffff", SEND: "#e3ecf7", RECEIVE: "#f7efe0"}
_ROUND = {LEAF: 15, FUNCTION: 2, SEND: 7, RECEIVE: 7}


class BoxCorner(NamedTuple):
    """The upper left corner of a function's box."""

    x: int
    y: int


class Swimlane(NamedTuple):
    """The lane of a worker's functions."""

    worker: str
    top: int
    height: int


def svg(
    nodes: Sequence[GraphNode], labels: Sequence[str], arcs: Iterable[tuple[int, int]]
) -> str:
    """Draw a picture with a lane for each worker."""
    # Read twice below, and an iterator can be read once.
    arcs = list(arcs)
    places, lanes = layout(nodes, arcs)
    width = max((place.x for place in places), default=0) + _WIDTH + 2 * _MARGIN
    height = sum(lane.height for lane in lanes) + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>',
        *[_lane(lane, width) for lane in lanes],
        *[_arrow(places[a], places[b], nodes[b].kind == RECEIVE) for a, b in arcs],
        *map(_box, places, nodes, labels),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def layout(
    nodes: Sequence[GraphNode], arcs: Iterable[tuple[int, int]]
) -> tuple[list[BoxCorner], list[Swimlane]]:
    """Place boxes and lanes. No two boxes overlap; arrows lead to the right."""
    columns = _columns(len(nodes), arcs)
    rows: list[int] = []
    filled: Counter[tuple[str, int]] = Counter()
    for node, column in zip(nodes, columns, strict=True):
        rows.append(filled[node.worker, column])
        filled[node.worker, column] += 1
    lanes, top = [], _MARGIN
    for worker in dict.fromkeys(node.worker for node in nodes):
        # A lane is as high as its fullest column.
        deepest = max(n for (name, _), n in filled.items() if name == worker)
        lanes.append(Swimlane(worker, top, _TITLE + deepest * _DOWN))
        top += lanes[-1].height
    tops = {lane.worker: lane.top + _TITLE for lane in lanes}
    places = [
        BoxCorner(2 * _MARGIN + column * _ACROSS, tops[node.worker] + row * _DOWN)
        for node, column, row in zip(nodes, columns, rows, strict=True)
    ]
    return places, lanes


def _columns(count: int, arcs: Iterable[tuple[int, int]]) -> list[int]:
    """Return for each function the length of the longest path to it."""
    sources: list[list[int]] = [[] for _ in range(count)]
    for source, target in arcs:
        sources[target].append(source)
    columns = [0] * count
    # A function is placed once all that it uses are.
    for place in TopologicalSorter(dict(enumerate(sources))).static_order():
        columns[place] = max((columns[x] + 1 for x in sources[place]), default=0)
    return columns


def _lane(lane: Swimlane, width: int) -> str:
    return (
        f'<g><rect class="lane" x="{_MARGIN / 2}" y="{lane.top}" '
        f'width="{width - _MARGIN}" height="{lane.height - 6}" fill="none" '
        f'stroke="#999"/><text x="{_MARGIN}" y="{lane.top + 18}" '
        f'font-weight="bold">{escape(lane.worker)}</text></g>'
    )


def _box(place: BoxCorner, node: GraphNode, label: str) -> str:
    x, y = place
    return (
        f'<g><title>{escape(node.name)}</title><rect class="{node.kind}" x="{x}" '
        f'y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="{_ROUND[node.kind]}" '
        f'fill="{_FILL[node.kind]}" stroke="#333"/><text x="{x + _WIDTH / 2}" '
        f'y="{y + _HEIGHT / 2 + 4}" text-anchor="middle">{escape(label)}</text></g>'
    )


def _arrow(source: BoxCorner, target: BoxCorner, is_message: bool) -> str:
    x, y = source.x + _WIDTH, source.y + _HEIGHT / 2
    to_x, to_y = target.x, target.y + _HEIGHT / 2
    bend = (to_x - x) / 2
    dashes = ' stroke-dasharray="5 4"' if is_message else ""
    return (
        f'<path d="M{x} {y}C{x + bend} {y} {to_x - bend} {to_y} {to_x} {to_y}" '
        f'fill="none" stroke="#333" marker-end="url(#tip)"{dashes}/>'
    )
