"""Contexts of a worker whose name passes to another while they are in use."""

import numpy as np
import pytest

from jdist import autograd, rpc
from jdist.autograd.contexts import here
from jdist.autograd.engine import engine as engines
from jdist.autograd.engine.engine import LocalPass
from jdist.autograd.engine.messages import PassTerms
from jdist.autograd.recording.node import SendNode
from jdist.rpc.base import current
from jdist.rpc.base.current import NEVER
from tests.autograd.recording_cases import has, leaf, loses, numbers
from tests.rpc.rref.common import wait_for


def doubled(x):
    return 2 * x


def tripled(x):
    return 3 * x


@pytest.fixture
def group():
    with rpc.elastic_cluster("worker0", allow=["tests"]) as join:
        join("worker1")
        yield join


def replace(join):
    """Another "worker1"; the one before is gone."""
    before = current.worker().directory.find("worker1")
    with rpc.use_worker("worker1"):
        rpc.shutdown(graceful=False)
    assert wait_for(lambda: before.departed is not None)
    join("worker1")
    assert current.worker().directory.find("worker1") is not before


def test_gradients_flow_to_the_worker_that_has_the_value(group):
    """Those for its predecessor are not sent to it, and are missed by name."""
    x = leaf(1)
    with autograd.context() as context_id:
        first = rpc.rpc_sync("worker1", doubled, args=(x,))
        replace(group)
        second = rpc.rpc_sync("worker1", tripled, args=(x,))
        assert rpc.rpc_sync("worker1", has, args=(context_id,))
        cotangent = numbers(5)
        autograd.backward(context_id, [second], cotangents=[cotangent])
        found = autograd.get_gradients(context_id)[x]
        np.testing.assert_array_equal(found, 3 * cotangent)
        with pytest.raises(rpc.WorkerLost, match="Lost worker 'worker1' during"):
            autograd.backward(context_id, [first], cotangents=[cotangent])
        np.testing.assert_array_equal(autograd.get_gradients(context_id)[x], found)
        assert autograd.current_context().known_workers() == {"worker1"}
        assert len(autograd.current_context().known_incarnations()) == 2
    with rpc.use_worker("worker1"):
        assert loses(context_id)


def test_the_loss_of_a_predecessor_ends_no_pass(group):
    """Its news may come late, on another thread."""
    before = current.worker().directory.find("worker1").info
    replace(group)
    after = current.worker().directory.find("worker1").info
    assert before == after
    assert before.incarnation != after.incarnation
    with autograd.context() as context_id:
        context = autograd.retrieve_context(context_id)
        terms = PassTerms(context_id, 7, False, None)
        part = LocalPass(engines.of(here()), context, terms, NEVER)
        part._awaited = {5: SendNode(5, after, "call", (0, 0))}
        part.lost(before, "gone")
        assert part._failure is None
        part.lost(after, "gone")
        assert isinstance(part._failure.error, rpc.WorkerLost)


def test_an_end_that_a_predecessor_told_is_told_to_its_successor(group):
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", doubled, args=(leaf(1),))
        before = current.worker().directory.find("worker1").info
        replace(group)
        rpc.rpc_sync("worker1", doubled, args=(leaf(2),))
        here().releases.end([context_id], "released", before.incarnation).wait(60)
    assert not rpc.rpc_sync("worker1", has, args=(context_id,))
