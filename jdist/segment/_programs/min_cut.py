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
  Dinitz, Algorithm for solution of a problem of maximum flow, 1970.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)
Node = Hashable
Residual = dict[Node, dict[Node, int]]

SOURCE, SINK = ("source",), ("sink",)


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
    values, residual = _graph(needed, made_from, cost)
    _saturate(residual)
    # From the sink, not the source: of all minimum cuts that nearest to `needed`.
    needs = _reaching_sink(residual)
    return [v for v in values if ("out", v) in needs and ("in", v) not in needs]


def _graph(
    needed: Iterable[Value],
    made_from: Callable[[Value], Sequence[Value] | None],
    cost: Callable[[Value], int | None],
) -> tuple[list[Value], Residual]:
    """Each value as an edge from its "in" to its "out" node, of its cost's capacity."""
    wanted = set(needed := list(needed))
    recipes = _recipes(needed, made_from)
    costs = {value: cost(value) for value in recipes}
    # More than all values together, so that no such edge is in a minimum cut.
    unbounded = 1 + sum(c for c in costs.values() if c is not None)
    residual: Residual = {SOURCE: {}, SINK: {}}

    def connect(start: Node, end: Node, capacity: int) -> None:
        residual.setdefault(start, {})[end] = capacity
        residual.setdefault(end, {}).setdefault(start, 0)  # Takes flow back.

    for value, recipe in recipes.items():
        price = costs[value]
        connect(("in", value), ("out", value), unbounded if price is None else price)
        if recipe is None:
            connect(SOURCE, ("in", value), unbounded)
        for ingredient in recipe or ():
            if ingredient in recipes:
                connect(("out", ingredient), ("in", value), unbounded)
        if value in wanted:
            connect(("out", value), SINK, unbounded)
    return list(recipes), residual


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


def _saturate(residual: Residual) -> None:
    """Turns capacities into the residual capacities of a maximum flow (Dinitz)."""
    while True:
        levels = _levels(residual)
        if SINK not in levels:
            return
        # An edge once found useless is not tried again in this phase.
        untried = {node: list(ends) for node, ends in residual.items()}
        path: list[Node] = [SOURCE]
        while path:
            node = path[-1]
            if node == SINK:
                path = _push(residual, path)
                continue
            ends = untried[node]
            while ends and not (
                residual[node][ends[-1]] and levels.get(ends[-1]) == levels[node] + 1
            ):
                ends.pop()
            if ends:
                path.append(ends[-1])
            else:
                path.pop()
                if path:
                    untried[path[-1]].pop()


def _push(residual: Residual, path: list[Node]) -> list[Node]:
    """Augments the flow along a path; returns it up to its first saturated edge."""
    edges = list(pairwise(path))
    amount = min(residual[start][end] for start, end in edges)
    for start, end in edges:
        residual[start][end] -= amount
        residual[end][start] += amount
    full = next(i for i, (start, end) in enumerate(edges) if not residual[start][end])
    return path[: full + 1]


def _levels(residual: Residual) -> dict[Node, int]:
    levels: dict[Node, int] = {SOURCE: 0}
    queue: deque[Node] = deque([SOURCE])
    while queue:
        node = queue.popleft()
        for end, capacity in residual[node].items():
            if capacity and end not in levels:
                levels[end] = levels[node] + 1
                queue.append(end)
    return levels


def _reaching_sink(residual: Residual) -> set[Node]:
    """The nodes with a residual path to the sink."""
    found: set[Node] = {SINK}
    stack: list[Node] = [SINK]
    while stack:
        node = stack.pop()
        for start in residual[node]:
            if start not in found and residual[start].get(node, 0):
                found.add(start)
                stack.append(start)
    return found
