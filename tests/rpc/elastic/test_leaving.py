"""Workers leave one by one, others take their names, and references tell them apart."""

import threading
import warnings

import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.calls.agent import current_agent
from tests.rpc.elastic.common import greet, greet_all, infos, lost, who
from tests.rpc.rref.common import (
    NOTHING,
    references,
    wait_for,
    wait_for_references,
)

_kept = {}
_gates = {}


def gate(name):
    return _gates.setdefault(name, threading.Event())


def keep(name, rref):
    _kept[who(), name] = rref


def kept(name):
    """What became of it: the value, or why there is none."""
    try:
        return _kept[who(), name].to_here()
    except rpc.WorkerLost as error:
        return error.worker, error.reason


def forget():
    _gates.clear()
    for worker, name in list(_kept):
        if worker == who():
            del _kept[worker, name]


@pytest.fixture(autouse=True)
def nothing_is_kept(elastic):
    yield
    elastic.everywhere(forget)


def test_the_others_go_on(elastic):
    for name in ("worker1", "worker2", "worker3"):
        elastic.join(name)
    elastic.leave("worker2")
    elastic.everywhere(greet_all, ["worker0", "worker1", "worker3"])
    for name in elastic.names:
        assert [info.id for info in elastic.run(name, infos)] == [0, 1, 3]
        with pytest.raises(rpc.WorkerLost, match=r"worker2.*it has left the group"):
            elastic.run(name, rpc.rpc_sync, "worker2", who)
    assert set(map(str, elastic.everywhere(lost).values())) == {"{}"}
    elastic.leave("worker1")
    elastic.everywhere(greet_all, ["worker0", "worker3"])


def hold_news(name):
    """This worker hears at once that another one left, and notes it later."""
    group = current_agent().group
    note = group._part

    def held(*news):
        assert gate(name).wait(60)
        note(*news)

    group._part = held


def test_all_others_know_of_it_when_a_shutdown_returns(elastic):
    """However late one of them gets to it."""
    elastic.join("worker1")
    elastic.join("worker2")
    elastic.run("worker2", hold_news, "news")
    leaving = elastic.begin_to_leave("worker1")
    assert not leaving.done(0.3)
    elastic.run("worker2", open_gate, "news")
    leaving.result()
    for name in elastic.names:
        assert [info.id for info in elastic.run(name, infos)] == [0, 2]
        with pytest.raises(rpc.WorkerLost, match=r"worker1.*it has left the group"):
            elastic.run(name, rpc.rpc_sync, "worker1", who)


def test_an_end_that_is_not_graceful_waits_for_no_others(elastic):
    elastic.join("worker1")
    elastic.join("worker2")
    elastic.run("worker2", hold_news, "later")
    elastic.leave("worker1", graceful=False)
    elastic.run("worker2", open_gate, "later")


def ask_old_and_new(old):
    """By its WorkerInfo the worker that left; by name and rank the one there now."""
    with pytest.raises(rpc.WorkerLost, match="it has left the group"):
        rpc.rpc_sync(old, who)
    assert rpc.get_worker_info(old.name) == old
    made_by_hand = rpc.WorkerInfo(old.name, old.id)
    for to in (old.name, old.id, made_by_hand, rpc.get_worker_info(old.name)):
        assert rpc.rpc_sync(to, who) == old.name


def test_names_and_ranks_are_handed_out_again(elastic):
    for _ in range(3):
        elastic.join("worker1")
        old = elastic.run("worker0", rpc.get_worker_info, "worker1")
        assert old.id == 1
        elastic.leave("worker1")
        assert elastic.join("worker1") == old
        elastic.run("worker0", ask_old_and_new, old)
        elastic.everywhere(greet_all, ["worker0", "worker1"])
        elastic.leave("worker1")


def make(name, to, value):
    keep(name, rpc.remote(to, str, args=(value,)))
    assert kept(name) == str(value)
    return _kept[who(), name]._handle.rref


def share(name, to):
    rpc.rpc_sync(to, keep, args=(name, _kept[who(), name]))


def give_in_vain(name, to):
    with pytest.raises(rpc.WorkerLost, match="it has left the group"):
        rpc.rpc_sync(to, keep, args=(name, _kept[who(), name]))


def shut_down_with_leaks():
    """What is said about them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rpc.shutdown()
    return [str(warning.message) for warning in caught]


def test_what_becomes_of_references(elastic):
    """Those of who leaves end, and so do values; nothing passes to a successor."""
    elastic.join("worker1")
    elastic.join("worker2")
    elastic.run("worker0", make, "gone", "worker1", 17)
    elastic.run("worker0", share, "gone", "worker2")
    first = elastic.run("worker1", make, "mine", "worker0", 5)
    elastic.run("worker1", share, "mine", "worker2")
    assert elastic.run("worker0", held_and_owned) == (1, 1, 2)
    (leak,) = elastic.begin_to_leave("worker1", shut_down_with_leaks).result()
    assert "Leaking RRef: values that others hold" in leak
    assert "held by 'worker0'" in leak
    assert "held by 'worker2'" in leak
    # Its own share in what it had created is given up, worker2's is not.
    elastic.run("worker0", wait_for_references, owner_rrefs=1, forks=1)
    assert elastic.run("worker2", kept, "mine") == "5"
    elastic.join("worker1")
    for name in ("worker0", "worker2"):
        assert elastic.run(name, kept, "gone") == ("worker1", "it has left the group")
        elastic.run(name, give_in_vain, "gone", "worker1")
    second = elastic.run("worker1", make, "mine", "worker0", 6)
    assert second.local_id == first.local_id
    assert second.created_on != first.created_on
    assert elastic.run("worker1", kept, "mine") == "6"
    assert elastic.run("worker2", kept, "mine") == "5"
    elastic.run("worker0", make, "gone", "worker1", 18)
    assert elastic.run("worker0", kept, "gone") == "18"
    elastic.everywhere(forget)
    elastic.everywhere(wait_for_references, **NOTHING)


def held_and_owned():
    told = references()
    return told["user_rrefs"], told["owner_rrefs"], told["forks"]


def finish(event):
    gate("begun").set()
    assert gate(event).wait(60)
    return who()


def wait_for_begun(event):
    assert gate("begun").wait(60)
    assert not gate(event).is_set()


def open_gate(event):
    gate(event).set()


def test_whoever_leaves_finishes_what_it_does(elastic):
    elastic.join("worker1")
    elastic.join("worker2")
    call = elastic.start("worker0", rpc.rpc_sync, "worker1", finish, ("end",))
    elastic.run("worker2", rpc.rpc_sync, "worker1", wait_for_begun, ("end",))
    leaving = elastic.begin_to_leave("worker1")
    assert not leaving.done(0.2)
    elastic.run("worker2", rpc.rpc_sync, "worker1", open_gate, ("end",))
    assert call.result() == "worker1"
    leaving.result()


def test_rank_0_leaves_last(elastic):
    elastic.join("worker1")
    elastic.join("worker2")
    leaving = elastic.begin_to_leave("worker0")
    assert not leaving.done(0.2)
    # It still serves the others, and lets nobody in.
    assert elastic.run("worker1", rpc.rpc_sync, "worker0", greet, ("x",)) == (
        "x, I am worker0"
    )
    elastic.leave("worker1")
    assert not leaving.done(0.2)
    elastic.leave("worker2")
    leaving.result()
    if elastic.kind == "process":
        elastic.join("worker0", rank=0)  # A new group, at the same place.
        elastic.join("worker1")
        elastic.everywhere(greet_all, elastic.names)


def await_the_coordinators_end():
    """It is told a moment after rank 0 itself has left."""
    assert wait_for(lambda: current.worker().group._alone is not None)


def test_rank_0_has_no_patience(elastic):
    elastic.join("worker1")
    text = r"timed out after 0\.10 seconds: rank 0 .* leaves last. Still there: worker1"
    with pytest.raises(rpc.RpcTimeout, match=text):
        elastic.leave("worker0", timeout=0.1)
    elastic.run("worker1", await_the_coordinators_end)
    with pytest.raises(rpc.WorkerLost, match=r"worker0.* as coordinator, it was shut"):
        elastic.leave("worker1")
