"""The minimum cut beside a search through all sets of values."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.segment._programs.min_cut import cheapest_cut


@st.composite
def graphs(draw):
    """Values 0..n-1; each is made from earlier ones, from nothing, or not at all."""
    recipes, costs = {}, {}
    for value in range(draw(st.integers(1, 9))):
        earlier = st.lists(st.sampled_from(range(value)), unique=True, max_size=3)
        recipes[value] = draw(st.none() | (earlier if value else st.just([])))
        # What cannot be made must be possible to keep, or there would be no answer.
        cost = st.integers(0, 9)
        costs[value] = draw(cost if recipes[value] is None else cost | st.none())
    needed = draw(st.lists(st.sampled_from(range(len(recipes))), unique=True))
    return needed, recipes, costs


def suffices(kept, needed, recipes):
    def can_be_had(value):
        if value in kept:
            return True
        recipe = recipes[value]
        return recipe is not None and all(can_be_had(v) for v in recipe)

    return all(can_be_had(value) for value in needed)


@given(graphs())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_cheapest_of_all_sets(graph):
    """No sufficient set is cheaper, and the same question has the same answer."""
    needed, recipes, costs = graph
    kept = cheapest_cut(needed, recipes.get, costs.get)
    assert suffices(kept, needed, recipes)
    assert kept == cheapest_cut(needed, recipes.get, costs.get)
    allowed = [v for v in recipes if costs[v] is not None]
    best = min(
        sum(costs[v] for v in chosen)
        for size in range(len(allowed) + 1)
        for chosen in combinations(allowed, size)
        if suffices(chosen, needed, recipes)
    )
    assert sum(costs[v] for v in kept) == best


def test_nothing_superfluous():
    """A value that can be made from nothing is not kept, even if keeping it is free."""
    recipes = {"weights": [], "input": None, "product": ["weights", "input"]}
    assert cheapest_cut(["weights"], recipes.get, lambda _: 0) == []
    assert cheapest_cut(["product"], recipes.get, lambda _: 0) == ["product"]


def test_nearest_to_what_is_needed():
    """Of two cuts of one cost the later one leaves less to be made again."""
    chain = {"a": None, "b": ["a"], "c": ["b"]}
    assert cheapest_cut(["c"], chain.get, lambda _: 5) == ["c"]
    assert cheapest_cut(["b", "c"], chain.get, lambda _: 5) == ["b"]


def test_long_chains_need_no_recursion():
    """A program of thousands of equations is no deeper for Python than a short one."""
    chain = {i: [i - 1] if i else None for i in range(5000)}
    assert cheapest_cut([4999], chain.get, lambda i: 1 if i == 1234 else 2) == [1234]
