"""Looking for a message before sleeping: when that is done, and when it is not."""

import socket
import threading
import time
import types

import numpy as np
import pytest

from jdist.rpc.wire import stream
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.frame import Frame
from jdist.rpc.wire.stream import Polling, Stream
from tests.rpc.sockets import (
    ROUTES,
    Outcome,
    Peers,
    blocked,
    nothing_left,
    soon,
    wait_until,
)

LIMIT = 0.001
PROMPT, LATE = 0.0, 1.0


class Clock:
    """Time that passes only when somebody looks at it, or for a message."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        ticking = types.SimpleNamespace(monotonic=self.tick)
        monkeypatch.setattr(stream, "time", ticking)

    def tick(self):
        self.now += LIMIT / 100
        return self.now


class Looks:
    """Finds something at the look of this number, each of which takes its time."""

    def __init__(self, clock, found_at, seconds=0.0):
        self.clock, self.found_at, self.seconds = clock, found_at, seconds
        self.count = 0

    def __call__(self):
        self.count += 1
        self.clock.now += self.seconds
        return 7 if self.count == self.found_at else None


class Counted(Polling):
    """Counts the times that it was asked to poll."""

    __slots__ = ("polls",)

    def __init__(self, seconds):
        super().__init__(seconds)
        self.polls = 0

    def poll(self, look):
        self.polls += 1
        return super().poll(look)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def _prompt_messages_needed(tried):
    needed = 0
    while not tried.worthwhile:
        tried.slept(PROMPT)
        needed += 1
    return needed


def test_a_connection_is_polled_only_after_a_prompt_message():
    tried = Polling(LIMIT)
    assert not tried.worthwhile
    tried.slept(LATE)
    assert not tried.worthwhile
    tried.slept(2 * LIMIT)
    assert tried.worthwhile
    tried.slept(2.1 * LIMIT)
    assert not tried.worthwhile


def test_it_goes_on_while_messages_are_found(clock):
    tried = Polling(LIMIT)
    tried.slept(PROMPT)
    for found_at in (1, 5, 90):
        looks = Looks(clock, found_at)
        assert (tried.poll(looks), looks.count) == (7, found_at)
        assert tried.worthwhile


def test_it_ends_at_the_limit(clock):
    tried = Polling(LIMIT)
    tried.slept(PROMPT)
    looks = Looks(clock, found_at=0)
    begun = clock.now
    assert tried.poll(looks) is None
    assert LIMIT <= clock.now - begun <= 1.05 * LIMIT
    assert looks.count > 90


def test_each_failure_doubles_the_doubt_and_each_success_takes_one_back(clock):
    tried = Polling(LIMIT)
    needed = []
    for found_at in (0, 0, 0, 1, 0, 1, 1, 1, 1, 0):
        needed.append(_prompt_messages_needed(tried))
        tried.poll(Looks(clock, found_at))
    assert needed == [1, 2, 4, 8, 0, 8, 0, 0, 0, 0]
    assert _prompt_messages_needed(tried) == 2


def test_the_doubt_has_a_ceiling(clock):
    tried = Polling(LIMIT)
    for _ in range(40):
        tried.poll(Looks(clock, found_at=0))
    assert _prompt_messages_needed(tried) == 4096


def test_a_message_found_after_losing_the_core_counts_as_a_failure(clock):
    tried = Polling(LIMIT)
    tried.slept(PROMPT)
    assert tried.poll(Looks(clock, found_at=1, seconds=4 * LIMIT)) == 7
    assert not tried.worthwhile


def test_one_thread_polls_at_a_time():
    entered, leave = threading.Event(), threading.Event()

    def look():
        entered.set()
        return 7 if leave.wait(60) else None

    first, second = Polling(60.0), Polling(60.0)
    polls = Outcome(lambda: first.poll(look))
    assert entered.wait(60)
    assert second.poll(lambda: pytest.fail("a second one looked")) is None
    assert not second.worthwhile  # as before: nothing was learnt
    leave.set()
    assert polls.get() == 7
    assert second.poll(lambda: 8) == 8


def test_a_failing_look_ends_the_turn():
    tried = Polling(LIMIT)
    with pytest.raises(OSError, match="broken"):
        tried.poll(lambda: (_ for _ in ()).throw(OSError("broken")))
    assert tried.poll(lambda: 8) == 8


# --- on streams and channels ---


@pytest.fixture
def streams():
    with nothing_left():
        ends = [Stream(end) for end in socket.socketpair()]
        yield ends
        for end in ends:
            end.close()


def _received(stream, polling=None):
    data = memoryview(bytearray(8))
    stream.polling = polling
    return bytes(data[: stream.receive_into(data, soon())])


def test_a_stream_polls_only_while_messages_come_soon(streams):
    here, there = streams
    counted = Counted(60.0)
    for turn in range(5):
        there.send([b"%d" % turn], None)  # It is there before anybody looks.
        assert _received(here, counted) == b"%d" % turn
    assert counted.polls == 4  # The first wait is what makes the second one poll.
    there.send([b"last"], None)
    counted.slept(LATE * 600)
    assert _received(here, counted) == b"last"
    assert counted.polls == 4


def test_polling_in_vain_ends_in_sleep(streams):
    here, there = streams
    counted = Counted(1e-6)
    counted.slept(PROMPT)
    waiting = Outcome(_received, here, counted)
    wait_until(lambda: counted.polls)
    blocked(waiting.thread, Stream._receive_once)
    there.send([b"late"], None)
    assert waiting.get() == b"late"
    assert not counted.worthwhile


def test_a_thread_that_polls_learns_of_the_end(streams):
    here, there = streams
    counted = Counted(60.0)
    counted.slept(PROMPT)
    waiting = Outcome(_received, here, counted)
    wait_until(lambda: counted.polls)
    there.shut()
    with pytest.raises(ChannelClosed, match="closed"):
        waiting.get()


def test_a_deadline_holds_after_polling_in_vain(streams):
    here, _ = streams
    here.polling = counted = Counted(1e-6)
    counted.slept(PROMPT)
    with pytest.raises(TimeoutError, match="nothing was received in time"):
        here.receive_into(memoryview(bytearray(8)), time.monotonic() + 0.01)
    assert counted.polls == 1


@pytest.mark.parametrize("route", ROUTES)
def test_frames_arrive_whole_over_polled_channels(route):
    with nothing_left(), Peers(route) as peers:
        peers.here.polling = peers.there.polling = 0.01
        channel = peers.connect()
        random = np.random.default_rng(3)
        sizes = [0, 3, 70_000, 5, 1 << 20, 2]
        for number, size in enumerate(sizes * 4, start=1):
            sent = random.random(size)
            answer = channel.exchange(Frame("call", number, {}, None, [sent]), soon())
            assert answer.leaves[0].tobytes() == sent.tobytes()
