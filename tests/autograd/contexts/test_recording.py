"""Recorded graphs of torch's scenarios, counted on every worker."""

import numpy as np
import pytest

from jdist import autograd, rpc
from jdist.autograd.recording.node import ids_in
from tests.autograd.context_checks import is_valid_context
from tests.autograd.recording_cases import (
    WAYS,
    add,
    back_to,
    call,
    contexts,
    counts,
    current,
    current_id,
    described,
    get_own,
    has_none,
    leaf,
    name,
    nested,
    nested_remote,
    nothing,
    numbers,
    own,
    rank,
    records,
    stack,
)

LEAF = ("leaf", 0)


def settled():
    assert has_none(), contexts()


@pytest.fixture(autouse=True)
def _clean(cluster):
    yield
    cluster.everywhere(settled)


def one_call(way):
    t1, t2 = leaf(1), leaf(2)
    with autograd.context() as context_id:
        result = call(way, name(1), add, t1, t2)
        np.testing.assert_array_equal(result.value, t1.value + t2.value)
        sends, recvs = current()
        assert len(sends) == len(recvs) == 1
        nodes = [edge.node.variable for edge in sends[0].inputs]
        assert nodes == [t1, t2]
        assert [edge.index for edge in sends[0].inputs] == [0, 0]
        assert sends[0].worker == recvs[0].worker == name(1)
        assert result.edge.node is recvs[0]
        there = rpc.rpc_sync(name(1), records, args=(context_id,))
        reply = (name(), [("add", 0, [("receive", name(), 0), ("receive", name(), 1)])])
        assert there == ([reply], [(name(), 2)])
    with pytest.raises(RuntimeError, match="Could not find autograd context with id"):
        autograd.retrieve_context(context_id)
    with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
        autograd.current_context()


@pytest.mark.parametrize("way", WAYS)
def test_one_call(cluster, way):
    """torch: test_graph_for_{builtin,python}_{call,remote_call}."""
    cluster.run(0, one_call, way)


def both_edges_lead_to_one_reception(context_id):
    sends, recvs = (list(found.values()) for found in _functions(context_id))
    (operation,) = [edge.node for edge in sends[0].inputs]
    return [edge.node is recvs[0] for edge in operation.inputs]


def _functions(context_id):
    context = autograd.retrieve_context(context_id)
    return context.send_functions(), context.recv_functions()


def one_reception(way):
    with autograd.context() as context_id:
        call(way, name(1), add, leaf(1), leaf(2))
        args = (context_id,)
        return rpc.rpc_sync(name(1), both_edges_lead_to_one_reception, args=args)


@pytest.mark.parametrize("way", WAYS)
def test_a_message_has_one_receive_function(cluster, way):
    assert cluster.run(2, one_reception, way) == [True, True]


def chain(way):
    t1, t2 = leaf(1), leaf(2)
    fn = nested_remote if way == "remote" else nested
    with autograd.context() as context_id:
        result = call(way, name(1), fn, t1, t2, 2)
        np.testing.assert_array_equal(result.value, t1.value + t2.value)
        assert [len(found) for found in current()] == [1, 1]
        return [
            rpc.rpc_sync(name(step), records, args=(context_id,)) for step in (1, 2, 3)
        ]


@pytest.mark.parametrize("way", WAYS)
def test_a_chain_of_calls(cluster, way):
    """torch: test_graph_for_py_nested_{call,remote_call}: three hops."""
    *middle, last = cluster.run(0, chain, way)
    for hop, (sends, recvs) in enumerate(middle, start=1):
        before, after = f"worker{hop - 1}", f"worker{hop + 1}"
        onward = (after, [("receive", before, 0), ("receive", before, 1)])
        back = (before, [("receive", after, 0)])
        assert sends == [onward, back]
        assert sorted(recvs) == sorted([(before, 2), (after, 1)])
    operation = ("add", 0, [("receive", "worker2", 0), ("receive", "worker2", 1)])
    assert last == ([("worker2", [operation])], [("worker2", 2)])


def there_and_back(way):
    with autograd.context() as context_id:
        call(way, name(1), back_to, name(), leaf(1), leaf(2))
        sends, recvs = current()
        mine = [(node.worker, list(map(described, node.inputs))) for node in sends]
        theirs = rpc.rpc_sync(name(1), records, args=(context_id,))
        return mine, [(node.worker, node.outputs) for node in recvs], theirs


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_comes_back_to_the_origin(cluster, way):
    """torch: test_graph_for_py_nested_{call,remote_call}_itself."""
    sends, recvs, there = cluster.run(0, there_and_back, way)
    operation = ("add", 0, [("receive", "worker1", 0), ("receive", "worker1", 1)])
    assert sends == [("worker1", [LEAF, LEAF]), ("worker1", [operation])]
    assert recvs == [("worker1", 2), ("worker1", 1)] or recvs == [
        ("worker1", 1),
        ("worker1", 2),
    ]
    onward = ("worker0", [("receive", "worker0", 0), ("receive", "worker0", 1)])
    assert there[0] == [onward, ("worker0", [("receive", "worker0", 0)])]


def to_itself(way):
    t1, t2 = leaf(1), leaf(2)
    with autograd.context():
        result = call(way, name(), add, t1, t2)
        np.testing.assert_array_equal(result.value, t1.value + t2.value)
        sends, recvs = current()
        return [list(map(described, node.inputs)) for node in sends], len(recvs)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_to_itself(cluster, way):
    sends, recvs = cluster.run(1, to_itself, way)
    operation = ("add", 0, [("receive", "worker1", 0), ("receive", "worker1", 1)])
    if way == "remote":  # `to_here` on the owner gives the value itself
        assert (sends, recvs) == ([[LEAF, LEAF]], 1)
    else:
        assert (sends, recvs) == ([[LEAF, LEAF], [operation]], 2)


def nothing_recorded(way, fn, *args):
    with autograd.context() as context_id:
        result = call(way, name(1), fn, *args)
        assert not isinstance(result, autograd.Recorded)
        assert [len(found) for found in current()] == [0, 0]
        assert rpc.rpc_sync(name(1), current_id) == context_id
        return rpc.rpc_sync(name(1), counts, args=(context_id,))


@pytest.mark.parametrize("way", WAYS)
def test_arrays_are_not_recorded_but_the_context_travels(cluster, way):
    """torch: test_no_graph_with_tensors_not_require_grad(_remote)."""
    args = (numbers(1), numbers(2))
    assert cluster.run(0, nothing_recorded, way, add, *args) == (0, 0)
    assert cluster.run(0, nothing_recorded, way, nothing) == (0, 0)


def only_the_result(way):
    with autograd.context() as context_id:
        result = call(way, name(1), get_own, 11)
        np.testing.assert_array_equal(result.value, numbers(11))
        assert [len(found) for found in current()] == [0, 1]
        return rpc.rpc_sync(name(1), records, args=(context_id,))


@pytest.mark.parametrize("way", WAYS)
def test_a_variable_of_the_callee_is_recorded(cluster, way):
    """torch: test_grad_only_on_return_value(_remote)."""
    assert cluster.run(0, only_the_result, way) == ([("worker0", [LEAF])], [])
    assert own(11) is own(11)


def every_other(way):
    tensors = [leaf(k) if k % 2 == 0 else numbers(k) for k in range(10)]
    with autograd.context() as context_id:
        result = call(way, name(1), stack, tensors)
        arrays = [getattr(t, "value", t) for t in tensors]
        np.testing.assert_array_equal(result.value, np.stack(arrays))
        sends, _ = current()
        found = [edge.node.variable for edge in sends[0].inputs]
        assert found == tensors[::2]
        assert autograd.current_context().known_workers() == {name(1)}
        return rpc.rpc_sync(name(1), records, args=(context_id,))


@pytest.mark.parametrize("way", WAYS)
def test_recorded_and_plain_arguments_are_mixed(cluster, way):
    """torch: test_{rpc,remote}_complex_args."""
    sends, recvs = cluster.run(3, every_other, way)
    receptions = [("receive", "worker3", k) for k in range(5)]
    inputs = [receptions[k // 2] if k % 2 == 0 else None for k in range(10)]
    assert sends == [("worker3", [("stack", 0, inputs)])]
    assert recvs == [("worker3", 5)]


def known(recorded):
    t1, t2 = (leaf(1), leaf(2)) if recorded else (numbers(1), numbers(2))
    others = [name(steps) for steps in (1, 2, 3)]
    with autograd.context():
        for other in others:
            rpc.rpc_sync(other, add, args=(t1, t2))
        return autograd.current_context().known_workers() == set(others)


@pytest.mark.parametrize("recorded", [True, False])
def test_known_workers(cluster, recorded):
    """torch: test_worker_ids_recorded, on all workers at once."""
    assert cluster.everywhere(known, recorded) == [True] * 4


def fails():
    with autograd.context():
        with pytest.raises(TypeError, match="matmul"):
            rpc.rpc_sync(name(1), np_matmul, args=(leaf(1, (3, 3)), leaf(2, (6, 6))))
        return [len(found) for found in current()]


def np_matmul(x, y):
    return x @ y


def test_a_call_that_fails_leaves_no_send(cluster):
    """torch: test_error_in_context. Its gradient could never come back."""
    assert cluster.run(0, fails) == [0, 0]


def same_value_twice():
    t = leaf(1)
    y = t * 2.0
    with autograd.context():
        rpc.rpc_sync(name(1), stack, args=([t, y, t, y],))
        sends, _ = current()
        return [len(node.inputs) for node in sends]


def test_a_value_that_occurs_twice_is_sent_once(cluster):
    assert cluster.run(0, same_value_twice) == [2]


def ids_of_a_run():
    with autograd.context() as context_id:
        for _ in range(3):
            rpc.rpc_sync(name(1), add, args=(leaf(1), leaf(2)))
        sends, _ = current()
        first = sends[0].message_id
        assert first >> 48 == context_id >> 48 == rank()
        return [node.message_id - first for node in sends]


def test_message_ids_rise_one_by_one(cluster):
    assert cluster.run(2, ids_of_a_run) == [0, 1, 2]


def reaches():
    """The transitive sends below a value are known as soon as it is there."""
    t1, t2 = leaf(1), leaf(2)
    with autograd.context() as context_id:
        one = rpc.rpc_sync(name(1), add, args=(t1, t2))
        two = rpc.rpc_sync(name(2), nested, args=(one, t2, 1))
        unused = rpc.rpc_sync(name(1), add, args=(t1, t2))
        ids = {
            message
            for who in rpc.get_worker_infos()
            for message in rpc.rpc_sync(who, sent, args=(context_id,))
        }
        first, second, third = (
            set(ids_in(value.edge.node.reach)) for value in (one, two, unused)
        )
        assert not third & second
        assert first < second
        return ids == third | second, len(ids)


def sent(context_id):
    if not is_valid_context(context_id):
        return []
    return list(autograd.retrieve_context(context_id).send_functions())


def test_what_a_value_reaches_is_known(cluster):
    assert cluster.run(0, reaches) == (True, 8)
