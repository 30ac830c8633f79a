"""Limits that are as good as none, and limits around a whole block of calls."""

import pytest

from jdist import rpc

CENTURIES = 1e12  # More seconds than a lock or a poll can wait.


def add(x, y):
    return x + y


@rpc.async_execution
def never():
    return rpc.Future()


def relay(to, x, y):
    return rpc.rpc_sync(to, add, args=(x, y), timeout=CENTURIES)


def call_with(timeout):
    """Every wait that takes a limit; and that others end in time afterwards."""
    assert rpc.rpc_sync("worker1", add, args=(1, 2), timeout=timeout) == 3
    futures = [
        rpc.rpc_async("worker1", add, args=(i, 2), timeout=timeout) for i in range(3)
    ]
    assert rpc.wait_all(futures, timeout=timeout) == [2, 3, 4]
    assert futures[2].wait(timeout) == 4
    assert rpc.rpc_sync("worker1", relay, ("worker2", 3, 4), timeout=timeout) == 7
    rpc.set_rpc_timeout(timeout)
    assert rpc.rpc_async("worker2", add, args=(1, 5)).wait() == 6
    rpc.set_rpc_timeout(60.0)
    with pytest.raises(rpc.RpcTimeout, match=r"RPC ran for more than .*\(50 ms\)"):
        rpc.rpc_async("worker1", never, timeout=0.05).wait()


def meet_with(timeout):
    rpc.barrier(timeout=timeout)
    gathered = rpc.all_gather(rpc.get_worker_info().id, timeout=timeout)
    if rpc.get_worker_info().id == 2:
        with pytest.raises(rpc.RpcTimeout, match="Did not arrive: worker3"):
            rpc.barrier(["worker2", "worker3"], timeout=0.05)
    return list(gathered.values())


@pytest.mark.parametrize("timeout", [0, CENTURIES, 1e300])
def test_limits_beyond_counting_are_none(cluster, timeout):
    cluster.run(0, call_with, timeout)
    assert cluster.everywhere(meet_with, timeout) == [[0, 1, 2, 3]] * 4
    with pytest.raises(rpc.RpcTimeout, match="on 'worker2'"):
        cluster.run(3, rpc.barrier, ["worker2", "worker3"])
