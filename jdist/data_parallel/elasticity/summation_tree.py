"""A binary tree over the units of a step, along which their results are summed.

Its shape depends on their number only, so that a sum has the same bits for any
assignment of units to replicas, and for any place where parts of it were computed.

    units 0..5:  ((0 + (1 + 2)) + (3 + (4 + 5)))
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from jdist.data_parallel.elasticity.leader import Part

Value = TypeVar("Value")


def nodes_within(part: Part, units: int) -> list[Part]:
    """The smallest set of tree nodes that make up a part, in order.

    Example:
      >>> [tuple(node) for node in nodes_within(Part(1, 6), 6)]
      [(1, 3), (3, 6)]
    """
    return list(_within(Part(0, units), part))


def _within(node: Part, part: Part) -> list[Part]:
    if part.start <= node.start and node.stop <= part.stop:
        return [node]
    if node.stop <= part.start or part.stop <= node.start:
        return []
    return [each for half in _halves(node) for each in _within(half, part)]


def tree_sum(
    values: Mapping[Part, Value], node: Part, add: Callable[[Value, Value], Value]
) -> Value:
    """The sum of a node, from values of nodes below that make it up.

    Raises:
      KeyError: They do not make it up.

    Example:
      >>> values = {Part(0, 1): "a", Part(1, 3): "(b c)"}
      >>> tree_sum(values, Part(0, 3), lambda left, right: f"({left} {right})")
      '(a (b c))'
    """
    # At a leaf the look-up raises KeyError if its value is missing.
    if node in values or node.stop - node.start == 1:
        return values[node]
    left, right = (tree_sum(values, half, add) for half in _halves(node))
    return add(left, right)


def _halves(node: Part) -> tuple[Part, Part]:
    middle = (node.start + node.stop) // 2
    return Part(node.start, middle), Part(middle, node.stop)
