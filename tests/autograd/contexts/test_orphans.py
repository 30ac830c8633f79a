"""Contexts of workers that died, and lost messages about the end of a context."""

import signal

import pytest

from jdist import autograd, rpc
from jdist.autograd.contexts import Context, here
from jdist.rpc.group.rendezvous import ReservedPort
from tests.autograd.recording_cases import (
    PATIENCE,
    add,
    contexts,
    has,
    leaf,
    loses,
    numbers,
)
from tests.rpc.conformance.test_faulty import begin as begin  # a fixture
from tests.rpc.conformance.test_faulty import struck
from tests.rpc.faults import Rule
from tests.rpc.hosts import be_no_worker, be_one_of, names, results
from tests.rpc.rref.common import wait_for

_scopes = []


def originate(fn, calls):
    """Begins a context on this process's worker, and makes calls in it."""
    _scopes.append(autograd.context())
    context_id = _scopes[-1].__enter__()
    for to, *further in calls:
        rpc.rpc_sync(to, fn, args=(leaf(1), leaf(2), *further))
    return context_id


def close():
    """Leaves the context that was begun, and waits for its end everywhere."""
    ended = autograd.current_context().release()
    _scopes.pop().__exit__(None, None, None)
    ended.wait(PATIENCE)
    return contexts()


@autograd.eager
def pass_on(x, y, *further):
    if not further:
        return autograd.apply(add, x, y)
    return rpc.rpc_sync(further[0], pass_on, args=(x, y, *further[1:]))


def knows(worker):
    return wait_for(lambda: worker in autograd.current_context().known_workers())


@pytest.fixture
def group(fresh_hosts):
    """Four processes that are workers, to be killed one after the other."""
    hosts = fresh_hosts(4)
    with ReservedPort() as port:
        ranks = range(4)
        results([hosts.start(rank, be_one_of, rank, 4, port.port) for rank in ranks])
        yield hosts
        hosts.everywhere(be_no_worker)


def test_processes_that_are_killed_leave_nothing_behind(group):
    context_id = group.run(3, originate, add, [["worker1"], ["worker2"]])
    assert group.run(1, has, context_id)
    assert group.run(2, has, context_id)
    group.signal(3, signal.SIGKILL)
    assert group.everywhere(loses, context_id) == [True] * 3

    # Who learned of it from a dead worker is told by the originator.
    context_id = group.run(0, originate, pass_on, [["worker1", "worker2"]])
    group.signal(1, signal.SIGKILL)
    assert group.run(0, knows, "worker2")
    assert group.run(2, has, context_id)
    assert group.run(0, close) == 0
    assert not group.run(2, has, context_id)

    # The hardest to lose: where the coordinator is.
    context_id = group.run(0, originate, add, [["worker2"]])
    assert group.run(2, has, context_id)
    group.signal(0, signal.SIGKILL)
    assert group.run(2, loses, context_id)
    assert group.everywhere(contexts) == [0]


def test_an_originator_that_leaves_at_once_leaves_nothing_behind():
    with rpc.local_cluster(names(2), allow=["tests"]):
        with rpc.use_worker("worker1"), autograd.context() as context_id:
            rpc.rpc_sync("worker0", add, args=(leaf(1), leaf(2)))
            assert rpc.rpc_sync("worker0", has, args=(context_id,))
            rpc.shutdown(graceful=False)
        assert loses(context_id)


def test_requests_of_a_worker_that_is_gone_make_no_context():
    """They may come late, by way of another worker."""
    with rpc.local_cluster(names(3), allow=["tests"]):
        with rpc.use_worker("worker1"), autograd.context() as context_id:
            rpc.shutdown(graceful=False)
        with rpc.use_worker("worker2"):
            assert wait_for(lambda: here().is_gone(1))
            with pytest.raises(autograd.ContextNotFound, match="made it is gone"):
                here().get_or_create(context_id)
            with pytest.raises(autograd.ContextNotFound, match="made it is gone"):
                here().get_or_create(7 << 48)
            assert contexts() == 0


def test_a_late_request_of_one_in_between_that_is_gone():
    """Nobody would tell of the end, so the originator is asked at once."""
    with rpc.local_cluster(names(3), allow=["tests"]):
        with rpc.use_worker("worker1"):
            rpc.shutdown(graceful=False)
        with autograd.context() as context_id:
            with rpc.use_worker("worker2"):
                assert wait_for(lambda: here().is_gone(1))
                late = here().get_or_create(context_id)
                here().releases.seek_end([late])
            assert knows("worker2")
        with rpc.use_worker("worker2"):
            assert loses(context_id)
            late = Context(context_id + 1, here())
            here()._contexts[late.id] = late
            here().releases.seek_end([late])
            assert loses(late.id)


def test_one_in_between_that_goes_before_it_passes_the_end_on():
    """A worker that waited for it in vain learns the end from the originator."""
    with rpc.local_cluster(names(3), allow=["tests"]):
        with autograd.context() as context_id:
            rpc.rpc_sync("worker1", pass_on, args=(leaf(1), leaf(2), "worker2"))
            with rpc.use_worker("worker1"):
                autograd.retrieve_context(context_id).known.pop(2)
            autograd.retrieve_context(context_id).release().wait(PATIENCE)
        with rpc.use_worker("worker2"):
            assert has(context_id)
            with rpc.use_worker("worker1"):
                rpc.shutdown(graceful=False)
            assert loses(context_id)


def test_at_the_end_of_a_worker_its_contexts_end():
    with rpc.local_cluster(names(1), allow=["tests"]):
        kept = here()
        with autograd.context() as context_id:
            found = autograd.current_context()
            rpc.shutdown(graceful=False)
            assert kept.find(context_id) is None
    assert found.ended == "RPC was shut down on this worker."


# --- messages that are lost ---


def begin_and_end(patience):
    here().releases.delivery.patience = patience
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", nested_plain, args=(leaf(1), numbers(2)))
        autograd.retrieve_context(context_id).release().wait(PATIENCE)
    return context_id


def nested_plain(x, y):
    return x * y


def lose_requests():
    return [Rule("drop", "autograd.release", first=3)]


def cut_connections():
    return [Rule("close", "autograd.release", first=3)]


def truncate():
    return [Rule("truncate", "autograd.release", first=3)]


def repeat():
    return [Rule("duplicate", "autograd.release", first=3)]


@pytest.mark.parametrize("rules", [lose_requests, cut_connections, truncate, repeat])
def test_lost_messages_are_sent_again(begin, rules):
    """torch: FaultyAgent's test_context_cleanup_tensor_with_grad."""
    cluster = begin(rules)
    context_id = cluster.run(0, begin_and_end, 0.1)
    assert not cluster.run(1, has, context_id)
    assert cluster.everywhere(contexts) == [0, 0]
    if rules is not repeat:
        fault = rules()[0].fault
        assert cluster.run(0, struck)[fault, "autograd.release"] == 3
