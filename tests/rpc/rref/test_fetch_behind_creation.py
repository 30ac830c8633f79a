"""A fetch right behind its creation: same connection, same thread, same errors."""

import re
import threading

import jax
import numpy as np
import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.calls.callee import AFTER, Execution
from jdist.rpc.rref import fetch
from jdist.rpc.wire.frame import ANSWERS, Frame
from jdist.rpc.wire.shared_connection import SharedConnection
from tests.rpc.hosts import names
from tests.rpc.rref.common import (
    NOTHING,
    after_gate,
    close_gate,
    fail,
    open_gate,
    wait_for,
    wait_for_references,
)

PATIENCE = 60
_threads = {}


@jax.tree_util.register_pytree_node_class
class Witness:
    """Notes which thread makes it, and which one encodes it."""

    def __init__(self, number):
        self.number = number
        _threads["made"] = threading.get_ident()

    def tree_flatten(self):
        _threads["encoded"] = threading.get_ident()
        return (self.number,), None

    @classmethod
    def tree_unflatten(cls, static, children):
        made = object.__new__(cls)
        (made.number,) = children
        return made


def served():
    return current.worker().outstanding.served()


def followed():
    """Whether a request waits for the thread of a call that this worker executes."""
    return any(execution._followers for execution in served())


def value_once_followed(number):
    assert wait_for(followed)
    return Witness(number)


def unsendable_once_followed():
    assert wait_for(followed)
    return threading.Lock()


def fail_once_followed():
    assert wait_for(followed)
    fail("made on purpose")


@pytest.fixture(scope="module", autouse=True)
def workers():
    with rpc.local_cluster(names(2), allow=["tests"]):
        # From here on the shared connection is open.
        assert rpc.rpc_async("worker1", divmod, args=(7, 2)).wait() == (3, 1)
        yield


def pooled_connections():
    peer = current.worker().directory.find("worker1")
    return len(peer._idle)


def test_the_thread_that_creates_the_value_answers_the_fetch():
    before = pooled_connections()
    made = rpc.remote("worker1", value_once_followed, args=(12,))
    assert made.to_here().number == 12
    assert _threads["encoded"] == _threads["made"]
    assert pooled_connections() == before
    assert made.confirmed_by_owner()
    assert made.creation().done()


def answers_sent(monkeypatch, agent):
    """The kinds of the answers that a worker sends."""
    # Not of what earlier tests have dropped.
    wait_for_references(**NOTHING)
    assert wait_for(current.worker().references.delivery.idle)
    sent = []
    for channel in list(agent._transport._channels):
        send = channel.send

        def noting(frame, deadline=None, send=send):
            if frame.kind in ANSWERS:
                sent.append(frame.kind)
            send(frame, deadline)

        monkeypatch.setattr(channel, "send", noting, raising=False)
    return sent


def test_the_creation_is_answered_first(monkeypatch):
    with rpc.use_worker("worker1"):
        other = current.worker()
    sent = answers_sent(monkeypatch, other)
    made = rpc.remote("worker1", value_once_followed, args=(12,))
    assert made.to_here().number == 12
    assert made.creation().done()
    assert sent == ["reply", "reply"]
    waiting = current.worker().outstanding
    assert wait_for(lambda: not (waiting.sent() or waiting.served()))
    with rpc.use_worker("worker1"):
        assert wait_for(lambda: not served())


def test_a_creation_is_answered_although_its_fetch_fails(monkeypatch):
    with rpc.use_worker("worker1"):
        other = current.worker()
    sent = answers_sent(monkeypatch, other)
    made = rpc.remote("worker1", unsendable_once_followed)
    with pytest.raises(TypeError, match="must be made of scalars"):
        made.to_here()
    assert made.creation().done()
    assert sent == ["reply", "error"]


def test_what_the_function_raised_comes_with_the_fetch():
    made = rpc.remote("worker1", fail_once_followed)
    with pytest.raises(ValueError, match="made on purpose"):
        made.to_here()


def test_a_fetch_of_what_is_created_later_holds_no_thread():
    """A future stands for the value: its function has ended, and so has its thread."""
    close_gate("later")
    made = rpc.remote("worker1", later, args=("later", np.arange(5)))
    fetched = []
    fetching = threading.Thread(
        target=lambda: fetched.append(_as_worker0(made.to_here))
    )
    fetching.start()
    with rpc.use_worker("worker1"):
        assert wait_for(lambda: len(served()) == 3)  # and the call of `later` itself
        assert wait_for(lambda: not followed())
    assert not fetched
    open_gate("later")
    fetching.join(PATIENCE)
    np.testing.assert_array_equal(fetched[0], np.arange(5))


@rpc.async_execution
def later(gate, value):
    return rpc.rpc_async("worker1", after_gate, args=(gate, value))


def _as_worker0(function):
    with rpc.use_worker("worker0"):
        return function()


def test_behind_a_request_of_another_connection_nothing_waits(monkeypatch):
    """Its number belongs to another request there, which may take for ever."""
    close_gate("held")
    made = rpc.remote("worker1", after_gate, args=("held", 3))
    sent = []
    submit = SharedConnection.submit

    def noting(self, pending, kind, meta, tree, leaves):
        if kind == fetch.FETCH:
            sent.append(meta.get(AFTER))
        return submit(self, pending, kind, meta, tree, leaves)

    monkeypatch.setattr(SharedConnection, "submit", noting)
    asked, made._asked = made._asked, made._asked._replace(shared=None)
    for submitted, after in ((made._asked, None), (asked, asked.number)):
        made._asked = submitted
        with pytest.raises(rpc.RpcTimeout, match="to_here"):
            made.to_here(timeout=0.05)
        assert sent.pop() == after
    open_gate("held")
    assert made.to_here() == 3


@pytest.mark.parametrize("after", ["itself", [1], -1, None])
def test_a_request_behind_none_that_is_executed_is_served(after):
    agent = current.worker()
    numbers = agent.directory.find("worker1").shared._numbers
    if after == "itself":
        # Of an `itertools.count`, which cannot be copied from Python 3.14 on.
        after = int(re.search(r"\d+", repr(numbers))[0])
    told = agent.call_async("worker1", "debug.activity", None, meta={AFTER: after})
    assert told.wait(PATIENCE) == ""


def test_an_interrupt_gives_the_fetch_up(monkeypatch):
    close_gate("interrupted")
    made = rpc.remote("worker1", after_gate, args=("interrupted", 3))

    def interrupt(future, until):
        raise KeyboardInterrupt("pressed")

    with monkeypatch.context() as patched:
        patched.setattr(fetch, "await_done", interrupt)
        with pytest.raises(KeyboardInterrupt, match="pressed"):
            made.to_here()
    waiting = {str(call.operation) for call in current.worker().outstanding.sent()}
    assert waiting == {"remote(after_gate)"}
    with rpc.use_worker("worker1"):
        fetches = [e for e in served() if e.operation.verb == fetch.FETCH]
        assert wait_for(lambda: all(e.cancelled for e in fetches))
    open_gate("interrupted")
    assert made.to_here() == 3


def test_a_fetch_that_is_given_up_does_not_wait_for_the_creation():
    close_gate("endless")
    made = rpc.remote("worker1", after_gate, args=("endless", 3), timeout=0)
    found = []

    def to_here():
        with pytest.raises(rpc.RpcTimeout, match="given up on purpose"):
            _as_worker0(lambda: made.to_here(timeout=0))
        found.append(made.creation().done())

    def fetches():
        sent = current.worker().outstanding.sent()
        return [call for call in sent if call.operation.verb == "to_here"]

    fetching = threading.Thread(target=to_here)
    fetching.start()
    try:
        assert wait_for(lambda: any(call.submitted for call in fetches()))
        fetches()[0].give_up("given up on purpose")
        assert wait_for(lambda: found)
    finally:
        open_gate("endless")
        fetching.join(PATIENCE)
    assert found == [False]
    assert made.to_here() == 3


def test_nothing_follows_a_call_whose_thread_is_done():
    with rpc.use_worker("worker1"):
        agent = current.worker()
        frame = Frame("call", 1, {}, None, [])
        execution = Execution(agent.info, frame, agent.pool)
    served_next = []
    assert execution.follow(lambda: served_next.append(1))
    for serve in execution.followed():
        serve()
    assert not execution.follow(lambda: served_next.append(2))
    assert (served_next, execution.followed()) == ([1], [])
