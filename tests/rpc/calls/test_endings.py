"""Calls that end from two sides at once, and ends that wait no longer than they may."""

import threading
import time
from types import SimpleNamespace

import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.base.current import NEVER, Deadline, Operation
from jdist.rpc.base.ids import GloballyUniqueId
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.worker_info import PeerRecord, WorkerInfo
from jdist.rpc.calls.outstanding_calls import Outgoing, SyncCall
from jdist.rpc.calls.peers import Peer
from jdist.rpc.group import lifecycle, termination
from jdist.rpc.group.coordinator import Coordinator
from jdist.rpc.group.membership import Member
from jdist.rpc.rref.messages import Delete
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.frame import CANCEL, REPLY, Frame
from jdist.rpc.wire.shared_connection import SharedConnection
from tests.rpc.hosts import names
from tests.rpc.sockets import wait_until

PATIENCE = 60
INFO = WorkerInfo("worker1", 1, 1)


class Channel:
    """Answers every request at once, and notes why it was closed."""

    peer = "worker1"

    def __init__(self):
        self.reason = None
        self.before_answer = lambda: None

    def exchange(self, frame, deadline=None):
        self.before_answer()
        if self.reason is not None:
            raise ChannelClosed(self.reason)
        return Frame(REPLY, frame.id, {}, None, [])

    def usable(self):
        return self.reason is None

    def close(self, reason="closed"):
        self.reason = self.reason or reason


class Transport:
    """Connects to nothing but such channels."""

    def __init__(self):
        self.channels = []

    def connect(self, peer, address, deadline):
        self.channels.append(Channel())
        return self.channels[-1]

    def abandon(self, peer, reason):
        for channel in self.channels:
            channel.close(reason)


@pytest.fixture
def pool():
    made = ThreadPool("pool", 1)
    yield made
    assert made.close(PATIENCE) == []


@pytest.fixture
def peer(pool):
    return Peer(PeerRecord(INFO, "worker1", None), Transport(), pool)


REQUEST = ("call", {}, None, [])


def call(peer):
    return SyncCall(Outgoing(peer, "test", None, {}, NEVER, Operation("test")), None)


def test_a_call_that_is_given_up_late_closes_no_other_calls_connection(peer):
    first = call(peer)
    first.run(*REQUEST)
    (channel,) = peer._transport.channels
    second = call(peer)
    peer.take(second, NEVER)  # the connection that the first one gave back
    first.give_up("too late")
    assert channel.reason is None
    second.give_up("in time")
    assert channel.reason == "in time"
    assert len(peer._transport.channels) == 1


def test_a_call_that_is_given_up_while_it_waits_is_cut(peer):
    waiting = call(peer)
    connected = peer._transport.connect

    def connect(*arguments):
        channel = connected(*arguments)
        channel.before_answer = lambda: waiting.give_up("no use for it")
        return channel

    peer._transport.connect = connect
    with pytest.raises(ChannelClosed, match="no use for it"):
        waiting.run(*REQUEST)
    waiting.release("it ended")
    assert peer._idle == []


def test_nothing_is_given_back_to_a_worker_that_is_gone(peer):
    waiting = call(peer)
    peer.take(waiting, NEVER)
    peer.close("it left")
    assert peer.give(waiting) is None
    assert (peer._idle, waiting.connection) == ([], None)
    assert [channel.reason for channel in peer._transport.channels] == ["it left"]


def test_cancelling_at_a_peer_that_does_not_read_ends(pool):
    """On whatever thread: without one of the pool it is the timer's."""
    sent, closed = [], threading.Event()

    class Full:
        def send(self, frame, deadline=None):
            sent.append((frame.kind, deadline))
            if frame.kind == CANCEL:
                raise TimeoutError("the peer did not read in time")

        def receive(self, deadline=None):
            assert closed.wait(PATIENCE)
            raise ChannelClosed("closed")

        def read(self, reader):
            reader.read(self.receive)

        def close(self, reason=""):
            closed.set()

    shared = SharedConnection(Full(), pool)
    pending = SimpleNamespace(deadline=NEVER)
    number = shared.submit(pending, "call", {}, None, [])
    begun = time.monotonic()
    assert shared.withdraw(number)
    wait_until(lambda: len(sent) == 2)
    kind, deadline = sent[-1]
    assert kind == CANCEL
    assert begun < deadline < time.monotonic() + 10.0
    shared._send_cancel(number)  # raises nothing
    shared.close("the end")


# --- time ---


def test_deadlines_are_kept_with_every_worker_that_is_not_gone():
    """Also with one that is about to join, and with one that has a successor."""
    with rpc.local_cluster(names(1)):
        agent = current.worker()
        looked = []

        def known(name, rank, incarnation):
            record = PeerRecord(WorkerInfo(name, rank, incarnation), name, None)
            found = agent.peer(record)
            found.expire = lambda now: looked.append(incarnation)
            agent.directory.know(found)
            return found

        known("coming", 1, 501)
        known("again", 2, 502)
        known("again", 2, 503)
        known("gone", 3, 504).close("it left")
        agent._expire(time.monotonic())
        assert looked == [501, 502, 503]
        for incarnation in looked:
            agent.directory.of_incarnation(incarnation).close("the test ended")


def test_the_look_for_one_sided_calls_keeps_the_deadline():
    asked = []

    def call(name, kind, body, timeout):
        asked.append(timeout)
        raise rpc.RpcError("it is gone")

    served = SimpleNamespace(peer="worker1", deadline=NEVER, has_answer=False)
    outstanding = SimpleNamespace(sent=lambda: [served], served=list)
    agent = SimpleNamespace(outstanding=outstanding, call=call)
    calls = termination._OneSidedCalls(agent)
    for deadline in (
        NEVER,
        Deadline(time.monotonic() + 1.0, 1.0),
        Deadline(time.monotonic() - 1.0, 1.0),
    ):
        calls.look(deadline)
    without, short, over = asked
    assert without == termination._ANSWER_SECONDS
    assert 0 < short <= 1.0
    assert 0 < over <= 0.01  # 0 would be no limit


def test_an_end_that_is_interrupted_at_once_closes_the_worker(monkeypatch):
    closed = []
    references = SimpleNamespace(close=lambda: closed.append("references"))
    agent = SimpleNamespace(
        info=INFO, references=references, close=lambda: closed.append("worker")
    )

    def interrupt(of):
        raise KeyboardInterrupt("pressed")

    monkeypatch.setattr(lifecycle, "client_of", interrupt)
    with pytest.raises(KeyboardInterrupt, match="pressed"):
        lifecycle._end(agent, 0.0)
    assert closed == ["references", "worker"]


def test_a_release_ends_when_the_last_owner_is_gone(monkeypatch):
    """It does not wait for the answer to a message that has no receiver any more."""
    with rpc.local_cluster(names(2)):
        references = current.worker().references
        with rpc.use_worker("worker1"):
            other = current.worker().info.incarnation
        monkeypatch.setattr(references.agent.pool, "run", lambda task: None)
        one = GloballyUniqueId(other, 1)
        references.delivery.send_all(other, [references._letter(Delete(one, one))])
        releasing = threading.Thread(target=references.release, args=(NEVER, 600.0))
        releasing.start()
        wait_until(lambda: references._changed._waiters)
        references.delivery.forget(other)
        releasing.join(PATIENCE)
        assert not releasing.is_alive()
        monkeypatch.undo()


@pytest.mark.parametrize("left", [True, False])
def test_what_a_worker_says_after_it_left_does_not_close_its_channel(pool, left):
    """It waits for the others to note its leave; one that was given up is closed."""
    channel = Channel()
    member = Member(INFO, None, channel, pool)
    member.gone, member.left = "it has left the group", left
    beat = Frame("group.beat", 1, {}, None, [])
    if left:
        Coordinator._answer(None, member, beat)
    else:
        with pytest.raises(ChannelClosed, match="it has left the group"):
            Coordinator._answer(None, member, beat)
    assert channel.reason is None
    assert not member._outbox
