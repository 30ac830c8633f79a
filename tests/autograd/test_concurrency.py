"""Many contexts, passes and threads at once: no growth, and no pass holds up others."""

import gc
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import autograd, rpc
from tests.autograd import engine_cases as cases
from tests.autograd.engine_cases import after, leaves, me, numbers
from tests.rpc.hosts import PATIENCE
from tests.rpc.rref.common import wait_for


def one_of_many(seed):
    """Four calls to worker 0, and the gradients of just these."""
    x, y = leaves(2, *seed)
    with autograd.context() as context_id:
        a = rpc.rpc_sync("worker0", cases.add, args=(x, y))
        b = rpc.rpc_sync("worker0", cases.mul, args=(a, x))
        c = rpc.rpc_async("worker0", cases.sine, args=(b,)).wait()
        d = rpc.remote("worker0", cases.matmul, args=(c, a)).to_here()
        autograd.backward(context_id, [d.sum()])
        gradients = autograd.get_gradients(context_id)
    with autograd.context() as context_id:
        a = autograd.apply(cases.add, x, y)
        c = autograd.apply(cases.sine, autograd.apply(cases.mul, a, x))
        d = autograd.apply(cases.matmul, c, a)
        autograd.backward(context_id, [d.sum()])
        expected = autograd.get_gradients(context_id)
    for variable in (x, y):
        np.testing.assert_allclose(
            gradients[variable], expected[variable], rtol=1e-12, atol=1e-12
        )
    return True


def twenty_threads():
    if me().id == 0:
        return []
    name, done = me().name, []

    def run(number):
        with rpc.use_worker(name):
            done.append(one_of_many((me().id, number)))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return done


def test_twenty_threads_on_each_of_three_workers(cluster):
    assert cluster.everywhere(twenty_threads) == [[], *[[True] * 20] * 3]
    assert all(cluster.everywhere(cases.at_rest))


def deep(hops, times):
    """Every worker has more passes under way than it may have threads."""
    name, done = me().name, []
    x, y = leaves(2, 2)

    def run():
        with rpc.use_worker(name), autograd.context() as context_id:
            total = rpc.rpc_sync(after(), cases.nested, args=(x, y, hops)).sum()
            autograd.backward(context_id, [total])
            done.append(autograd.get_gradients(context_id)[x])

    threads = [threading.Thread(target=run) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return [bool((gradient == 1).all()) for gradient in done]


@pytest.fixture
def narrow():
    """Four workers with two places each, and threads that take turns very often."""
    names = [f"worker{rank}" for rank in range(4)]
    options = rpc.RpcOptions(threads=2)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with rpc.local_cluster(names, options=options, allow=["tests"]):
            yield
    finally:
        sys.setswitchinterval(usual)


def test_a_pass_takes_no_thread_of_the_callees(narrow):
    """Not even one: all that they may have are busy, and the pass goes on."""
    for _ in range(200):
        backward_while_all_are_busy()


def backward_while_all_are_busy():
    x, y = leaves(2, 3)
    with autograd.context() as context_id:
        total = rpc.rpc_sync("worker1", cases.nested, args=(x, y, 6)).sum()
        # From here on no worker has a thread left for calls, and more calls wait.
        busy = [
            rpc.rpc_async(f"worker{rank}", hold, args=(rank,))
            for rank in range(1, 4)
            for _ in range(4)
        ]
        for rank in range(1, 4):
            assert _holding[rank].acquire(timeout=PATIENCE)
            assert _holding[rank].acquire(timeout=PATIENCE)
        autograd.backward(context_id, [total])
        gradient = autograd.get_gradients(context_id)[x]
        _release.set()
        rpc.wait_all(busy)
    _release.clear()
    for rank in range(1, 4):  # those that waited for a place
        assert _holding[rank].acquire(timeout=PATIENCE)
        assert _holding[rank].acquire(timeout=PATIENCE)
    np.testing.assert_array_equal(gradient, np.ones((3, 3)))


_release = threading.Event()
_holding = {rank: threading.Semaphore(0) for rank in range(1, 4)}


def hold(rank):
    _holding[rank].release()
    assert _release.wait(PATIENCE)


def test_more_passes_than_threads(cluster):
    for found in cluster.everywhere(deep, 5, 8):
        assert found == [True] * 8
    assert all(cluster.everywhere(cases.at_rest))


# --- nothing grows ---


def repeated(times):
    x, y = leaves(2, 4)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(after(), cases.mul, args=(x, y)).sum()
        for number in range(times):
            retain = number < times - 1
            autograd.backward(context_id, [loss], retain_graph=retain)
        gradients = autograd.get_gradients(context_id)
    expected = jnp.zeros((3, 3))
    for _ in range(times):
        expected = expected + y.value
    np.testing.assert_array_equal(gradients[x], expected)


def objects():
    gc.collect()
    return len(gc.get_objects())


def test_a_thousand_passes_over_one_graph(cluster):
    cluster.run(0, repeated, 1000)


def many_contexts(times):
    x, y = leaves(2, 5)
    for _ in range(times):
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(after(), cases.mul, args=(x, y)).sum()
            autograd.backward(context_id, [loss])
    return wait_for(lambda: rpc.debug_info()["num_autograd_contexts"] == 0)


def test_neither_passes_nor_contexts_leave_anything_behind(threads):
    threads.run(0, many_contexts, 100)
    threads.run(0, repeated, 100)
    before = objects()
    threads.run(0, many_contexts, 1000)
    threads.run(0, repeated, 1000)
    assert objects() - before < 500


def order_of_sums():
    """Bit for bit the same however the calls overlap."""
    variables = leaves(3, 6)
    parts = [numbers(7, k) for k in range(3)]
    found = []
    for _ in range(5):
        with autograd.context() as context_id:
            pending = [
                rpc.rpc_async(after(1 + k % 3), cases.mul, args=(v, part))
                for k, part in enumerate(parts)
                for v in variables
            ]
            total = autograd.apply(cases.stack, *[p.wait() for p in pending]).sum()
            autograd.backward(context_id, [total])
            gradients = autograd.get_gradients(context_id)
        found.append(cases.plain(gradients, variables))
    return all(cases.same(found[0], other) for other in found[1:])


def test_sums_have_the_same_bits_in_every_run(cluster):
    assert all(cluster.everywhere(order_of_sums))
