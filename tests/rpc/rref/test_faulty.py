"""References whose messages are lost, late, cut or sent twice on the way."""

import contextlib

import pytest

from jdist import rpc
from jdist.rpc.base import current
from tests.rpc.faults import Rule
from tests.rpc.faulty_clusters import WAYS, include_own_calls, late, let_go, struck
from tests.rpc.rref.common import (
    NOTHING,
    add,
    after_gate,
    close_gate,
    identity,
    make,
    open_gate,
    references,
    settle,
    value_of,
    wait_for,
    wait_for_references,
)

CREATION = "RRef creation"
REPEATED = ("rref.fork", "rref.accept", "rref.delete")
_kept = []


@pytest.fixture(params=WAYS)
def begin(request, hosts):
    """`begin(make_rules)`: three workers whose frames meet those faults."""
    with contextlib.ExitStack() as stack:

        def start(make_rules):
            way = WAYS[request.param](hosts, make_rules, 3, leaks="error")
            cluster = stack.enter_context(way)
            cluster.everywhere(hurry)
            stack.callback(settle, cluster)
            stack.callback(cluster.everywhere, forget)
            return cluster

        yield start


def hurry():
    """What is not answered is sent again soon."""
    current.worker().references.delivery.patience = 0.05


def forget():
    _kept.clear()


def keep(rref):
    _kept.append(rref)


# --- messages that keep a value alive ---


def lost_three_times():
    return [Rule("drop", kind, first=3) for kind in REPEATED]


def late_three_times():
    return [Rule("delay", kind, first=3, until=0.2) for kind in REPEATED]


def always_twice():
    return [Rule("duplicate", kind) for kind in (*REPEATED, "rref.take", "rref.abort")]


def cut_three_times():
    return [Rule("truncate", kind, first=3) for kind in REPEATED]


def closed_three_times():
    return [Rule("close", kind, first=3) for kind in REPEATED]


def share_and_drop():
    """Between three workers, so that all kinds of messages are needed."""
    first = rpc.remote("worker1", add, args=(20, 3))
    second = rpc.rpc_sync("worker2", make, args=(7,))
    assert rpc.rpc_sync("worker2", value_of, args=(first,)) == 23
    assert rpc.rpc_sync("worker1", value_of, args=(second,)) == 7
    for rref in (first, second):
        for to in ("worker1", "worker2"):
            rpc.rpc_sync(to, keep, args=(rref,))
    del rref, second
    assert first.to_here() == 23


def kept_values():
    return sorted(rref.to_here() for rref in _kept)


FAULTS = [
    lost_three_times, late_three_times, always_twice, cut_three_times,
    closed_three_times,
]  # fmt: skip


@pytest.mark.parametrize("make_rules", FAULTS)
def test_values_live_as_long_as_they_should(begin, make_rules):
    cluster = begin(make_rules)
    cluster.run(0, share_and_drop)
    cluster.run(0, wait_for_references, user_rrefs=0)
    for rank in (1, 2):
        assert sorted(set(cluster.run(rank, kept_values))) == [7, 23]
    cluster.everywhere(forget)
    settle(cluster)
    told = cluster.everywhere(struck)
    if cluster.kind == "in-process":
        told = told[:1]  # They all share one plan.
    happened = {kind for counts in told for _, kind in counts}
    assert happened.issuperset(REPEATED)


# --- creations ---


def lost_creations():
    return [Rule("drop", "rref.create", first=1)]


def fails_everywhere(rref, sendable):
    with pytest.raises(rpc.RpcTimeout, match="RPC ran for more than set timeout"):
        rref.creation().wait()
    with pytest.raises(rpc.RpcTimeout, match=CREATION):
        rref.to_here()
    if sendable:
        with pytest.raises(rpc.RpcTimeout, match=CREATION):
            rpc.rpc_async("worker2", value_of, args=(rref,)).wait()
        with pytest.raises(rpc.RpcTimeout, match=CREATION):
            rref.rpc_sync().bit_length()


def create_in_vain(to):
    rref = rpc.remote(to, add, args=(1, 2), timeout=0.1)
    fails_everywhere(rref, sendable=to != "worker0")
    assert rpc.remote(to, add, args=(1, 4)).to_here() == 5


@pytest.mark.parametrize("to", ["worker1", "worker0"])
def test_a_creation_that_is_lost(begin, to):
    cluster = begin(lost_creations)
    cluster.run(0, include_own_calls)
    cluster.run(0, create_in_vain, to)
    if cluster.kind == "process":
        assert cluster.run(0, struck) == {("drop", "rref.create"): 1}


def fetch_in_vain(to):
    """Before anybody knows that the creation was lost."""
    rref = rpc.remote(to, add, args=(1, 2), timeout=0.2)
    with pytest.raises(rpc.RpcTimeout, match=CREATION):
        rref.to_here()


@pytest.mark.parametrize("to", ["worker1", "worker0"])
def test_a_value_is_wanted_whose_creation_is_lost(begin, to):
    cluster = begin(lost_creations)
    cluster.run(0, include_own_calls)
    cluster.run(0, fetch_in_vain, to)


def give_away_in_vain():
    """Who got it before that was known is told what became of it."""
    rref = rpc.remote("worker1", add, args=(1, 2), timeout=0.3)
    waiting = rpc.rpc_async("worker2", value_of, args=(rref,))
    with pytest.raises(rpc.RpcError, match=CREATION):
        waiting.wait()


def test_a_reference_is_given_away_whose_creation_is_lost(begin):
    begin(lost_creations).run(0, give_away_in_vain)


def late_creations():
    return [Rule("delay", "rref.create", first=2, until=late)]


def create_late(to):
    """One with a limit, which is over when the request arrives; and one without."""
    failed = rpc.remote(to, add, args=(1, 2), timeout=0.1)
    slow = rpc.remote(to, add, args=(2, 2), timeout=0)
    fails_everywhere(failed, sendable=to != "worker0")
    with pytest.raises(rpc.RpcTimeout, match="RPC ran for more than set timeout"):
        slow.to_here(timeout=0.05)
    let_go()
    assert slow.to_here() == 4
    fails_everywhere(failed, sendable=False)
    if to != "worker0":
        # The owner knows of both: the one that failed is counted like any other.
        assert rpc.rpc_sync(to, references)["forks"] == 2


@pytest.mark.parametrize("to", ["worker1", "worker0"])
def test_a_creation_that_comes_late(begin, to):
    cluster = begin(late_creations)
    cluster.run(0, include_own_calls)
    cluster.run(0, create_late, to)


def no_faults():
    return []


def create_slowly(to):
    rpc.rpc_sync(to, close_gate, args=("slow",))
    rref = rpc.remote(to, after_gate, args=("slow", 3), timeout=0.1)
    fails_everywhere(rref, sendable=to != "worker0")
    if to != "worker0":
        wait_for_counts(to, owner_rrefs=1, forks=1)
    rpc.rpc_sync(to, open_gate, args=("slow",))


def wait_for_counts(to, **expected):
    def counted():
        told = rpc.rpc_sync(to, references)
        return {name: told[name] for name in expected} == expected

    assert wait_for(counted), rpc.rpc_sync(to, references)


@pytest.mark.parametrize("to", ["worker1", "worker0"])
def test_a_creation_that_takes_too_long(begin, to):
    begin(no_faults).run(0, create_slowly, to)


# --- fetches ---


def late_fetches():
    return [Rule("delay", "rref.fetch", first=1, until=late)]


def fetch_late():
    rref = rpc.remote("worker1", identity, args=([1, 2],))
    rref.creation().wait()
    with pytest.raises(rpc.RpcTimeout, match=r"more than set timeout \(50 ms\)"):
        rref.to_here(timeout=0.05)
    assert rref.to_here() == [1, 2]
    let_go()
    assert rref.to_here() == [1, 2]


def test_a_fetch_that_comes_late(begin):
    begin(late_fetches).run(0, fetch_late)


# --- calls and answers that bring references ---


def lost_carriers():
    return [Rule("drop", "call", first=1), Rule("drop", "reply", first=1, skip=1)]


def share_in_vain():
    rref = rpc.RRef(3)
    with pytest.raises(rpc.RpcTimeout, match="RPC ran for more than"):
        rpc.rpc_sync("worker1", keep, args=(rref,), timeout=0.1)
    wait_for_references(**NOTHING)
    assert rpc.rpc_sync("worker1", value_of, args=(rref,)) == 3


def test_a_reference_that_is_lost_on_its_way(begin):
    """It is taken back; its giver's value does not stay for it."""
    begin(lost_carriers).run(0, share_in_vain)
