"""The cheapest set of values from which all needed values can be recomputed.

A computation is cut in two, and the later part needs some values of the earlier one.
These need not be kept themselves: some can be recomputed from others. The cheapest
choice is the *minimum cut* of the graph whose edges lead from each value to those
computed from it, with the cost of keeping a value as the capacity of its node. The
obvious rule, to keep every value that is read, keeps both `tanh(z)` and
`1 - tanh(z)**2`; the opposite rule, to recompute every value that can be, keeps `z`
although `tanh(z)` is available.

    cannot be recomputed:      z            m           (from a matrix product, a key)
                               |            |
    recomputed from it:     t = tanh z      |
                               |   \\        |
    needed:                    t   1-t^2   m * t        -> keep t and m

Of several cuts of equal cost the one nearest to the needed values is taken, which
leaves the least to recompute. Values are opaque and hashable. The order of the result
depends on the order of `needed` only, so that it is the same in every process.

References:
  Ford and Fulkerson, Maximal flow through a network, 1956; Edmonds and Karp,
  Theoretical improvements in algorithmic efficiency for network flow problems, 1972.
"""

from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)
Node = Hashable
Residual = dict[Node, dict[Node, int]]


def cheapest_cut(
    needed: Iterable[Value],
    made_from: Callable[[Value], Sequence[Value] | None],
    cost: Callable[[Value], int | None],
) -> list[Value]:
    """Chooses which values to keep.

    Args:
      needed: The values that must be available.
      made_from: The values from which a value can be recomputed; None if it cannot be.
        A value recomputed from nothing is never kept.
      cost: The cost of keeping a value, at least 0; None if it cannot be kept.

    Returns:
      Values of least total cost such that each needed one is kept or can be recomputed,
      in any number of steps, from kept ones.

    Example:
      >>> recipes = {"z": None, "tanh": ["z"], "slope": ["tanh"], "mask": ["z"]}
      >>> cheapest_cut(["tanh", "slope"], recipes.get, lambda value: 4)
      ['tanh']
      >>> costs = {"z": 4, "tanh": 4, "slope": 4, "mask": 1}
      >>> cheapest_cut(["tanh", "mask"], recipes.get, costs.get)
      ['z']
    """
    needed = list(needed)
    recipes = _recipes(needed, made_from)
    residual = _graph(recipes, {value: cost(value) for value in recipes})
    sources = {("in", value) for value, recipe in recipes.items() if recipe is None}
    # The nodes from which more could flow to a needed value if it got there. Found from
    # the needed values on, so that of all minimum cuts the nearest to them is taken.
    needs: set[Node] = set()
    for value in needed:
        if value in recipes:
            needs.update(_saturate(residual, ("out", value), sources, needs))
    return [v for v in recipes if ("out", v) in needs and ("in", v) not in needs]


def _graph(
    recipes: dict[Value, Sequence[Value] | None], costs: dict[Value, int | None]
) -> Residual:
    """Each value as an edge from its "in" to its "out" node, of its cost's capacity."""
    # More than all values together, so that no such edge is in a minimum cut.
    unbounded = 1 + sum(c for c in costs.values() if c is not None)
    residual: Residual = {}

    def connect(start: Node, end: Node, capacity: int) -> None:
        residual.setdefault(start, {})[end] = capacity
        residual.setdefault(end, {}).setdefault(start, 0)  # Takes flow back.

    for value, recipe in recipes.items():
        price = costs[value]
        connect(("in", value), ("out", value), unbounded if price is None else price)
        for ingredient in recipe or ():
            if ingredient in recipes:
                connect(("out", ingredient), ("in", value), unbounded)
    return residual


def _recipes(
    needed: list[Value], made_from: Callable[[Value], Sequence[Value] | None]
) -> dict[Value, Sequence[Value] | None]:
    """Recipes of needed values and ingredients, without those made from nothing."""
    recipes: dict[Value, Sequence[Value] | None] = {}
    uses: dict[Value, list[Value]] = {}
    frontier = list(needed)
    while frontier:
        value = frontier.pop()
        if value not in recipes:
            recipes[value] = made_from(value)
            for ingredient in recipes[value] or ():
                uses.setdefault(ingredient, []).append(value)
                frontier.append(ingredient)
    # A value costs something if an ingredient, at any depth, cannot be recomputed.
    frontier = [value for value, recipe in recipes.items() if recipe is None]
    costly = set(frontier)
    while frontier:
        fresh = [v for v in uses.get(frontier.pop(), ()) if v not in costly]
        costly.update(fresh)
        frontier += fresh
    return {value: recipe for value, recipe in recipes.items() if value in costly}


def _saturate(
    residual: Residual, sink: Node, sources: Container[Node], closed: Container[Node]
) -> Iterable[Node]:
    """Sends as much as possible from the sources to a sink, on top of earlier flows.

    Args:
      residual: Residual capacities, which are changed.
      sink: Where the flow ends.
      sources: Where it begins.
      closed: Nodes that no source reaches any more, and so no flow passes.

    Returns:
      Further such nodes: those, without the closed ones, that reach the sink.
    """
    while True:
        after = _search(residual, sink, sources, closed)
        node = next(reversed(after))
        if node not in sources:
            return after
        path = [node]
        while node != sink:
            path.append(node := after[node])
        edges = list(pairwise(path))
        amount = min(residual[start][end] for start, end in edges)
        for start, end in edges:
            residual[start][end] -= amount
            residual[end][start] += amount


def _search(
    residual: Residual, sink: Node, sources: Container[Node], closed: Container[Node]
) -> dict[Node, Node]:
    """The nodes that reach the sink, nearest first, each with the next one on the way.

    If there is a source among them, the search ends with it.
    """
    after = {sink: sink}
    queue = deque([sink])
    while queue:
        node = queue.popleft()
        for before in residual[node]:
            if before in after or before in closed or not residual[before][node]:
                continue
            after[before] = node
            if before in sources:
                return after
            queue.append(before)
    return after
