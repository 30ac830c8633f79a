"""The reverse sweep without messages: counts, order of sums, absent cotangents."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdist.autograd.engine.engine import Sweep, dependencies, total
from jdist.autograd.recording.node import Edge, Node


class Scaled(Node):
    """Its input k gets (k + 2) times the first cotangent that is there."""

    __slots__ = ("pulled",)

    def __init__(self, name, *inputs, outputs=1, order=(0, 0)):
        super().__init__(name, inputs, outputs, order)
        self.pulled = []

    def pull(self, cotangents):
        self.pulled.append(list(cotangents))
        first = next(value for value in cotangents if value is not None)
        return [(k + 2) * first for k in range(len(self.inputs))]


def edge(node, index=0):
    return Edge(node, index)


def run(sweep):
    ran = []
    while (found := sweep.next()) is not None:
        node, cotangents = found
        ran.append((node.name, cotangents))
        sweep.pass_on(node, None if cotangents is None else node.pull(cotangents))
    return ran


def diamond():
    """a goes into b and c, both go into d."""
    a = Scaled("a", order=(0, 1))
    b = Scaled("b", edge(a), order=(0, 2))
    c = Scaled("c", edge(a), order=(0, 3))
    d = Scaled("d", edge(b), edge(c), order=(0, 4))
    return a, b, c, d


def test_dependencies_of_a_diamond():
    a, b, c, d = diamond()
    assert dependencies([d]) == {d: 1, b: 1, c: 1, a: 2}


def test_a_start_that_is_reached_too_counts_both():
    a, b, c, d = diamond()
    assert dependencies([d, b]) == {d: 1, b: 2, c: 1, a: 2}


def test_each_edge_counts_and_a_missing_one_does_not():
    a = Scaled("a", outputs=2)
    b = Scaled("b", edge(a, 1), None, edge(a, 0), edge(a, 1))
    assert dependencies([b]) == {b: 1, a: 3}


def test_what_is_not_reached_is_not_counted():
    a, b, _, _ = diamond()
    assert dependencies([b]) == {b: 1, a: 1}
    assert dependencies([]) == {}


def test_a_long_chain_needs_no_stack():
    node = Scaled("0")
    for number in range(20_000):
        node = Scaled(str(number), edge(node))
    assert len(dependencies([node])) == 20_001


def test_a_function_runs_once_with_the_sum_of_what_comes():
    *_, d = diamond()
    sweep = Sweep([d])
    sweep.add(d, 0, ((), 0, 7.0))
    sweep.arrive(d)
    assert sweep.left == 4
    assert run(sweep) == [
        ("d", [7.0]),
        ("b", [14.0]),
        ("c", [21.0]),
        ("a", [14.0 * 2 + 21.0 * 2]),
    ]
    assert sweep.left == 0


def test_it_waits_for_every_start():
    _, b, _, d = diamond()
    sweep = Sweep([d, b])
    sweep.add(d, 0, ((), 0, 1.0))
    sweep.arrive(d)
    assert [name for name, _ in run(sweep)] == ["d", "c"]
    sweep.add(b, 0, ((), 0, 100.0))
    sweep.arrive(b)
    assert run(sweep) == [("b", [102.0]), ("a", [204.0 + 6.0])]


def test_what_gets_nothing_is_not_pulled_but_passes_on_that_nothing_comes():
    _, b, c, d = diamond()
    sweep = Sweep([d, c])
    sweep.arrive(d)  # absent
    sweep.add(c, 0, ((), 0, 5.0))
    sweep.arrive(c)
    ran = dict(run(sweep))
    assert ran == {"d": None, "b": None, "c": [5.0], "a": [10.0]}
    assert b.pulled == []
    assert d.pulled == []
    assert sweep.left == 0


def test_absent_outputs_stay_absent():
    a = Scaled("a", outputs=3)
    b = Scaled("b", edge(a, 1))
    sweep = Sweep([b])
    sweep.add(b, 0, ((), 0, 3.0))
    sweep.arrive(b)
    assert run(sweep)[-1] == ("a", [None, 6.0, None])


SUMMANDS = [
    ((), 1, 0.1),
    ((0, 5), 0, 1e16),
    ((0, 5), 1, -1e16),
    ((9, 0), 0, 0.3),
]


@pytest.mark.parametrize("arrived", list(itertools.permutations(SUMMANDS)))
def test_the_sum_has_a_fixed_order(arrived):
    # 0.1 is lost beside 1e16, and 0.3 comes after both: any other order differs.
    assert total(arrived) == 0.1 + 1e16 - 1e16 + 0.3 == 0.3


@st.composite
def graphs(draw):
    """Edges of a random graph: node k uses earlier ones, any number of times."""
    size = draw(st.integers(1, 12))
    return [
        draw(st.lists(st.integers(0, k - 1), max_size=4)) if k else []
        for k in range(size)
    ]


@given(graphs(), st.data())
def test_random_graphs_run_every_function_that_is_reached_once(edges, data):
    nodes = []
    for number, uses in enumerate(edges):
        inputs = [edge(nodes[k]) for k in uses]
        nodes.append(Scaled(str(number), *inputs, order=(0, number)))
    starts = data.draw(st.lists(st.sampled_from(nodes), max_size=4))
    sweep = Sweep(starts)
    for position, start in enumerate(data.draw(st.permutations(starts))):
        sweep.add(start, 0, ((), position, 1.0))
        sweep.arrive(start)
    ran = [name for name, _ in run(sweep)]
    assert sorted(ran) == sorted(node.name for node in sweep._expected)
    # A function runs after all that use it.
    place = {name: number for number, name in enumerate(ran)}
    for number, uses in enumerate(edges):
        if str(number) in place:
            assert all(place[str(number)] < place[str(k)] for k in uses)
