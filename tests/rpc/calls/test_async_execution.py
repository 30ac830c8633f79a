"""Functions that answer later, without a thread that waits."""

import threading

import numpy as np
import pytest

from jdist import rpc


def add(x, y):
    return x + y


@rpc.async_execution
def simple(to, x, y, z):
    return rpc.rpc_async(to, add, args=(x, y)).then(lambda done: done.value() + z)


@rpc.async_execution
def with_own_future(to, x, y, z):
    future = rpc.Future()
    rpc.rpc_async(to, add, args=(x, y)).add_done_callback(
        lambda done: future.set_result(done.value() + z)
    )
    return future


@rpc.async_execution
def chained(to, x, steps):
    future = rpc.rpc_async(to, add, args=(x, 1))
    for _ in range(steps):
        future = future.then(lambda done: done.value() + 1)
    return future


@rpc.async_execution
def nested(to, x):
    return rpc.rpc_async(to, simple, args=("worker0", x, 1, 10))


@rpc.async_execution
def fanned_out(to, x, count):
    def total(done):
        return sum(future.value() for future in done.value())

    futures = [rpc.rpc_async(to, add, args=(x, i)) for i in range(count)]
    return rpc.collect_all(futures).then(total)


class Methods:
    @staticmethod
    @rpc.async_execution
    def static(to, x):
        return rpc.rpc_async(to, add, args=(x, "static"))

    @classmethod
    @rpc.async_execution
    def of_class(cls, to, x):
        return rpc.rpc_async(to, add, args=(x, cls.__name__))

    @rpc.async_execution
    @staticmethod
    def outside(to, x):
        return rpc.rpc_async(to, add, args=(x, "outside"))


def results():
    ones = np.ones((2, 2))
    for function in (simple, with_own_future):
        got = rpc.rpc_sync("worker1", function, args=("worker2", ones, 2, 3))
        assert np.array_equal(got, ones + 5)
        got = rpc.rpc_async("worker1", function, args=("worker2", ones, 2, 3)).wait()
        assert np.array_equal(got, ones + 5)
    assert rpc.rpc_sync("worker1", chained, args=("worker2", 0, 60)) == 61
    assert rpc.rpc_sync("worker1", nested, args=("worker2", 1)) == 12
    assert rpc.rpc_sync("worker1", fanned_out, args=("worker2", 100, 20)) == 2190
    assert rpc.rpc_sync("worker1", Methods.static, args=("worker2", "a ")) == "a static"
    assert (
        rpc.rpc_sync("worker1", Methods.of_class, args=("worker2", "a ")) == "a Methods"
    )
    assert (
        rpc.rpc_sync("worker1", Methods.outside, args=("worker2", "a ")) == "a outside"
    )


def test_results(cluster):
    cluster.run(0, results)
    cluster.run(1, results)  # to oneself


@rpc.async_execution
def raises(text):
    raise ValueError(text)


@rpc.async_execution
def fails_later(to):
    return rpc.rpc_async(to, divmod, args=(1, 0))


@rpc.async_execution
def returns_a_value(x):
    return x


def test_errors(cluster):
    with pytest.raises(ValueError, match="Expected error"):
        cluster.run(0, rpc.rpc_sync, "worker1", raises, ("Expected error",))
    with pytest.raises(ZeroDivisionError, match="division"):
        cluster.run(0, rpc.rpc_sync, "worker1", fails_later, ("worker2",))
    rule = "Functions decorated with @rpc.async_execution must return a Future"
    with pytest.raises(TypeError, match=rule):
        cluster.run(0, rpc.rpc_sync, "worker1", returns_a_value, (3,))


def test_what_cannot_be_decorated():
    with pytest.raises(TypeError, match="must be a Python function"):
        rpc.async_execution(len)


_waiting = {}


@rpc.async_execution
def wait_for(name):
    return _waiting.setdefault(name, rpc.Future())


def complete(name, value):
    _waiting.setdefault(name, rpc.Future()).set_result(value)


def threads_and_waiting():
    info = rpc.debug_info()
    busy = info["agent.thread_pool_size"] - info["agent.num_free_places"]
    return busy, info["agent.server_active_async_calls"]


def wait_without_threads(count):
    futures = [
        rpc.rpc_async("worker1", wait_for, args=(f"waiting {i}",)) for i in range(count)
    ]
    for i, future in enumerate(futures[:-1]):
        assert not future.done()
        rpc.rpc_sync("worker1", complete, args=(f"waiting {i}", i))
        assert future.wait() == i
    busy, waiting = rpc.rpc_sync("worker1", threads_and_waiting)
    assert waiting == 1
    assert busy < count / 4
    rpc.rpc_sync("worker1", complete, args=(f"waiting {count - 1}", count - 1))
    assert futures[-1].wait() == count - 1


def test_waiting_calls_hold_no_threads(cluster):
    cluster.run(0, wait_without_threads, 100)


_round: list = []
_average = rpc.Future()
_lock = threading.Lock()


@rpc.async_execution
def average(count, value):
    """A parameter server's barrier: answers all when the last one has come."""
    global _average
    with _lock:
        _round.append(value)
        future = _average
        if len(_round) == count:
            total, _average = sum(_round) / count, rpc.Future()
            _round.clear()
            future.set_result(total)
    return future


def take_part(value):
    return [rpc.rpc_sync("worker0", average, args=(4, value + i)) for i in range(10)]


def be_number():
    return take_part(float(rpc.get_worker_info().id))


def test_a_barrier_made_of_futures(cluster):
    expected = [1.5 + i for i in range(10)]
    assert cluster.everywhere(be_number) == [expected] * 4
