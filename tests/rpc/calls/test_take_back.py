"""Taking a call back, over another channel than that on which it travels."""

import threading

import numpy as np
import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.calls.callee import TAKE_BACK
from jdist.rpc.wire.frame import CALL

PATIENCE = 60
TICKET = 1 << 40  # Beyond those that a worker gives by itself.
_ran: list = []
_begun = threading.Semaphore(0)


def note(x):
    _ran.append(x)
    return x


def ran():
    return list(_ran)


@rpc.async_execution
def wait_for_ever():
    _begun.release()
    return rpc.Future()


def await_begun():
    assert _begun.acquire(timeout=PATIENCE)


def body(function, *args):
    return function, args, {}


def early(word):
    """The request to take a call back overtakes it."""
    agent = current.worker()
    agent.call("worker1", TAKE_BACK, TICKET)
    with pytest.raises(rpc.RpcTimeout, match="not begun: 'worker0' gave up the call"):
        agent.call("worker1", CALL, body(note, word), meta={"ticket": TICKET})
    assert word not in rpc.rpc_sync("worker1", ran)
    again = agent.call("worker1", CALL, body(note, word), meta={"ticket": TICKET + 1})
    assert (again, word in rpc.rpc_sync("worker1", ran)) == (word, True)


def test_a_call_that_comes_after_it_was_taken_back_does_not_begin(cluster):
    cluster.run(0, early, f"early {cluster.kind}")


@pytest.mark.parametrize("ticket", ["x", None, 1.0, True, np.arange(3.0), [1]])
def test_what_is_no_ticket(cluster, ticket):
    with pytest.raises(rpc.ProtocolError, match="A ticket is a number"):
        cluster.run(0, take_back, ticket)


def begun(ticket):
    agent = current.worker()
    call = body(wait_for_ever)
    future = agent.call_async("worker1", CALL, call, 0, {"ticket": ticket})
    rpc.rpc_sync("worker1", await_begun)
    return future


def others(ticket):
    """Nobody takes back what somebody else has begun, or what has another ticket."""
    future = begun(ticket)
    current.worker().call("worker1", TAKE_BACK, ticket + 1)
    rpc.rpc_sync("worker2", take_back, args=(ticket,))
    assert not future.done()
    current.worker().call("worker1", TAKE_BACK, ticket)
    with pytest.raises(rpc.RpcTimeout, match="'worker0' gave up the call"):
        future.wait(PATIENCE)


def take_back(ticket):
    current.worker().call("worker1", TAKE_BACK, ticket)


def test_only_the_caller_takes_a_call_back(cluster):
    cluster.run(0, others, TICKET + 2)
