"""References when workers end: leaks, cycles, uses after the end, and deaths."""

import gc
import signal
import threading
import warnings

import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.rref.references import References
from tests.rpc import lost_workers
from tests.rpc.hosts import Cluster, become_worker, in_threads, names, results
from tests.rpc.rref.common import (
    NOTHING,
    Counter,
    add,
    identity,
    make,
    references,
    settle,
    wait_for,
    wait_for_references,
)

_kept = []


def keep(rref):
    _kept.append(rref)


def forget():
    _kept.clear()


@pytest.fixture(params=["in-process", "process"])
def begin(request, hosts):
    """`begin(**options)`: three workers, which the test shuts down itself."""
    if request.param == "process":

        def start(**options):
            group = [hosts.start(rank, become_worker, **options) for rank in range(4)]
            results(group)
            return Cluster("process", names(), hosts.start)

        yield start
        hosts.everywhere(forget)
        return
    clusters = []

    def start(**options):
        options = rpc.RpcOptions(**options)
        clusters.append(rpc.local_cluster(names(), options=options, allow=["tests"]))
        clusters[-1].__enter__()
        return Cluster("in-process", names(), in_threads(names()))

    yield start
    forget()
    for cluster in clusters:
        cluster.__exit__(None, None, None)


def shut_down():
    """The error, if there was one."""
    try:
        rpc.shutdown()
    except rpc.RpcError as error:
        return str(error)
    return None


def shut_down_with_warnings():
    """What was warned of, and the error; by one worker of a process at a time."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = shut_down()
    return [str(one.message) for one in caught if one.category is RuntimeWarning], error


def never_give_up():
    """As if this worker's references were not released at the end."""
    agent = current.worker()

    class Hoarder(References):
        def release(self, deadline, seconds):
            return None

    agent.references.__class__ = Hoarder


def share(to):
    rpc.rpc_sync(to, keep, args=(rpc.RRef(5),))
    return current.worker().info.id


@pytest.mark.parametrize("leaks", ["warn", "error"])
def test_references_that_are_held_at_the_end(begin, leaks):
    cluster = begin(leaks=leaks)
    cluster.run(2, never_give_up)
    cluster.run(1, share, "worker2")
    ended = [cluster.start(rank, shut_down) for rank in (0, 2, 3)]
    warned, error = cluster.run(1, shut_down_with_warnings)
    assert results(ended) == [None] * 3
    text = "Leaking RRef: values that others hold at the end: GloballyUniqueId("
    (said,) = warned if leaks == "warn" else [error]
    assert said.startswith(text)
    assert "held by 'worker2' as GloballyUniqueId(created_on=1" in said


def make_cycle(to):
    """Only the garbage collector could free it, and does not run."""
    gc.disable()
    cycle = [rpc.remote(to, add, args=(1, 2))]
    cycle.append(cycle)
    assert cycle[0].to_here() == 3


def test_a_cycle_does_not_hold_up_the_end(begin):
    cluster = begin(leaks="error")
    try:
        cluster.run(0, make_cycle, "worker1")
        told = results([cluster.start(rank, shut_down) for rank in range(4)])
        assert told == [None] * 4
    finally:
        gc.enable()
        if cluster.kind == "process":
            cluster.run(0, gc.enable)


def keep_some():
    keep(rpc.remote("worker1", add, args=(1, 2)))
    keep(rpc.RRef(7))
    assert [rref.to_here() for rref in _kept] == [3, 7]


def use_after_the_end():
    user, own = _kept
    with pytest.raises(rpc.RpcError, match=r"Cannot call to_here\(\) on it after dele"):
        user.to_here()
    with pytest.raises(
        rpc.RpcError, match=r"RPC was shut down|has not been initialized"
    ):
        user.rpc_sync().bit_length()
    with pytest.raises(rpc.RpcError, match=r"Cannot call value_type\(\) on it after"):
        user.value_type()
    assert own.to_here() == 7
    assert str(user).startswith("UserRRef(")
    assert user.owner_name() == "worker1"


def test_a_reference_after_the_end(begin):
    cluster = begin(leaks="error")
    cluster.run(0, keep_some)
    results([cluster.start(rank, shut_down) for rank in range(4)])
    if cluster.kind == "process":
        cluster.run(0, use_after_the_end)
    else:
        use_after_the_end()


def give_after_the_end():
    """Its worker is about to end, and has given up all that it had."""
    rref = rpc.remote("worker1", add, args=(1, 2))
    assert rref.to_here() == 3
    agent = current.worker()
    agent.references.released = True
    with pytest.raises(rpc.RpcError, match="Cannot call fork an UserRRef after deleti"):
        rpc.rpc_sync("worker2", identity, args=(rref,))
    agent.references.released = False


def test_a_reference_is_not_given_away_at_the_end(cluster):
    cluster.run(0, give_after_the_end)
    settle(cluster)


# --- deaths ---


def hold(to):
    keep(rpc.remote(to, Counter, args=(3,)))
    assert _kept[-1].rpc_sync().increment() == 4


def hand_on(to):
    rpc.rpc_sync(to, keep, args=(_kept[-1],))


def use_in_all_ways():
    rref = _kept[-1]
    found = [
        lost_workers.see(rref.to_here),
        lost_workers.see(rref.rpc_sync().increment),
        lost_workers.see(lambda: rref.rpc_async().increment().wait()),
        lost_workers.see(rref.value_type),
        lost_workers.see(rpc.rpc_sync, "worker1", identity, (rref,)),
        lost_workers.see(lambda: rref.remote().increment().to_here()),
    ]
    return {(seen.kind, seen.worker) for seen in found}


def has_lost(name):
    assert wait_for(lambda: name in current.worker().group.lost())
    assert wait_for(lambda: _kept[-1]._handle.user_fork.failed)


def test_the_owner_dies(fresh_hosts):
    """Every holder is told so, whatever it does with the reference."""
    hosts = fresh_hosts(4)
    hosts.everywhere(become_worker)
    hosts.run(0, hold, "worker3")
    hosts.run(0, hand_on, "worker2")
    hosts.signal(3, signal.SIGKILL)
    for rank in (0, 2):
        hosts.run(rank, has_lost, "worker3")
        assert hosts.run(rank, use_in_all_ways) == {("WorkerLost", "worker3")}
        hosts.run(rank, forget)
        hosts.run(rank, wait_for_references, **NOTHING)


def test_holders_die(fresh_hosts):
    """Their forks are counted no more; the others keep the value."""
    hosts = fresh_hosts(4)
    hosts.everywhere(become_worker)
    hosts.run(3, hold, "worker1")
    hosts.run(3, hand_on, "worker2")
    assert hosts.run(1, references)["forks"] == 2
    hosts.signal(3, signal.SIGKILL)
    hosts.run(1, wait_for_references, owner_rrefs=1, forks=1)
    assert hosts.run(2, increment_kept) == 5
    hosts.signal(2, signal.SIGKILL)
    hosts.run(1, wait_for_references, **NOTHING)


def increment_kept():
    return _kept[-1].rpc_sync().increment()


# --- finalizers ---


class Node:
    """A part of a cycle, with a finalizer that calls others."""

    def __init__(self, rref, log):
        self.rref, self.log, self.me = rref, log, self

    def __del__(self):
        self.log.append(self.rref.owner_name())


def drop_in_threads():
    """Finalizers run on whichever thread collects, also within rpc's own locks."""
    me, log = rpc.get_worker_info().name, []

    def drop():
        with rpc.use_worker(me):
            for _ in range(10):
                Node(rpc.remote("worker1", add, args=(1, 2)), log)
                Node(rpc.rpc_sync("worker2", make, args=(3,)), log)
                # The young ones: all would take seconds in a process of many tests.
                gc.collect(1)

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(lost_workers.PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    gc.collect()
    assert sorted(log) == ["worker1"] * 40 + ["worker2"] * 40


def test_references_are_dropped_on_any_thread(cluster):
    cluster.run(0, drop_in_threads)
    settle(cluster)
