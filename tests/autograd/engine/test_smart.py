"""SMART mode: it waits for, and sends, only what the roots depend on."""

import itertools
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, rpc
from jdist.autograd.engine.messages import GRADIENTS
from jdist.rpc.base import current
from tests.autograd import engine_cases as cases
from tests.autograd.engine_cases import after, counting, leaves, numbers
from tests.rpc.hosts import PATIENCE


def partly_used():
    """Of five calls two are used, one of them through another."""
    x, y = leaves(2, 1)
    with autograd.context() as context_id:
        first = rpc.rpc_sync(after(), cases.mul, args=(x, y))
        rpc.rpc_sync(after(), cases.add, args=(first, y))
        rpc.rpc_sync(after(2), cases.drops, args=(x, first))
        second = rpc.rpc_sync(after(2), cases.sine, args=(first,))
        rpc.rpc_sync(after(3), cases.nested, args=(second, x, 3))
        autograd.backward(context_id, [second.sum()])
        gradients = autograd.get_gradients(context_id)
    product = x.value * y.value
    np.testing.assert_allclose(gradients[x], np.cos(product) * y.value, rtol=1e-12)
    np.testing.assert_allclose(gradients[y], np.cos(product) * x.value, rtol=1e-12)


def test_results_that_are_not_used_are_not_waited_for(cluster):
    cluster.everywhere(partly_used)
    assert all(cluster.everywhere(cases.at_rest))


def one_after_the_other():
    """Passes over different parts of one context's graph; each has its own marks."""
    x, y = leaves(2, 2)
    with autograd.context() as context_id:
        first = rpc.rpc_sync(after(), cases.mul, args=(x, y))
        second = rpc.rpc_sync(after(2), cases.sine, args=(x,))
        both = rpc.rpc_sync(after(3), cases.mul, args=(first, second))
        found = []
        for root in (first, second, both, first):
            before = autograd.get_gradients(context_id)
            autograd.backward(context_id, [root.sum()], retain_graph=True)
            now = autograd.get_gradients(context_id)
            found.append([now.get(v, 0.0) - before.get(v, 0.0) for v in (x, y)])
    a, b = x.value, y.value
    expected = [
        (b, a),
        (np.cos(a), 0 * a),
        (b * np.sin(a) + a * b * np.cos(a), a * np.sin(a)),
        (b, a),
    ]
    for got, wanted in zip(found, expected, strict=True):
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_each_pass_marks_its_own_part_of_the_graph(cluster):
    cluster.everywhere(one_after_the_other)


# --- what travels; over the in-process transport, where one process sees all ---


def test_one_round_trip_for_each_hop(threads):
    x, y = leaves(2, 3)
    for mode in ("smart", "fast"):
        with counting(threads.names) as traffic, autograd.context() as context_id:
            total = rpc.rpc_sync("worker1", cases.nested, args=(x, y, 2))
            autograd.backward(context_id, [total.sum()], mode=mode)
            assert len(autograd.get_gradients(context_id)) == 2
        came = {name: [who for who, *_ in t.requests] for name, t in traffic.items()}
        # Each hop's gradient for the caller rides on the answer.
        assert came == {
            "worker0": [],
            "worker1": ["worker0"],
            "worker2": ["worker1"],
            "worker3": ["worker2"],
        }


def test_one_request_for_all_gradients_of_a_worker(threads):
    x, y = leaves(2, 4)
    with counting(threads.names) as traffic, autograd.context() as context_id:
        results = [
            rpc.rpc_sync("worker1", function, args=(x, y))
            for function in (cases.mul, cases.add, cases.matmul)
        ]
        autograd.backward(context_id, [sum(results, start=x).sum()])
    assert [len(t.requests) for t in traffic.values()] == [0, 1, 0, 0]
    (request,), (answer,) = traffic["worker1"].requests, traffic["worker1"].answers
    assert request == ("worker0", 3, 3 * 72)
    assert answer == (6, 6 * 72)


def test_a_call_back_to_the_caller_needs_no_request_of_its_own(threads):
    x, y = leaves(2, 5)
    with counting(threads.names) as traffic, autograd.context() as context_id:
        args = (x, y, "worker0")
        total = rpc.rpc_sync("worker1", cases.back_and_forth, args=args)
        autograd.backward(context_id, [total.sum()])
    # There: total's. Riding back: that of the product. There: those of x and y, and
    # on the answer those of the arguments.
    assert [len(t.requests) for t in traffic.values()] == [0, 2, 0, 0]


def test_unused_outputs_take_no_bytes(threads):
    (x,) = leaves(1, 6, shape=(10, 3))
    with counting(threads.names) as traffic, autograd.context() as context_id:
        parts = rpc.rpc_sync("worker1", cases.split, args=(x, 5))
        autograd.backward(context_id, [(parts[0] * parts[3]).sum()])
        gradient = autograd.get_gradients(context_id)[x]
    assert traffic["worker1"].requests == [("worker0", 2, 2 * parts[0].size * 8)]
    expected = np.zeros((10, 3))
    expected[0:2], expected[6:8] = parts[3].value, parts[0].value
    np.testing.assert_array_equal(gradient, expected)


def first_of(x, y):
    return x * 2.0, y * 3.0


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_an_absent_cotangent_stays_absent_on_its_way_through_workers(threads, mode):
    x, y = leaves(2, 7)
    with counting(threads.names) as traffic, autograd.context() as context_id:
        pair = rpc.rpc_sync("worker1", first_of, args=(x, y))
        again = rpc.rpc_sync("worker2", first_of, args=pair)
        autograd.backward(context_id, [again[0].sum()], mode=mode)
        gradients = autograd.get_gradients(context_id)
        assert set(gradients) == {x}
    np.testing.assert_array_equal(gradients[x], np.full((3, 3), 4.0))
    sizes = {name: (t.requests, t.answers) for name, t in traffic.items()}
    assert sizes["worker2"] == ([("worker0", 1, 72)], [(1, 72)])
    assert sizes["worker1"] == ([("worker0", 1, 72)], [(1, 72)])


def test_unused_calls_are_not_asked(threads):
    x, y = leaves(2, 8)
    with counting(threads.names) as traffic, autograd.context() as context_id:
        used = rpc.rpc_sync("worker1", cases.mul, args=(x, y))
        rpc.rpc_sync("worker2", cases.mul, args=(used, y))
        rpc.rpc_sync("worker3", cases.nested, args=(x, used, 4))
        autograd.backward(context_id, [used.sum()])
    assert [len(t.requests) for t in traffic.values()] == [0, 1, 0, 0]


def test_a_request_may_overtake_the_one_that_told_what_is_marked(threads):
    x, y = leaves(2, 12)
    with rpc.use_worker("worker1"):
        handlers = current.worker().callee._handlers
    handler, second_came = handlers[GRADIENTS], threading.Event()
    turns = itertools.count()

    def out_of_order(caller, body, meta):
        if next(turns) == 0:
            assert second_came.wait(PATIENCE)
            return handler(caller, body, meta)
        answer = handler(caller, body, meta)
        second_came.set()
        return answer

    with autograd.context() as context_id:
        first = rpc.rpc_sync("worker1", cases.sine, args=(x,))
        second = rpc.rpc_sync("worker1", cases.cosine, args=(x,))
        # Its gradient has to come from worker 2 before it can go to worker 1.
        third = rpc.rpc_sync("worker2", cases.mul, args=(second, y))
        handlers[GRADIENTS] = out_of_order
        try:
            autograd.backward(context_id, [first.sum(), third.sum()])
        finally:
            handlers[GRADIENTS] = handler
        gradient = autograd.get_gradients(context_id)[x]
    assert second_came.is_set()
    expected = np.cos(x.value) - np.sin(x.value) * y.value
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


# --- long graphs ---


def long(calls):
    (x,) = leaves(1, 9)
    factor = numbers(10)
    with autograd.context() as context_id:
        y = x
        for number in range(calls):
            to = f"worker{1 + number % 3}"
            y = rpc.rpc_sync(to, cases.add, args=(y, factor / (1 + number)))
            rpc.rpc_sync(to, cases.sine, args=(y,))  # not used
        autograd.backward(context_id, [(y * y).sum()])
        gradient = autograd.get_gradients(context_id)[x]
    value = x.value
    for number in range(calls):
        value = value + factor / (1 + number)
    np.testing.assert_allclose(gradient, 2 * value, rtol=1e-12)


def test_a_chain_of_calls(cluster):
    cluster.run(0, long, 140)
    assert all(cluster.everywhere(cases.at_rest))


def another_context(mode):
    """A value of an ended context leads nowhere, and says so."""
    x, y = leaves(2, 11)
    with autograd.context():
        product = rpc.rpc_sync(after(), cases.mul, args=(x, y))
    with autograd.context() as context_id:
        # So that the other worker knows the new context.
        other = rpc.rpc_sync(after(), cases.sine, args=(x,))
        root = autograd.apply(jnp.sum, product * other)
        with pytest.raises(
            autograd.BackwardError,
            match=r"Could not find send function for autograd message id: .* recorded "
            r"in another context, .*without its history as `autograd\.detach\(value\)`",
        ):
            autograd.backward(context_id, [root], mode=mode)
        # As the message says.
        kept = autograd.detach(product)
        autograd.backward(context_id, [(other * y * kept).sum()], mode=mode)


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_a_value_of_another_context_is_refused(cluster, mode):
    cluster.run(0, another_context, mode)
