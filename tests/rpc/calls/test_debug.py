"""What workers tell about themselves."""

import threading
import time

from jdist import rpc

PATIENCE = 60
_gates: dict[str, threading.Event] = {}


def gate(name):
    return _gates.setdefault(name, threading.Event())


def begin_and_wait(name):
    gate(f"{name} begun").set()
    assert gate(name).wait(PATIENCE)


def has_begun(name):
    assert gate(f"{name} begun").wait(PATIENCE)


def open_gate(name):
    gate(name).set()


@rpc.async_execution
def relay(to, name):
    return rpc.rpc_async(to, begin_and_wait, args=(name,))


def information():
    return rpc.debug_info()


def relaying():
    """Information once `relay` has returned, which may be after its call has begun."""
    until = time.monotonic() + PATIENCE
    while not (told := rpc.debug_info())["agent.server_active_async_calls"]:
        assert time.monotonic() < until
        time.sleep(0.001)
    return told


def look(name):
    """worker0 waits for worker1, which waits for worker2 without a thread."""
    me = rpc.get_worker_info().name
    future = rpc.rpc_async("worker1", relay, args=("worker2", name))
    rpc.rpc_sync("worker2", has_begun, args=(name,))
    asked = {"worker0": information, "worker1": relaying, "worker2": information}
    told = {
        to: rpc.debug_info() if to == me else rpc.rpc_sync(to, ask)
        for to, ask in asked.items()
    }
    rpc.rpc_sync("worker2", open_gate, args=(name,))
    future.wait()
    return told


def words(told, worker):
    return "; ".join(told[worker]["agent.activity"])


def test_who_waits_for_whom(cluster):
    told = cluster.run(0, look, f"look {cluster.kind}")
    assert "waits for rpc_async(relay) of 'worker1' since" in words(told, "worker0")
    assert "executes call(relay) of 'worker0' since" in words(told, "worker1")
    assert "waits for rpc_async(begin_and_wait) of 'worker2'" in words(told, "worker1")
    assert "executes call(begin_and_wait) of 'worker1'" in words(told, "worker2")


def test_numbers(cluster):
    told = cluster.run(0, look, f"numbers {cluster.kind}")
    assert told["worker0"]["agent.client_active_calls"] == 1
    assert told["worker1"]["agent.client_active_calls"] == 1
    # The relay, and the question itself.
    assert told["worker1"]["agent.server_active_calls"] == 2
    assert told["worker1"]["agent.server_active_async_calls"] == 1
    assert told["worker2"]["agent.server_active_async_calls"] == 0
    for info in told.values():
        assert info["agent.thread_pool_size"] == 512
        assert 0 < info["agent.num_free_places"] <= 512
        assert info["group.workers"] == cluster.names
        assert info["group.lost"] == {}


def test_nothing_is_under_way_afterwards(cluster):
    for info in cluster.everywhere(information):
        assert info["agent.client_active_calls"] == 0
        assert info["agent.server_active_calls"] == 0
        assert info["agent.activity"] == []


def test_the_number_of_threads_can_be_set():
    options = rpc.RpcOptions(threads=27)
    with rpc.local_cluster(["a"], options=options):
        assert rpc.debug_info()["agent.thread_pool_size"] == 27
