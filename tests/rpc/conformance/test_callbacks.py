"""Futures of calls: callbacks inside called functions, fan-out, and collected calls."""

import threading

import numpy as np

from jdist import rpc

RAN = "RPC ran for more than set timeout"
PATIENCE = 60
_gates: dict[str, threading.Event] = {}


def gate(name):
    return _gates.setdefault(name, threading.Event())


def wait_at(name):
    return gate(name).wait(PATIENCE)


def open_gate(name):
    gate(name).set()


def add(x, y):
    return x + y


def add_with_callback(to, x, y):
    """Calls on from within a call, and waits for what a callback makes of it."""
    future = rpc.rpc_async(to, add, args=(x, y))
    return future.then(lambda done: (done.value() * 2, done.done())).wait()


def complete_own_future(to, x):
    future = rpc.Future()
    rpc.rpc_async(to, add, args=(x, 1)).add_done_callback(
        lambda done: future.set_result(done.value() * 3)
    )
    return future.wait()


def many_callbacks():
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(2, 3)), rng.normal(size=(2, 3))
    future = rpc.rpc_async("worker1", add, args=(x, y))
    # Each has the value to itself: none sees another's result.
    children = [future.then(lambda done, i=i: done.value() * i) for i in range(10)]
    nothing = future.then(lambda done: None)
    for i, got in enumerate(rpc.wait_all(children)):
        assert np.array_equal(got, (x + y) * i)
    assert nothing.wait() is None
    got, done = rpc.rpc_sync("worker1", add_with_callback, args=("worker2", x, y))
    assert np.array_equal(got, (x + y) * 2)
    assert done
    got = rpc.rpc_sync("worker1", complete_own_future, args=("worker0", x))
    assert np.array_equal(got, (x + 1) * 3)


def test_many_callbacks_and_those_of_called_functions(cluster):
    cluster.run(0, many_callbacks)


@rpc.async_execution
def chained_calls(to, x, steps):
    """Each step is a call that begins where the one before has ended."""
    names = [f"worker{i}" for i in range(4)]
    outer = rpc.Future()

    def step(done, left):
        try:
            value = done.value()
        except Exception as error:  # noqa: BLE001 - passed on
            outer.set_exception(error)
            return
        if not left:
            outer.set_result(value)
            return
        future = rpc.rpc_async(names[left % 4], add, args=(value, left))
        future.add_done_callback(lambda done: step(done, left - 1))

    rpc.rpc_async(to, add, args=(x, 0)).add_done_callback(lambda d: step(d, steps))
    return outer


def chains_side_by_side():
    futures = [
        rpc.rpc_async("worker1", chained_calls, args=("worker2", i * 1000, 20))
        for i in range(20)
    ]
    assert rpc.wait_all(futures) == [i * 1000 + 210 for i in range(20)]


def test_chained_calls_side_by_side(cluster):
    cluster.run(0, chains_side_by_side)
