"""A worker that leaves or dies, and another one that gets its name and rank."""

import threading

import pytest

from jdist import rpc
from jdist.rpc.base import current
from tests.rpc.elastic.common import who
from tests.rpc.elastic.test_meeting import gather, has_arrived
from tests.rpc.rref.common import wait_for

PATIENCE = 60
_gates: dict[str, threading.Event] = {}


def gate(name):
    return _gates.setdefault(name, threading.Event())


def wait_at(name):
    assert gate(name).wait(PATIENCE)
    return who()


def open_gate(name):
    gate(name).set()


def leave(elastic, name):
    """It ends at once, whatever it was doing."""
    elastic.begin_to_leave(name, graceful=False).result()


def replace(elastic, name):
    """Another worker of this name, with another number."""
    assert elastic.join(name) == rpc.WorkerInfo(name, 1)
    elastic.run(name, has_number_of_a_successor)
    for other in elastic.names:
        assert elastic.run(other, rpc.rpc_sync, name, who) == name


def has_number_of_a_successor():
    info = current.worker().info
    assert info.incarnation != info.id


# --- calls that were taken back ---


def nested(to, fn, *args):
    """On the worker in question: a call within a call, which bears a ticket."""
    return rpc.rpc_sync(to, fn, args=args)


def call_and_forget(through, *args):
    for _ in range(3):
        rpc.rpc_async(through, nested, args=args, timeout=0)


def taken_back():
    return len(current.worker().callee._taken_back)


def test_tickets_of_a_predecessor_take_nothing_back(elastic):
    """Both count their tickets from 1."""
    for name in ("worker1", "worker2", "worker3"):
        elastic.join(name)
    place = f"given up {elastic.kind}"
    elastic.run("worker3", call_and_forget, "worker1", "worker2", wait_at, place)
    elastic.run("worker2", is_serving, "worker1", 3)
    leave(elastic, "worker3")
    elastic.run("worker2", wait_for_taken_back, 3)
    elastic.run("worker2", open_gate, place)
    leave(elastic, "worker1")
    replace(elastic, "worker1")
    for _ in range(6):
        args = ("worker2", who)
        assert elastic.run("worker0", rpc.rpc_sync, "worker1", nested, args) == (
            "worker2"
        )


def wait_for_taken_back(count):
    assert wait_for(lambda: taken_back() == count), taken_back()


def is_serving(name, count=1):
    served = current.worker().outstanding.served
    assert wait_for(lambda: [one.peer for one in served()].count(name) == count)


def test_news_of_a_predecessors_end_come_late(threads):
    """What its successor has asked for goes on."""
    agent = current.worker()
    threads.join("worker1")
    before = agent.directory.find("worker1")
    leave(threads, "worker1")
    replace(threads, "worker1")
    running = threads.start("worker1", rpc.rpc_sync, "worker0", wait_at, ("late",))
    is_serving("worker1")
    agent.drop_peer(before, "said again")
    (execution,) = agent.outstanding.served()
    assert execution.cancelled is None
    open_gate("late")
    assert running.result() == "worker0"


def kept(to):
    info = current.worker().directory.find(to).info
    _kept[:] = [info]
    return info.incarnation


_kept: list[rpc.WorkerInfo] = []


def call_kept():
    with pytest.raises(rpc.WorkerLost, match="Lost worker 'worker1' during rpc_sync"):
        rpc.rpc_sync(_kept[0], who)
    with pytest.raises(rpc.WorkerLost, match="left the group"):
        rpc.rpc_async(_kept[0], who).wait()
    return rpc.rpc_sync("worker1", who)


def test_a_lost_worker_is_named_although_its_name_is_in_use(elastic):
    elastic.join("worker1")
    number = elastic.run("worker0", kept, "worker1")
    leave(elastic, "worker1")
    replace(elastic, "worker1")
    assert elastic.run("worker0", call_kept) == "worker1"
    assert elastic.run("worker0", kept, "worker1") != number


# --- collectives ---


def gather_in_a_thread():
    """Its worker leaves while this thread waits for the others."""
    name = who()

    def body():
        text = "RPC was shut down on this worker during all_gather"
        with rpc.use_worker(name), pytest.raises(rpc.RpcError, match=text):
            rpc.all_gather("from the first one")

    threading.Thread(target=body, daemon=True).start()


def test_who_leaves_after_it_came_has_given_its_part(elastic):
    """And the answer is not sent to its successor."""
    elastic.join("worker1")
    elastic.join("worker2")
    elastic.run("worker1", gather_in_a_thread)
    elastic.run("worker2", rpc.rpc_sync, "worker0", has_arrived, (1,))
    leave(elastic, "worker1")
    replace(elastic, "worker1")
    tasks = [elastic.start(name, gather, name) for name in ("worker0", "worker2")]
    expected = {
        "worker0": "worker0",
        "worker1": "from the first one",
        "worker2": "worker2",
    }
    assert [task.result() for task in tasks] == [expected] * 2
    everybody = dict.fromkeys(("worker0", "worker1", "worker2"), 7)
    assert elastic.everywhere(gather, 7) == dict.fromkeys(elastic.names, everybody)
