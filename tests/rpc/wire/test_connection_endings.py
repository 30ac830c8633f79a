"""When a connection runs out of time, loses its peer, is closed or interrupted."""

import itertools
import time

import numpy as np
import pytest

from jdist.rpc.wire.channel import ChannelClosed, NotSent
from jdist.rpc.wire.connection import Connection, Terms
from jdist.rpc.wire.frame import PREFIX_BYTES, pack
from jdist.rpc.wire.stream import Stream
from tests.rpc.sockets import (
    Outcome,
    blocked,
    call,
    closed_by_peer,
    connected_pair,
    interrupted_in,
    nothing_left,
    raw_pair,
    soon,
)


@pytest.fixture(autouse=True)
def _leaks_nothing():
    with nothing_left():
        yield


@pytest.fixture
def pair():
    with connected_pair() as ends:
        yield ends


@pytest.fixture
def raw():
    with raw_pair() as ends:
        yield ends


def _bytes(frame):
    return b"".join(pack(frame))


# --- the peer has gone ---


def test_what_a_peer_sent_before_it_closed_is_read(pair):
    """Also by a thread that begins to read after another one could not send."""
    left, right = pair
    for number in (1, 2):
        right.send(call(number, np.arange(number)))
    right.close("done")
    for number in (3, 4):
        with pytest.raises(NotSent, match="its connection broke"):
            left.send(call(number))
    assert [left.receive(soon()).id for _ in range(2)] == [1, 2]
    with pytest.raises(ChannelClosed, match="its connection closed"):
        left.receive(soon())


# --- deadlines ---


def test_a_timeout_between_frames_harms_nothing(pair):
    """The channel is as good as before."""
    left, right = pair
    for number in (1, 2, 3):
        with pytest.raises(TimeoutError, match="nothing was received in time"):
            right.receive(time.monotonic() + 0.01)
        left.send(call(number, np.arange(number)))
        assert right.receive(soon()).id == number
    with pytest.raises(TimeoutError, match="nothing was received in time"):
        right.receive(time.monotonic() - 1.0)
    left.send(call(4))
    assert right.receive(None).id == 4


@pytest.mark.parametrize("part", [1, PREFIX_BYTES, PREFIX_BYTES + 5, -1])
def test_a_timeout_within_a_frame_closes(raw, part):
    """In the prefix, the header or the body: what follows could not be understood."""
    ours, theirs = raw
    theirs.sendall(_bytes(call(1, np.arange(10_000)))[:part])
    with pytest.raises(TimeoutError, match="nothing was received in time"):
        ours.receive(time.monotonic() + 0.05)
    with pytest.raises(
        ChannelClosed, match="the deadline passed in the middle of a fr"
    ):
        ours.receive(soon())
    closed_by_peer(theirs)


def test_a_peer_that_stops_within_a_frame():
    """Without a deadline of the receiver's the stall limit ends it."""
    with raw_pair(Terms(stall=0.05)) as (ours, theirs):
        theirs.sendall(_bytes(call(1, np.arange(10_000)))[:-1])
        message = "nothing came for 0.05 s in the middle of a frame"
        with pytest.raises(ChannelClosed, match=message):
            ours.receive()
        closed_by_peer(theirs)


def test_a_timeout_within_a_sent_frame_closes(raw):
    """The peer reads nothing and the frame does not fit the socket's buffer."""
    ours, theirs = raw
    with pytest.raises(TimeoutError, match="the peer did not read in time"):
        ours.send(call(1, np.zeros(1 << 20)), time.monotonic() + 0.05)
    with pytest.raises(
        ChannelClosed, match="a frame was cut off: the peer did not read"
    ):
        ours.send(call(2))
    closed_by_peer(theirs)


def _fill(connection):
    """Sends until nothing fits the socket's buffer; how many frames did."""
    for number in itertools.count():
        deadline = time.monotonic() + 0.05
        try:
            connection.send(call(number + 1, np.arange(100)), deadline)
        except TimeoutError:
            return number


def test_a_timeout_before_a_sent_frame_harms_nothing(pair):
    """The buffer is full of whole frames; once they are read, sending goes on."""
    left, right = pair
    number = _fill(left)
    received = [right.receive(soon()).id for _ in range(number)]
    assert received == list(range(1, number + 1))
    left.send(call(number + 1))
    assert right.receive(soon()).id == number + 1


def test_waiting_for_another_sender_has_a_deadline(pair):
    """The one before does not get rid of his frame."""
    left, right = pair
    sending = Outcome(left.send, call(1, np.arange(1 << 20)))
    blocked(sending.thread, Stream._wait_for_room)
    with pytest.raises(TimeoutError, match="another thread was still sending"):
        left.send(call(2), time.monotonic() + 0.01)
    reading = Outcome(left.receive)
    blocked(reading.thread, Connection._next)
    with pytest.raises(TimeoutError, match="another thread was still receiving"):
        left.receive(time.monotonic() + 0.01)
    assert right.receive(soon()).id == 1
    sending.get()
    right.send(call(1))
    assert reading.get().id == 1


# --- ending ---


def test_close_wakes_everybody_with_the_reason(pair):
    """Who receives, who sends, and who waits to send."""
    left, _ = pair
    receiving = Outcome(left.receive)
    sending = [Outcome(left.send, call(n, np.zeros(1 << 20))) for n in (1, 2)]
    blocked(receiving.thread, Connection._next)
    for sender in sending:
        blocked(sender.thread, Connection.send)
    left.close("the tide went out")
    for thread in (receiving, *sending):
        with pytest.raises(ChannelClosed, match="the tide went out"):
            thread.get()
    left.close("too late")
    with pytest.raises(ChannelClosed, match="the tide went out"):
        left.exchange(call(3))
    assert repr(left) == "<Connection to 'left', closed: the tide went out>"


def test_close_by_many_threads(pair):
    """The socket is given back once, whoever is inside."""
    left, right = pair
    closed = []
    left._on_close = closed.append
    receiving = Outcome(left.receive)
    for thread in [Outcome(left.close, f"by {n}") for n in range(8)]:
        thread.get()
    with pytest.raises(ChannelClosed, match=r"by \d"):
        receiving.get()
    assert closed == [left]
    with pytest.raises(ChannelClosed, match="its connection closed"):
        right.receive(soon())


@pytest.mark.parametrize("part", [0, 1, PREFIX_BYTES, PREFIX_BYTES + 5, -1])
def test_the_peer_goes_away(raw, part):
    """Between frames and within one, the reason is the same."""
    ours, theirs = raw
    theirs.sendall(_bytes(call(1, np.arange(10_000)))[:part])
    theirs.close()
    with pytest.raises(ChannelClosed, match="its connection closed"):
        ours.receive(soon())
    with pytest.raises(ChannelClosed, match="its connection closed"):
        ours.send(call(1))


def test_sending_to_a_peer_that_is_gone(raw):
    """The system's own words are kept."""
    ours, theirs = raw
    theirs.close()
    with pytest.raises(ChannelClosed, match=r"its connection broke .*Broken pipe"):
        ours.send(call(1))


def test_frames_before_the_end_are_received(pair):
    """Closing after sending loses nothing."""
    left, right = pair
    for number in range(1, 20):
        left.send(call(number, np.arange(number)))
    left.close()
    for number in range(1, 20):
        assert right.receive(soon()).id == number
    with pytest.raises(ChannelClosed, match="its connection closed"):
        right.receive(soon())


@pytest.mark.parametrize("part", [0, -1])
def test_an_interrupt_closes(raw, part):
    """Ctrl-C while receiving: what came and was not counted is lost."""
    ours, theirs = raw
    theirs.sendall(_bytes(call(1, np.arange(10_000)))[:part])
    interrupted = interrupted_in(Stream._receive_once)
    with interrupted, pytest.raises(KeyboardInterrupt, match=r"^$"):
        ours.receive(soon())
    with pytest.raises(ChannelClosed, match="receiving was interrupted"):
        ours.receive()
    closed_by_peer(theirs)


def test_an_interrupt_of_a_sender_closes(raw):
    """A part of the frame is under way."""
    ours, theirs = raw
    interrupted = interrupted_in(Stream._wait_for_room)
    with interrupted, pytest.raises(KeyboardInterrupt, match=r"^$"):
        ours.send(call(1, np.arange(1 << 20)), soon())
    with pytest.raises(ChannelClosed, match="sending was interrupted"):
        ours.send(call(2))
    closed_by_peer(theirs)
