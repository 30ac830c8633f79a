"""Barriers and all_gather while workers come and go."""

import pytest

from jdist import rpc
from jdist.rpc.base import current
from tests.rpc.elastic.common import who
from tests.rpc.hosts import results
from tests.rpc.rref.common import wait_for


def gather(value, names=None, timeout=60):
    return rpc.all_gather(value, names, timeout)


def arrived():
    """On rank 0: how many wait at the coordinator."""
    coordinator = current.worker().group.coordinator
    with coordinator._lock:
        rounds = coordinator._rounds
        return sum(len(one._came) for one in rounds if not one.decided)


def has_arrived(count):
    assert wait_for(lambda: arrived() == count), arrived()


def kept_rounds():
    return len(current.worker().group.coordinator._rounds)


def ask_from_worker0(elastic, body, *args):
    """Runs a body on worker0 while its own process may be busy with a meeting."""
    elastic.run(elastic.names[-1], rpc.rpc_sync, "worker0", body, args)


def test_all_who_are_there_when_the_first_one_comes(elastic):
    assert elastic.run("worker0", gather, 5) == {"worker0": 5}
    elastic.join("worker1")
    elastic.join("worker2")
    first = elastic.start("worker0", gather, "a")
    ask_from_worker0(elastic, has_arrived, 1)
    # A newcomer is not of this meeting, and does not hold it up.
    elastic.join("worker3")
    others = [elastic.start(f"worker{i}", gather, "a") for i in (1, 2)]
    expected = {"worker0": "a", "worker1": "a", "worker2": "a"}
    assert results([first, *others]) == [expected] * 3
    # It is of the next one, whichever of them comes first.
    newcomer = elastic.start("worker3", gather, 3)
    tasks = [elastic.start(f"worker{i}", gather, i) for i in range(3)]
    expected = {f"worker{i}": i for i in range(4)}
    assert results([newcomer, *tasks]) == [expected] * 4
    assert elastic.run("worker0", kept_rounds) == 0


def rounds(count, names):
    return [rpc.all_gather((who(), turn), names) for turn in range(count)]


def test_newcomers_meet_old_ones_in_the_order_of_calls(elastic):
    """Who has met often before, and who has not, need not agree how often."""
    elastic.join("worker1")
    pair = ["worker0", "worker1"]
    for _ in range(2):
        told = elastic.everywhere(rounds, 10, pair)
        expected = [{name: (name, turn) for name in pair} for turn in range(10)]
        assert told == {"worker0": expected, "worker1": expected}
        elastic.run("worker0", rounds, 3, ["worker0"])
        elastic.leave("worker1")
        elastic.join("worker1")


def test_who_is_named_is_waited_for(elastic):
    """Also before it has joined."""
    waiting = elastic.start("worker0", gather, 1, ["worker0", "worker1"])
    assert not waiting.done(0.1)
    elastic.join("worker1")
    assert elastic.run("worker1", gather, 2, ["worker1", "worker0"]) == {
        "worker0": 1,
        "worker1": 2,
    }
    assert waiting.result() == {"worker0": 1, "worker1": 2}


def test_who_is_named_does_not_come(elastic):
    """Nothing of it is left for who comes later."""
    pair = ["worker0", "worker1"]
    text = r"timed out in _all_gather after 0\.10 seconds.* Did not arrive: worker1"
    with pytest.raises(rpc.RpcTimeout, match=text):
        elastic.run("worker0", gather, 1, pair, 0.1)
    assert elastic.run("worker0", kept_rounds) == 0
    elastic.join("worker1")
    assert set(map(str, elastic.everywhere(gather, 7, pair).values())) == {
        "{'worker0': 7, 'worker1': 7}"
    }


def gather_and_see(value, names=None):
    try:
        return gather(value, names)
    except rpc.RpcError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("named", [False, True], ids=["all", "named"])
def test_somebody_leaves_while_others_wait_for_it(elastic, named):
    for name in ("worker1", "worker2"):
        elastic.join(name)
    names = ["worker0", "worker1", "worker2"] if named else None
    waiting = [
        elastic.start(name, gather_and_see, 4, names) for name in ("worker0", "worker1")
    ]
    ask_from_worker0(elastic, has_arrived, 2)
    elastic.leave("worker2")
    for told in results(waiting):
        if named:
            text = "Lost worker 'worker2' during all_gather: it has left the group."
            assert told == ("WorkerLost", text)
        else:
            assert told == {"worker0": 4, "worker1": 4}
    assert elastic.run("worker0", kept_rounds) == 0


def without_itself():
    with pytest.raises(ValueError, match="must be workers of the group, worker0 among"):
        rpc.barrier(["worker1"])


def test_names_without_ones_own(elastic):
    elastic.join("worker1")
    elastic.run("worker0", without_itself)


def begins_to_leave():
    return current.worker().group.coordinator._leaving is not None


def gather_with_one_that_leaves():
    assert wait_for(lambda: rpc.rpc_sync("worker0", begins_to_leave))
    try:
        return rpc.barrier(timeout=0.1)
    except rpc.RpcTimeout as error:
        return str(error)


def test_rank_0_ends_while_another_one_gathers(processes):
    """It leaves last, so the other one is told where it is."""
    processes.join("worker1")
    ending = processes.begin_to_leave("worker0")
    text = processes.run("worker1", gather_with_one_that_leaves)
    assert "Did not arrive: worker0. Instead, 'worker0' is in shutdown" in text
    processes.leave("worker1")
    ending.result()
