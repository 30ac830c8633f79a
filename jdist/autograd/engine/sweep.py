"""The reverse sweep over one worker's part of the graph, without any messages.

A function runs once, when every cotangent that can come to it has come: from the
functions that used its outputs, from the roots of the pass, and, for a send function,
from another worker. How many that are is counted beforehand. A cotangent may be absent,
None; a function that gets none at all is not run, and passes on that nothing comes.
"""

import functools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jdist.autograd.graph.node import Node

Cotangent = Any
"""An array, or None where none flows."""


Contribution = tuple[tuple[int, ...], int, Cotangent]
"""One summand of a cotangent: its place in the sum, which has two parts, and the array.

First comes the order of the function that it comes from, empty for a root; then the
position of the argument there that this is the cotangent of, or that of the root.
"""


def dependencies(starts: Iterable[Node]) -> dict[Node, int]:
    """How often each function that is reached from `starts` will be arrived at.

    Args:
      starts: Where cotangents come from outside; once for each that will come.
    """
    arrivals = list(starts)
    counts: dict[Node, int] = {}
    while arrivals:
        node = arrivals.pop()
        known = counts.get(node, 0)
        counts[node] = known + 1
        if not known:
            arrivals += [edge[0] for edge in node.inputs if edge is not None]
    return counts


class Sweep:
    """The functions of one pass on one worker, and how far they are.

    Args:
      starts: As for `dependencies`.

    Attributes:
      counts: How often each function was expected at the beginning.
      left: How many of them have not run.
    """

    def __init__(self, starts: Iterable[Node]) -> None:
        self.counts = dependencies(starts)
        self.left = len(self.counts)
        self._expected = dict(self.counts)
        self._summands: dict[tuple[Node, int], list[Contribution]] = {}
        self._ready: deque[Node] = deque()

    def add(self, node: Node, index: int, contribution: Contribution) -> None:
        """A summand of the cotangent of output `index`; absent ones count as none."""
        if contribution[2] is not None:
            self._summands.setdefault((node, index), []).append(contribution)

    def arrive(self, node: Node) -> None:
        """One of the arrivals that the function waits for is there, or stays away."""
        missing = self._expected[node] = self._expected[node] - 1
        if not missing:
            self._ready.append(node)

    def next(self) -> tuple[Node, list[Cotangent]] | None:
        """A function that is ready, and the cotangents of its outputs; or None."""
        if not self._ready:
            return None
        node = self._ready.popleft()
        self.left -= 1
        cotangents: list[Cotangent] = [None] * node.outputs
        for index in range(node.outputs):
            summands = self._summands.pop((node, index), None)
            if summands is not None:
                cotangents[index] = total(summands)
        return node, cotangents

    def pass_on(self, node: Node, cotangents: Sequence[Cotangent]) -> None:
        """The function ran: these are the cotangents of its inputs."""
        order, summands = node.order, self._summands
        for position, (edge, value) in enumerate(
            zip(node.inputs, cotangents, strict=True)
        ):
            if edge is not None:
                if value is not None:  # as `add`: an edge is where the cotangent goes
                    summands.setdefault(edge, []).append((order, position, value))
                self.arrive(edge[0])


def total(contributions: Sequence[Contribution]) -> Cotangent:
    """The sum, in an order that does not depend on which came first; None of nothing.

    Example:
      >>> later, earlier = ((7, 1), 0, 2.0), ((0, 3), 1, 0.5)
      >>> total([later, earlier])
      2.5
    """
    if not contributions:
        return None
    if len(contributions) == 1:
        return contributions[0][2]
    ordered = sorted(contributions, key=lambda summand: summand[:2])
    return functools.reduce(plus, (summand[2] for summand in ordered))


def plus(one: Any, other: Any) -> Any:
    """The sum of two arrays, where the first one is."""
    place = getattr(one, "sharding", None)
    if place != getattr(other, "sharding", None):
        other = jax.device_put(other, place)
    return one + other
