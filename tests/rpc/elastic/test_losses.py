"""Workers of an elastic group die, freeze and are replaced; the coordinator is lost."""

import signal
import time

import pytest

from jdist import rpc
from tests.rpc import lost_workers
from tests.rpc.elastic.common import greet_all, infos, join, lost, who
from tests.rpc.hosts import results
from tests.rpc.rref.common import NOTHING, references, wait_for, wait_for_references

_kept = []


def keep(to):
    _kept.append(rpc.remote(to, str, args=(3,)))
    assert _kept[-1].to_here() == "3"


def give(to):
    rpc.rpc_sync(to, take, args=(_kept[-1],))


def take(rref):
    _kept.append(rref)


def use_kept():
    return lost_workers.see(_kept[-1].to_here)


def has_lost(name):
    assert wait_for(lambda: name in lost())


def await_newcomer(name):
    """Until it can be called; a loss is told a moment after it happened."""
    assert wait_for(lambda: name not in lost())
    assert rpc.rpc_sync(name, who) == name


def test_a_dead_worker_is_replaced_at_once(mortal):
    """Its successor comes before anybody has noticed, or while they do."""
    group = mortal(6)
    group.join("worker1")
    group.join("worker2")
    for turn in range(3):
        group.run("worker0", keep, "worker1")
        group.run("worker0", give, "worker2")
        group.signal("worker1", signal.SIGKILL)
        info = group.join("worker1")
        assert info == rpc.WorkerInfo("worker1", 1)
        for name in group.names:
            group.run(name, await_newcomer, "worker1")
            group.run(name, greet_all, group.names)
        for name in ("worker0", "worker2"):
            seen = group.run(name, use_kept)
            assert (turn, seen.kind, seen.worker) == (turn, "WorkerLost", "worker1")
            assert "connection closed" in seen.text
    group.end()  # Nobody is missed: those who were lost have been replaced.


def test_a_worker_that_dies_while_it_joins_is_replaced_at_once(mortal, port):
    """Its own entry of a moment ago is not in its successor's way."""
    group = mortal(6)
    group.join("worker1")
    for place in (2, 3, 4):
        group.hosts.run(place, lost_workers.begin_to_join, "x", 2, port, 0, join)
        group.hosts.signal(place, signal.SIGKILL)
    assert group.join("x", rank=2).id == 2
    group.everywhere(greet_all, group.names)
    assert [info.name for info in group.run("worker0", infos)] == group.names
    group.end()


def test_a_worker_that_dies_before_a_fixed_group_is_complete(fresh_hosts, port):
    hosts = fresh_hosts(5)
    first = hosts.start(0, join, "worker0", 0, port, size=3)
    for place in (2, 3):
        hosts.run(place, lost_workers.begin_to_join, "worker2", 2, port, 3, join)
        hosts.signal(place, signal.SIGKILL)
    replaced = hosts.start(4, join, "worker2", 2, port, size=3)
    others = hosts.start(1, join, "worker1", 1, port, size=3)
    assert [task.result().id for task in (first, others, replaced)] == [0, 1, 2]
    names = ["worker0", "worker1", "worker2"]
    results([hosts.start(place, greet_all, names) for place in (0, 1, 4)])
    results([hosts.start(place, rpc.shutdown) for place in (0, 1, 4)])


def call_directly(to):
    return lost_workers.see(rpc.rpc_sync, to, who)


def test_a_frozen_worker_is_replaced_and_thaws(mortal):
    """It is taken for nobody any more."""
    group = mortal(4, heartbeat_timeout=3.0)
    group.join("worker1")
    group.join("worker2")
    group.run("worker1", greet_all, group.names)
    frozen = group.hosts.pids[1]
    assert group.pid("worker1") == frozen
    group.signal("worker1", signal.SIGSTOP)
    for name in ("worker0", "worker2"):
        group.run(name, has_lost, "worker1")
    group.names.remove("worker1")
    group.forget("worker1")
    group.hosts.alive.discard(1)
    group.join("worker1")
    group.everywhere(greet_all, group.names)
    group.hosts.signal(1, signal.SIGCONT)
    group.hosts.alive.add(1)
    thawed = group.hosts.run(1, call_directly, "worker2")
    assert (thawed.kind, thawed.worker) == ("WorkerLost", "worker1")
    assert "this worker itself gave no sign of life" in thawed.text
    group.everywhere(greet_all, group.names)
    with pytest.raises(rpc.WorkerLost, match=r"worker1.* this worker itself gave"):
        group.hosts.run(1, rpc.shutdown)
    group.end()


def test_a_shutdown_waits_for_a_frozen_worker_until_that_is_lost(mortal):
    """It cannot note that another one leaves."""
    group = mortal(3, heartbeat_timeout=2.0)
    group.join("worker1")
    group.join("worker2")
    group.signal("worker2", signal.SIGSTOP)
    group.names.remove("worker2")
    begun = time.monotonic()
    group.leave("worker1")
    assert time.monotonic() - begun < 60
    group.run("worker0", has_lost, "worker2")  # it is told a moment later
    group.hosts.alive.discard(2)
    group.end()


def test_the_coordinator_is_lost(mortal, port):
    """All are told; direct calls go on; nobody can join or meet."""
    group = mortal(4)
    for name in ("worker1", "worker2"):
        group.join(name)
    group.run("worker2", keep, "worker1")
    waiting = [group.start("worker2", lost_workers.see, rpc.barrier, None, 0)]
    group.run("worker1", rpc.rpc_sync, "worker0", has_arrived, (1,))
    group.signal("worker0", signal.SIGKILL)
    for seen in results(waiting):
        assert (seen.kind, seen.worker, seen.operation) == (
            "WorkerLost", "worker0", "barrier",
        )  # fmt: skip
        assert "as coordinator, " in seen.text
    for name in group.names:
        group.run(name, has_lost, "worker0")
        group.run(name, greet_all, group.names)
        seen = group.run(name, lost_workers.see, rpc.barrier)
        assert (seen.kind, seen.worker) == ("WorkerLost", "worker0")
    assert group.run("worker2", use_kept).text == "3"
    with pytest.raises(rpc.RpcTimeout, match="could not reach the coordinator"):
        group.hosts.run(3, join, "worker3", 3, port, join_timeout=0.3)
    for name in ("worker2", "worker1"):
        with pytest.raises(rpc.WorkerLost, match=r"worker0.* shutdown: as coordinator"):
            group.leave(name)


def has_arrived(count):
    lost_workers.has_arrived(count)


def test_what_a_dead_worker_had_counts_no_more(mortal):
    group = mortal(4)
    group.join("worker1")
    group.join("worker2")
    group.run("worker1", keep, "worker0")
    assert group.run("worker0", references)["forks"] == 1
    group.signal("worker1", signal.SIGKILL)
    group.run("worker0", wait_for_references, **NOTHING)
    group.end()


def churn(port, turns):
    """Joins and leaves in one process, again and again; what is left."""
    lost_workers.note_what_is_open()
    for turn in range(turns):
        join("guest", 1, port)
        rref = rpc.remote("worker0", str, args=(turn,))
        assert rref.to_here() == str(turn)
        greet_all(["worker0", "guest"])
        rpc.shutdown()
    return lost_workers.what_is_left()


def open_here():
    return lost_workers.what_is_left()


def test_nothing_is_left_of_those_who_came_and_went(mortal, port):
    group = mortal(2)
    group.hosts.run(1, churn, port, 2)
    group.run("worker0", lost_workers.note_what_is_open)
    assert group.hosts.run(1, churn, port, 20) == []
    group.run("worker0", wait_for_references, **NOTHING)
    assert group.run("worker0", open_here) == []
    assert group.run("worker0", infos) == [rpc.WorkerInfo("worker0", 0)]
    group.end()
