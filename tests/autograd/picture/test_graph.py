"""Drawings of graphs: the four of the design note, over both transports."""

import pytest

from jdist import autograd, rpc
from jdist.autograd.picture import GraphNode, checked
from tests.autograd.recording_cases import add, leaf, mul, name, nested


def shown(found):
    """A graph in words: for each worker its functions, and arrows between them."""
    labels = found.labels()
    functions = [
        (node.worker, label) for node, label in zip(found.nodes, labels, strict=True)
    ]
    arrows = {(labels[a], labels[b]) for a, b in found.arcs()}
    return functions, arrows


def first(draw):
    """(i) and (iv): t3 = remote add(t1, t2), t5 = mul(t3, t4)."""
    t1, t2, t4 = leaf(1), leaf(2), leaf(4)
    with autograd.context() as context_id:
        t3 = rpc.rpc_sync(name(1), add, args=(t1, t2))
        t5 = autograd.apply(mul, t3, t4)
        names = {t1: "t1", t2: "t2", t4: "t4"}
        return draw(autograd.graph(context_id, [t5], names=names))


def test_the_first_picture_and_its_dependency_counts(cluster):
    """(iv): send1 1, mul 1 on worker 0; send2, add and recv1 on worker 1."""
    functions, arrows = cluster.run(0, first, shown)
    assert functions == [
        ("worker0", "t1 (1)"),
        ("worker0", "t2 (1)"),
        ("worker0", "send1 (1)"),
        ("worker0", "recv2 (1)"),
        ("worker0", "t4 (1)"),
        ("worker0", "mul (1)"),
        ("worker1", "recv1 (2)"),
        ("worker1", "add (1)"),
        ("worker1", "send2 (1)"),
    ]
    assert arrows == {
        ("t1 (1)", "send1 (1)"),
        ("t2 (1)", "send1 (1)"),
        ("send1 (1)", "recv1 (2)"),
        ("recv1 (2)", "add (1)"),
        ("add (1)", "send2 (1)"),
        ("send2 (1)", "recv2 (1)"),
        ("recv2 (1)", "mul (1)"),
        ("t4 (1)", "mul (1)"),
    }


MERMAID = """\
flowchart LR
  subgraph w0["worker0"]
    n0(["t1 (1)"])
    n1(["t2 (1)"])
    n2[/"send1 (1)"/]
    n3[\\"recv2 (1)"\\]
    n4(["t4 (1)"])
    n5["mul (1)"]
  end
  subgraph w1["worker1"]
    n6[\\"recv1 (2)"\\]
    n7["add (1)"]
    n8[/"send2 (1)"/]
  end
  n0 --> n2
  n1 --> n2
  n8 -.-> n3
  n3 --> n5
  n4 --> n5
  n2 -.-> n6
  n6 --> n7
  n7 --> n8
"""


def test_as_mermaid(cluster):
    assert cluster.run(0, first, autograd.Graph.mermaid) == MERMAID


def second():
    """(ii): local d = a + b, e = b * c, backward from both."""
    a, b, c = leaf(1), leaf(2), leaf(3)
    with autograd.context() as context_id:
        d, e = autograd.apply(add, a, b), autograd.apply(mul, b, c)
        names = {a: "a", b: "b", c: "c"}
        return shown(autograd.graph(context_id, [d, e], names))


def test_the_second_picture(cluster):
    """A variable waits for the gradients of all that use it."""
    functions, arrows = cluster.run(1, second)
    assert [label for _, label in functions] == [
        "a (1)", "b (2)", "add (1)", "c (1)", "mul (1)",
    ]  # fmt: skip
    assert arrows == {
        ("a (1)", "add (1)"),
        ("b (2)", "add (1)"),
        ("b (2)", "mul (1)"),
        ("c (1)", "mul (1)"),
    }


def third():
    """(iii): both operations remote, one result unused."""
    a, b, c = leaf(1), leaf(2), leaf(3)
    with autograd.context() as context_id:
        d = rpc.rpc_sync(name(1), add, args=(a, b))
        rpc.rpc_sync(name(1), mul, args=(b, c))
        names = {a: "a", b: "b", c: "c"}
        return shown(autograd.graph(context_id, [d], names=names))


def test_the_third_picture(cluster):
    """FAST takes the unused result for used."""
    functions, arrows = cluster.run(0, third)
    assert functions == [
        ("worker0", "a (1)"),
        ("worker0", "b (2)"),
        ("worker0", "send1 (1)"),
        ("worker0", "c (1)"),
        ("worker0", "send2 (1)"),
        ("worker0", "recv3 (1)"),
        ("worker0", "recv4 (0)"),
        ("worker1", "recv1 (2)"),
        ("worker1", "recv2 (2)"),
        ("worker1", "add (1)"),
        ("worker1", "send3 (1)"),
        ("worker1", "mul (1)"),
        ("worker1", "send4 (1)"),
    ]
    assert ("send4 (1)", "recv4 (0)") in arrows
    assert len(arrows) == 12


def over_all():
    with autograd.context() as context_id:
        value = rpc.rpc_sync(name(1), nested, args=(leaf(1), leaf(2), 2))
        return autograd.graph(context_id, [value])


def test_workers_that_are_reached_through_others(cluster):
    """Each message is one arrow; all workers are there, in the order of their ranks."""
    found = cluster.run(3, over_all)
    workers = list(dict.fromkeys(node.worker for node in found.nodes))
    assert workers == ["worker0", "worker1", "worker2", "worker3"]
    messages = [
        (found.nodes[a].message_id, found.nodes[b].message_id)
        for a, b in found.arcs()
        if found.nodes[b].kind == "receive"
    ]
    assert len(messages) == 6
    assert all(one == other != 0 for one, other in messages)
    assert {"float64[3,4] (1)"} == {
        label
        for node, label in zip(found.nodes, found.labels(), strict=True)
        if node.kind == "leaf"
    }


def test_names_are_escaped():
    rows = (GraphNode('a"<b>', "leaf", '<x>&"#', 0, (), 1),)
    found = autograd.Graph(1, rows)
    assert '"&60;x&62;' not in found.mermaid()
    assert "#60;x#62;" in found.mermaid()


def test_an_empty_context_has_an_empty_picture(threads):
    with autograd.context() as context_id:
        found = autograd.graph(context_id)
    assert found.nodes == ()
    assert found.mermaid() == "flowchart LR\n"


def test_what_is_refused(threads):
    with autograd.context() as context_id:
        with pytest.raises(
            TypeError, match=r"graph\(roots=...\)` must be a list of rec"
        ):
            autograd.graph(context_id, [1.0])
        with pytest.raises(TypeError, match=r"graph\(names=...\)` must be a mapping"):
            autograd.graph(context_id, names=["x"])
    with pytest.raises(autograd.ContextNotFound, match=f"with id: {context_id}"):
        autograd.graph(context_id)


@pytest.mark.parametrize(
    "rows",
    [
        None, [1], [("w", "leaf")], [("w", "none", "x", 0, (), 0)],
        [("w", "leaf", "x", 0, (0,), 0)], [("w", "leaf", "x", 0, (-1,), 0)],
        [("w", "leaf", "x", "0", (), 0)], [("w", "leaf", "x", 0, ("0",), 0)],
    ],
)  # fmt: skip
def test_parts_of_others_are_checked(rows):
    with pytest.raises(rpc.ProtocolError, match=r"graph|function"):
        checked(rows)
