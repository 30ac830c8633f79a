"""The reverse sweep over one worker's part of the graph, without any messages.

A node runs once, when every cotangent that can arrive at it has arrived: from the nodes
that used its outputs, from the roots of the pass, and, for a send function, from
another worker. Their number is counted beforehand. A cotangent may be absent, None; a
node that gets none at all is not run, and passes on absent cotangents.
"""

import functools
from collections import deque
from collections.abc import Iterable, Sequence

from jdist.autograd.recording.node import Cotangent, Node, Numbers, plus

Summand = tuple[tuple[int, ...], int, Numbers]
"""A summand of a cotangent: its place in the sum, which has two parts, and the array.

First comes the order of the node that it comes from, empty for a root; then the
position of the argument there that this is the cotangent of, or that of the root.
"""


def dependencies(starts: Iterable[Node]) -> dict[Node, int]:
    """Count the arrivals at each node that is reached from `starts`.

    Args:
      starts: The nodes to which cotangents come from outside; once for each.
    """
    arrivals = list(starts)
    counts: dict[Node, int] = {}
    while arrivals:
        node = arrivals.pop()
        known = counts.get(node, 0)
        counts[node] = known + 1
        if not known:
            # Only at the first arrival: a node passes on once, however often it is
            # reached.
            arrivals += [edge[0] for edge in node.inputs if edge is not None]
    return counts


class Sweep:
    """The nodes of one pass on one worker, with the cotangents that have arrived.

    Args:
      starts: As for `dependencies`.

    Attributes:
      counts: The number of arrivals at each node.
      left: Number of nodes that have not run.
    """

    def __init__(self, starts: Iterable[Node]) -> None:
        self.counts = dependencies(starts)
        self.left = len(self.counts)
        self._expected = dict(self.counts)
        self._summands: dict[tuple[Node, int], list[Summand]] = {}
        self._ready: deque[Node] = deque()

    def add(self, node: Node, index: int, summand: Summand) -> None:
        """Adds a summand of the cotangent of output `index`."""
        self._summands.setdefault((node, index), []).append(summand)

    def arrive(self, node: Node) -> None:
        """Counts an arrival at a node, whether or not it brought a cotangent."""
        missing = self._expected[node] = self._expected[node] - 1
        if not missing:
            self._ready.append(node)

    def next(self) -> tuple[Node, list[Cotangent] | None] | None:
        """Takes a ready node with the cotangents of its outputs; None if none is ready.

        The cotangents are None if none has arrived.
        """
        if not self._ready:
            return None
        node = self._ready.popleft()
        self.left -= 1
        found: list[Cotangent] | None = None
        for index in range(node.outputs):
            summands = self._summands.pop((node, index), None)
            if summands is not None:
                found = found or [None] * node.outputs
                # Most values are used once, and one summand needs no order.
                found[index] = summands[0][2] if len(summands) == 1 else total(summands)
        return node, found

    def pass_on(self, node: Node, cotangents: Sequence[Cotangent] | None) -> None:
        """Passes on the cotangents of a node's inputs; None if it was not run."""
        order, summands = node.order, self._summands
        values = (None,) * len(node.inputs) if cotangents is None else cotangents
        pairs = zip(node.inputs, values, strict=True)
        for position, (edge, value) in enumerate(pairs):
            if edge is not None:
                if value is not None:  # as `add`, with the edge itself as the key
                    summands.setdefault(edge, []).append((order, position, value))
                self.arrive(edge[0])


def total(summands: Sequence[Summand]) -> Numbers:
    """Sum in an order that does not depend on arrival.

    Example:
      >>> later, earlier = ((7, 1), 0, 2.0), ((0, 3), 1, 0.5)
      >>> print(total([later, earlier]))
      2.5
    """
    # By place alone: where two are equal, tuples would be compared by their arrays.
    ordered = sorted(summands, key=lambda summand: summand[:2])
    return functools.reduce(plus, [summand[2] for summand in ordered])
