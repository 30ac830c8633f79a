"""References that travel: to their owner, to third parties, in values, and back."""

import collections
import dataclasses
import gc

import numpy as np
import pytest

from jdist import rpc
from jdist.rpc.base import current
from tests.rpc.rref.common import (
    NOTHING,
    add,
    after_gate,
    close_gate,
    gate,
    identity,
    make,
    open_gate,
    references,
    settle,
    value_of,
    wait_for,
    wait_for_references,
)

OWNER = "worker1"
_kept = []


@pytest.fixture(autouse=True)
def nothing_is_left(cluster):
    """Every test gives back what it had."""
    yield
    cluster.everywhere(forget)
    settle(cluster)


def forget():
    _kept.clear()


def plus(rref, x):
    return rref.to_here() + x


def passing(to):
    x = np.random.default_rng(3).normal(size=(2, 3))
    rref = rpc.remote(OWNER, identity, args=(x,))
    for call in (rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait()):
        assert np.array_equal(call(to, plus, (rref, 1.5)), x + 1.5)
        assert np.array_equal(call(to, plus, (), {"rref": rref, "x": 2}), x + 2)
    sum_there = rpc.remote(to, plus, args=(rref, 3))
    assert np.array_equal(sum_there.to_here(), x + 3)


@pytest.mark.parametrize("to", [OWNER, "worker2", "worker0"])
def test_to_the_owner_a_third_party_and_oneself(cluster, to):
    cluster.run(0, passing, to)


def passing_own(to):
    rref = rpc.RRef(40)
    assert rpc.rpc_sync(to, plus, args=(rref, 50)) == 90
    assert rpc.rpc_async(to, plus, args=(rref, 51)).wait() == 91
    assert rpc.remote(to, plus, args=(rref, 52)).to_here() == 92
    assert rref.local_value() == 40


@pytest.mark.parametrize("to", ["worker3", "worker0"])
def test_a_value_of_ones_own(cluster, to):
    cluster.run(0, passing_own, to)


def home():
    value = np.arange(4)
    rref = rpc.RRef(value)
    _kept.append(value)
    assert rpc.rpc_sync("worker2", sent_back, args=(rref,))
    again = rpc.rpc_sync("worker2", identity, args=(rref,))
    assert again.is_owner()
    assert again.local_value() is value
    assert again._handle.rref == rref._handle.rref


def sent_back(rref):
    return rpc.rpc_sync(rref.owner(), is_kept, args=(rref,))


def is_kept(rref):
    return rref.local_value() is _kept[-1]


def test_a_reference_that_comes_home_is_to_the_value_itself(cluster):
    cluster.run(0, home)


Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Holder:
    name: str
    rref: rpc.RRef


def total(value):
    if isinstance(value, rpc.RRef):
        return value.to_here()
    if isinstance(value, dict):
        return sum(map(total, value.values()))
    if isinstance(value, Holder):
        return total(value.rref)
    return sum(map(total, value))


def containers():
    first, second = rpc.remote(OWNER, add, args=(1, 2)), rpc.RRef(10)
    third = rpc.remote("worker3", add, args=(100, 200))
    nested = [
        [first, (second, {"third": third})],
        Pair(first, [third, third]),
        Holder("x", {"deep": [first, first]}),
    ]
    assert rpc.rpc_sync("worker2", total, args=(nested,)) == 313 + 603 + 6
    (left, (middle, right)), *_ = rpc.rpc_sync("worker2", identity, args=(nested,))
    assert [left.to_here(), middle.local_value(), right["third"].to_here()] == [
        3, 10, 300,
    ]  # fmt: skip


def test_inside_of_other_values(cluster):
    cluster.run(0, containers)


def three(x):
    return [rpc.RRef(x), rpc.RRef(x + 1), rpc.RRef(x + 2)]


def nested_remote(x, other):
    return rpc.remote(other, add, args=(x, 1))


def returned():
    made = rpc.rpc_sync("worker2", three, args=(11,))
    assert [rref.to_here() for rref in made] == [11, 12, 13]
    assert {rref.owner_name() for rref in made} == {"worker2"}
    outer = rpc.remote("worker2", three, args=(5,))  # an RRef of a list of RRefs
    assert [inner.to_here() for inner in outer.to_here()] == [5, 6, 7]
    far = rpc.rpc_sync("worker2", nested_remote, args=(7, "worker3"))
    assert (far.to_here(), far.owner_name()) == (8, "worker3")
    mine = rpc.rpc_sync("worker2", nested_remote, args=(8, "worker0"))
    assert (mine.local_value(), mine.owner_name()) == (9, "worker0")
    twice = rpc.remote("worker2", nested_remote, args=(9, "worker3"))
    assert twice.to_here().to_here() == 10
    futures = [rpc.rpc_async("worker3", three, args=(i,)) for i in range(20)]
    for i, future in enumerate(futures):
        assert [rref.to_here() for rref in future.wait()] == [i, i + 1, i + 2]


def test_in_what_a_function_returns(cluster):
    cluster.run(0, returned)


def forward(rref, ttl):
    if not ttl:
        return rref.to_here()
    here = rpc.get_worker_info().id
    inner = rpc.remote(f"worker{(here + 1) % 4}", forward, args=(rref, ttl - 1))
    return inner.to_here()


@pytest.mark.parametrize("owner", ["worker0", "worker2"])
def test_a_chain_of_holders(cluster, owner):
    assert cluster.run(0, chain, owner) == 21


def chain(owner):
    return forward(rpc.remote(owner, add, args=(1, 20)), 8)


def keep(rref):
    _kept.append(rref)


def kept_value():
    return _kept[-1].to_here()


def outlived():
    rref = rpc.rpc_sync(OWNER, make, args=(17,))
    rpc.rpc_sync("worker2", keep, args=(rref,))
    del rref
    rpc.rpc_sync("worker2", hand_on, args=("worker3",))
    assert wait_for(lambda: references()["user_rrefs"] == 0)
    assert rpc.rpc_sync("worker2", references)["user_rrefs"] == 0
    assert rpc.rpc_sync("worker3", kept_value) == 17


def hand_on(to):
    rpc.rpc_sync(to, keep, args=(_kept.pop(),))
    wait_for_references(user_rrefs=0, forks_under_way=0)


def test_the_last_holder_keeps_the_value(cluster):
    cluster.run(0, outlived)
    assert cluster.run(1, references)["owner_rrefs"] == 1
    cluster.run(3, forget)
    cluster.run(1, wait_for_references, **NOTHING)


def confirmed(*rrefs):
    return [rref.confirmed_by_owner() for rref in rrefs]


def confirmation():
    rpc.rpc_sync(OWNER, close_gate, args=("confirm",))
    slow = rpc.remote(OWNER, after_gate, args=("confirm", 1))
    assert not slow.confirmed_by_owner()
    told = rpc.rpc_async("worker2", confirmed, args=(slow, rpc.RRef(2)))
    # The function starts when its references are confirmed, not their values there.
    assert told.wait() == [True, True]
    assert rpc.remote("worker3", confirmed, args=(slow,)).to_here() == [True]
    assert not slow.creation().done()
    rpc.rpc_sync(OWNER, open_gate, args=("confirm",))
    assert slow.to_here() == 1


def test_a_function_starts_when_its_references_are_confirmed(cluster):
    cluster.run(0, confirmation)


def many_users():
    rref = rpc.rpc_sync(OWNER, make, args=(1,))
    for i in range(4):
        rpc.rpc_sync(f"worker{i}", keep, args=(rref,))
    counted = rpc.rpc_sync(OWNER, references)
    # Its own is none: worker0's two, worker2's and worker3's.
    assert (counted["owner_rrefs"], counted["forks"]) == (1, 4)
    forget()
    for i in range(1, 4):
        rpc.rpc_sync(f"worker{i}", forget)
    del rref
    rpc.rpc_sync(OWNER, wait_for_references, kwargs={"forks": 0, "owner_rrefs": 0})


def test_what_the_owner_counts(cluster):
    cluster.run(0, many_users)


def counts_of_two_creations():
    before = references()
    kept = [rpc.remote("worker0", identity, args=(i,)) for i in range(2)]
    assert [rref.to_here() for rref in kept] == [0, 1]
    wait_for_references(**NOTHING)  # what is its own is nobody else's business
    rpc.rpc_sync("worker2", keep, args=(kept,))
    after = references()
    assert (before["owner_rrefs"], after["owner_rrefs"], after["forks"]) == (0, 2, 2)


def test_a_value_is_counted_once_it_is_shared(cluster):
    cluster.run(0, counts_of_two_creations)


def cycle_of_objects():
    cycle = [rpc.remote(OWNER, identity, args=(3,))]
    cycle.append(cycle)
    assert cycle[0].to_here() == 3
    assert references()["user_rrefs"] == 1
    del cycle
    gc.collect()
    wait_for_references(user_rrefs=0)


def test_a_reference_in_a_cycle_is_collected(cluster):
    cluster.run(0, cycle_of_objects)


def side_by_side():
    rref = rpc.rpc_sync(OWNER, make, args=(5,))
    futures = [
        rpc.rpc_async(f"worker{i % 4}", plus, args=(rref, i)) for i in range(200)
    ]
    assert rpc.wait_all(futures) == [5 + i for i in range(200)]


def test_many_at_once(cluster):
    cluster.run(0, side_by_side)


def everywhere():
    me = rpc.get_worker_info().name
    mine = rpc.RRef(me)
    told = [rpc.rpc_async(f"worker{i}", value_of, args=(mine,)) for i in range(4)]
    assert rpc.wait_all(told) == [me] * 4


def test_all_to_all(cluster):
    cluster.everywhere(everywhere)


def gated(rref, name):
    assert gate(name).wait(60)
    return rref.to_here()


def dropped_by_the_giver_meanwhile():
    rpc.rpc_sync("worker2", close_gate, args=("meanwhile",))
    told = rpc.rpc_async(
        "worker2", gated, args=(rpc.rpc_sync(OWNER, make, args=(8,)), "meanwhile")
    )
    assert wait_for(lambda: references()["user_rrefs"] == 0)
    rpc.rpc_sync("worker2", open_gate, args=("meanwhile",))
    assert told.wait() == 8


def test_a_receiver_keeps_what_its_giver_dropped(cluster):
    cluster.run(0, dropped_by_the_giver_meanwhile)


def many_taken(count):
    """How many messages say that so many references have arrived."""
    agent, sent = current.worker(), []
    call_async = agent.call_async

    def counting(to, kind, *rest):
        sent.append(kind)
        return call_async(to, kind, *rest)

    agent.call_async = counting
    try:
        rrefs = rpc.rpc_sync(OWNER, made, args=(count,))
        assert [rref.to_here() for rref in rrefs] == list(range(count))
        wait_for(lambda: agent.references.delivery.idle())
    finally:
        del agent.call_async
    return collections.Counter(sent)


def made(count):
    return [rpc.RRef(i) for i in range(count)]


def test_arrivals_are_told_together(cluster):
    told = cluster.run(0, many_taken, 200)
    assert 1 <= told["rref.accept"] <= 20
