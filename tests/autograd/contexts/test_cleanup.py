"""The end of a context on all workers that took part, after errors too."""

import gc
import sys

import pytest

from jdist import autograd, rpc
from jdist.autograd.contexts import here
from tests.autograd.recording_cases import (
    PATIENCE,
    add,
    contexts,
    has,
    has_none,
    leaf,
    loses,
    name,
    nested,
    nothing,
    numbers,
)
from tests.rpc.rref.common import after_gate, close_gate, open_gate


def arguments(kind):
    if kind == "none":
        return nothing, ()
    make = leaf if kind == "recorded" else numbers
    return add, (make(1), make(2))


def call_all(kind):
    """Calls every other worker, also through another one, and ends the context."""
    fn, args = arguments(kind)
    with autograd.context() as context_id:
        for steps in (1, 2, 3):
            rpc.rpc_sync(name(steps), fn, args=args)
            assert rpc.rpc_sync(name(steps), has, args=(context_id,))
    assert not has(context_id)
    return context_id


@pytest.mark.parametrize("kind", ["recorded", "plain", "none"])
def test_all_peers_forget_it(cluster, kind):
    """torch: test_context_cleanup_tensor_{with_grad,no_grad}, _no_tensors."""
    for context_id in cluster.everywhere(call_all, kind):
        assert all(cluster.everywhere(loses, context_id))
    assert cluster.everywhere(contexts) == [0] * 4


def call_far():
    with autograd.context() as context_id:
        rpc.rpc_sync(name(1), nested, args=(leaf(1), leaf(2), 2))
        assert autograd.current_context().known_workers() == {name(1)}
    return context_id


def test_so_do_those_that_were_reached_through_others(cluster):
    """torch: test_context_cleanup_nested_rpc."""
    context_id = cluster.run(0, call_far)
    assert all(cluster.everywhere(loses, context_id))


def await_release():
    with autograd.context() as context_id:
        rpc.rpc_sync(name(1), nested, args=(leaf(1), leaf(2), 2))
        rpc.rpc_sync(name(3), nested, args=(leaf(1), leaf(2), 1))
        autograd.retrieve_context(context_id).release().wait(PATIENCE)
    return [rpc.rpc_sync(name(k), has, args=(context_id,)) for k in range(4)]


def test_the_release_can_be_awaited(cluster):
    """It is done when all have forgotten: no polling afterwards."""
    assert cluster.everywhere(await_release) == [[False] * 4] * 4


def abandon():
    """Leaves the context while calls that were made in it are under way."""
    with autograd.context() as context_id:
        plain = rpc.rpc_async(name(1), waits, args=("plain", 5))
        onward = rpc.rpc_async(name(1), calls_onward, args=("onward", leaf(1)))
        for begun in ("plain begun", "onward begun"):
            assert rpc.rpc_sync(name(1), after_gate, args=(begun, True))
    assert rpc.rpc_sync(name(1), loses, args=(context_id,))
    for gate in ("plain", "onward"):
        rpc.rpc_sync(name(1), open_gate, args=(gate,))
    with pytest.raises(autograd.ContextNotFound, match="released"):
        onward.wait(PATIENCE)
    return plain.wait(PATIENCE)


def waits(gate, value):
    open_gate(f"{gate} begun")
    return after_gate(gate, value)


@autograd.eager
def calls_onward(gate, x):
    waits(gate, None)
    return rpc.rpc_sync(name(1), add, args=(x, x))


def test_calls_under_way_do_not_bring_it_back(cluster):
    for gate in ("plain", "onward"):
        cluster.run(1, close_gate, gate)
        cluster.run(1, close_gate, f"{gate} begun")
    assert cluster.run(0, abandon) == 5
    assert cluster.everywhere(contexts) == [0] * 4


def overtaken():
    """A request comes after the end of its context did."""
    with autograd.context() as context_id:
        rpc.rpc_sync(name(1), nothing)
    assert rpc.rpc_sync(name(1), loses, args=(context_id,))
    return context_id


def revive(context_id):
    with pytest.raises(autograd.ContextNotFound, match=f"{context_id}.*released"):
        here().get_or_create(context_id)
    return contexts()


def test_a_request_that_was_overtaken_by_the_end_makes_no_context(cluster):
    context_id = cluster.run(0, overtaken)
    assert cluster.run(1, revive, context_id) == 0


def many():
    for _ in range(300):
        with autograd.context():
            rpc.rpc_sync(name(1), add, args=(leaf(1), leaf(2)))
    return has_none()


def test_many_from_everywhere_at_once(cluster):
    assert all(cluster.everywhere(many))
    assert all(cluster.everywhere(has_none))


def test_the_ends_of_contexts_that_were_left_are_told_once(threads, monkeypatch):
    """After the block, without a call of their own to wait for."""
    told, left = [], []
    agent = here().agent
    call = agent.call_async

    def note(to, kind, body, *rest):
        if kind == "autograd.release":
            told.extend((to.name, one) for one in body[-1])
        return call(to, kind, body, *rest)

    monkeypatch.setattr(agent, "call_async", note)
    for to in ("worker1", "worker1", "worker0"):
        with autograd.context() as context_id:
            rpc.rpc_sync(to, nothing)
        left.append(context_id)
    assert not any(map(has, left))
    with rpc.use_worker("worker1"):
        assert all(map(loses, left))
    # Once, unless an answer was late and the message was sent again.
    assert list(dict.fromkeys(told)) == [("worker1", one) for one in left[:2]]


def failing():
    raise ValueError("planted")


def test_a_context_in_which_a_call_failed_ends_too(threads):
    with (
        autograd.context() as context_id,
        pytest.raises(ValueError, match="planted"),
    ):
        rpc.rpc_sync("worker1", failing)
    with rpc.use_worker("worker1"):
        assert loses(context_id)


def contexts_in_turn(count, calls):
    x = leaf(1)
    for turn in range(count):
        with autograd.context() as context_id:
            if turn % (count // calls) == 0:
                rpc.rpc_sync("worker1", add, args=(x, x))
                autograd.retrieve_context(context_id).release().wait(PATIENCE)


def test_ten_thousand_contexts_leave_nothing(threads):
    contexts_in_turn(5000, calls=50)
    gc.collect()
    before = sys.getallocatedblocks()
    contexts_in_turn(10_000, calls=500)
    gc.collect()
    assert contexts() == 0
    # Less than one block for ten contexts, whatever else the process does meanwhile.
    assert sys.getallocatedblocks() - before < 1000
