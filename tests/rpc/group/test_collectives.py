"""Collectives that do not belong together are refused on all workers, by name."""

import contextvars
import re
import threading
import time

import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.base.current import Deadline, Scope
from tests.rpc.collectives import SAME, averaged, do, each, seen
from tests.rpc.hosts import results


def one(cluster, rank, name, *args):
    return cluster.start(rank, do, name, *args)


def in_step(cluster):
    """The next collective of all is right again."""
    told = cluster.everywhere(each, [[("gather",), ("barrier",)]] * 4)
    assert told == [[("result", SAME), ("result", None)]] * 4


PAIRS = [
    (("gather",), ("barrier",), r"all_gather number \d+", r"barrier number \d+"),
    (
        ("tagged", "loss"),
        ("tagged", "weights"),
        r"all_gather\(tag='loss'\) number \d+",
        r"all_gather\(tag='weights'\) number \d+",
    ),
    (
        ("tagged barrier", "x"),
        ("barrier",),
        r"barrier\(tag='x'\) nu",
        r"barrier number",
    ),
]


@pytest.mark.parametrize(("first", "second", "here", "there"), PAIRS)
def test_different_ones_are_refused_on_all(cluster, first, second, here, there):
    """Also on those who come late, whatever they come for."""
    early = [one(cluster, 2, *first), one(cluster, 1, *second)]
    told = results(early)
    assert told[0] == told[1]
    kind, text = told[0]
    assert kind == "CollectiveMismatch"
    assert "The workers do not do the same collective: " in text
    assert re.search(f"'worker2' is in {here}", text)
    assert re.search(f"'worker1' is in {there}", text)
    assert "worker0" not in text
    assert "worker3" not in text
    late = [one(cluster, 0, *first), one(cluster, 3, *second)]
    assert results(late) == [told[0]] * 2
    in_step(cluster)


def test_the_same_number_is_named_on_both_sides(cluster):
    """It counts the collectives of these workers, of all kinds."""
    in_step(cluster)
    _, text = results([one(cluster, 0, "gather"), one(cluster, 3, "barrier")])[0]
    results([one(cluster, 1, "gather"), one(cluster, 2, "gather")])
    numbers = re.findall(r"number (\d+)", text)
    assert len(numbers) == 2
    assert numbers[0] == numbers[1]
    in_step(cluster)


def test_tags_that_agree(cluster):
    plan = [("tagged", "a"), ("tagged barrier", "b"), ("tagged", "")]
    expected = [("result", SAME), ("result", None), ("result", SAME)]
    assert cluster.everywhere(each, [plan] * 4) == [expected] * 4


def hooks_in_order(order):
    return [seen(averaged, 10.0 * place + 1, f"of {name}") for place, name in order]


def test_a_tag_tells_averaging_hooks_apart(cluster):
    """Gradients of two variables whose hooks run in another order on each worker."""
    same = [(0, "a"), (1, "b")]
    orders = [same, [(1, "b"), (0, "a")]]
    tasks = [cluster.start(rank, hooks_in_order, orders[rank]) for rank in (0, 1)]
    for told in results(tasks):
        assert [kind for kind, _ in told] == ["CollectiveMismatch"] * 2
        assert all(f"tag='of {name}'" in told[0][1] for name in "ab")
    tasks = [cluster.start(rank, hooks_in_order, same) for rank in (0, 1)]
    assert results(tasks) == [[("result", 1.0), ("result", 11.0)]] * 2


def gather_pair(names, timeout):
    return seen(rpc.all_gather, 1, names, timeout=timeout)


def test_a_timeout_says_where_the_missing_one_is(cluster):
    """Other names are another collective: two that wait for each other."""
    pair, three = ["worker0", "worker1"], ["worker0", "worker1", "worker2"]
    other = cluster.start(1, gather_pair, three, 60)
    assert wait_for_part(cluster, three)
    kind, text = cluster.run(0, gather_pair, pair, 0.1)
    assert kind == "RpcTimeout"
    assert "Did not arrive: worker1. Instead, 'worker1' is in all_gather number" in text
    late = [cluster.start(rank, gather_pair, three, 60) for rank in (0, 2)]
    expected = ("result", dict.fromkeys(three, 1))
    assert results([other, *late]) == [expected] * 3
    assert cluster.run(1, gather_pair, pair, 60) == (kind, text)


def wait_for_part(cluster, names):
    return cluster.run(0, rpc.rpc_sync, "worker0", has_part, (names,))


def has_part(names):
    coordinator = current.worker().group.coordinator
    event, limit = threading.Event(), time.monotonic() + 60
    while time.monotonic() < limit:
        with coordinator._lock:
            known = coordinator._rounds
            if any(one.key.names == tuple(names) for one in known):
                return True
        event.wait(0.005)
    return False


def gather_too_late():
    """Within a call whose deadline has passed."""
    agent, past = current.worker(), Deadline(time.monotonic() - 1, 0.5, True)
    context = contextvars.copy_context()
    context.run(current.scope.set, Scope(agent, past))
    return context.run(seen, rpc.all_gather, 1, ["worker2", "worker3"])


def test_a_deadline_that_has_passed_is_no_unlimited_wait(cluster):
    assert cluster.run(2, gather_too_late)[0] == "RpcTimeout"
    assert wait_for_part(cluster, ["worker2", "worker3"])
    # It is the end for the others too: they do not gather what no worker waits for.
    kind, text = cluster.run(3, gather_pair, ["worker2", "worker3"], 60)
    assert kind == "RpcTimeout"
    assert "timed out in _all_gather after 0.00 seconds on 'worker2'" in text
