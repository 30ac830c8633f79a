"""The fault injector itself: every fault happens when it should, and only then."""

import threading
import time
from collections import Counter

import numpy as np
import pytest

from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.frame import Frame
from jdist.rpc.wire.in_process import Hub, InProcessTransport
from jdist.rpc.wire.socket_transport import SocketTransport
from tests.rpc.faults import ANY, FaultyTransport, Plan, Rule
from tests.rpc.sockets import KEY, PATIENCE, call, echo, nothing_left, soon


@pytest.fixture(autouse=True)
def _leaks_nothing():
    with nothing_left():
        yield


@pytest.fixture(params=["socket", "in-process"])
def connect(request):
    """`connect(plan_here, plan_there)`: a channel to an echo, faulty on both sides."""
    made = []

    def make(here=None, there=None, on_channel=echo):
        if request.param == "socket":
            inner = [SocketTransport(name, KEY) for name in ("here", "there")]
        else:
            hub = Hub()
            inner = [InProcessTransport(name, hub) for name in ("here", "there")]
        plans = (here or Plan(), there or Plan())
        made.extend(map(FaultyTransport, inner, plans))
        made[1].serve(on_channel)
        return made[0].connect("there", made[1].address, soon())

    yield make
    for transport in made:
        transport.close()


def _sends(channel, *numbers, kind="call"):
    for number in numbers:
        channel.send(call(number, np.arange(number), kind=kind), soon())


def _receives(channel, count):
    return [channel.receive(soon()).id for _ in range(count)]


def test_without_a_rule_nothing_happens(connect):
    """All transports work behind it as before."""
    plan = Plan(Rule("drop", "other"))
    channel = connect(plan)
    assert channel.peer == "there"
    for number in (1, 2, 3):
        answer = channel.exchange(call(number, np.arange(number)), soon())
        assert answer.id == len(answer.leaves[0]) == number
    assert plan.counts == Counter()


def test_the_first_are_dropped(connect):
    """So many of one kind, after some that go unharmed; other kinds are not counted."""
    plan = Plan(Rule("drop", "call", first=2, skip=1))
    channel = connect(plan)
    _sends(channel, 1)
    _sends(channel, 2, kind="other")
    _sends(channel, 3, 4, 5)
    assert _receives(channel, 3) == [1, 2, 5]
    assert plan.counts == {("drop", "call"): 2}


def test_a_dropped_answer_is_waited_for_in_vain(connect):
    """The next request gets its own."""
    plan = Plan(Rule("drop", "reply", first=1))
    channel = connect(there=plan)
    with pytest.raises(TimeoutError, match=r"received in time|arrived in time"):
        channel.exchange(call(1), time.monotonic() + 0.05)
    assert channel.exchange(call(2), soon()).id == 2
    assert plan.counts == {("drop", "reply"): 1}


def test_a_request_sent_twice_runs_once(connect):
    """The receiving channel ignores the second."""
    plan = Plan(Rule("duplicate", ANY))
    ran = []

    def count(channel):
        try:
            while True:
                frame = channel.receive()
                ran.append(frame.id)
                channel.send(Frame("reply", frame.id, {}, None, []))
        except ChannelClosed:
            channel.close()

    channel = connect(plan, on_channel=count)
    for number in (1, 2, 3):
        assert channel.exchange(call(number), soon()).id == number
    assert ran == [1, 2, 3]
    assert plan.counts == {("duplicate", "call"): 3}


def test_an_answer_sent_twice_is_taken_once(connect):
    """The second is stale by the next request."""
    channel = connect(there=Plan(Rule("duplicate", "reply")))
    for number in (1, 2, 3):
        assert channel.exchange(call(number), soon()).id == number


def test_a_frame_waits_for_an_event(connect):
    """Later ones overtake it."""
    release = threading.Event()
    plan = Plan(Rule("delay", "call", first=1, until=release))
    channel = connect(plan)
    _sends(channel, 1, 2, 3)
    assert _receives(channel, 2) == [2, 3]
    release.set()
    assert _receives(channel, 1) == [1]


def test_a_frame_waits_for_some_time(connect):
    """It comes in the end."""
    channel = connect(Plan(Rule("delay", "call", first=1, until=0.05)))
    _sends(channel, 1, 2)
    assert sorted(_receives(channel, 2)) == [1, 2]


def test_a_frame_that_waits_for_ever_ends_with_its_transport(connect):
    """The fixture counts the threads."""
    channel = connect(Plan(Rule("delay", "call", until=threading.Event())))
    _sends(channel, 1, 2)


def test_a_frame_delayed_beyond_its_channel(connect):
    """It is lost, without an error in the thread that would send it."""
    release = threading.Event()
    channel = connect(Plan(Rule("delay", "call", until=release)))
    _sends(channel, 1)
    channel.close()
    release.set()


def test_the_channel_closes_instead(connect):
    """Both sides learn it; a new channel works."""
    channel = connect(Plan(Rule("close", "call", skip=1, first=1)))
    assert channel.exchange(call(1), soon()).id == 1
    with pytest.raises(ChannelClosed, match="closed by a fault"):
        channel.exchange(call(2), soon())
    with pytest.raises(ChannelClosed, match="closed by a fault"):
        channel.send(call(3))


def test_a_frame_is_cut(connect):
    """Half of it arrives at most: the other side does not take it for a frame."""
    ended = threading.Event()
    got = []

    def receive(channel):
        try:
            while True:
                got.append(channel.receive())
        except ChannelClosed:
            channel.close()
            ended.set()

    plan = Plan(Rule("truncate", "call"))
    channel = connect(plan, on_channel=receive)
    channel.send(call(1, np.arange(10), kind="other"), soon())
    channel.send(call(2, np.arange(1000)), soon())
    assert ended.wait(PATIENCE)
    assert [frame.kind for frame in got] == ["other"]
    with pytest.raises(ChannelClosed, match="truncated by a fault"):
        channel.receive(soon())


def test_chance_is_repeatable():
    """The same seed strikes the same frames, about as many as it should."""

    def struck(seed):
        plan = Plan(Rule("drop", "call", probability=0.3), seed=seed)
        return [plan.strike("call") is not None for _ in range(1000)]

    assert struck(1) == struck(1) != struck(2)
    assert 230 < sum(struck(1)) < 370


def test_chance_does_not_depend_on_other_kinds():
    """Threads that send other frames in between change nothing."""
    rules = Rule("drop", "a", probability=0.5), Rule("close", "b", probability=0.5)
    alone, mixed = Plan(*rules, seed=7), Plan(*rules, seed=7)
    expected = [alone.strike("a") is not None for _ in range(100)]
    got = []
    for _ in range(100):
        mixed.strike("b")
        got.append(mixed.strike("a") is not None)
    assert got == expected


def test_the_first_rule_that_strikes_wins():
    """One frame meets one fault."""
    plan = Plan(Rule("drop", "a", first=1), Rule("close"))
    strikes = [plan.strike(kind).fault for kind in ("b", "a", "a")]
    assert strikes == ["close", "drop", "close"]
    assert plan.counts == {("close", "b"): 1, ("drop", "a"): 1, ("close", "a"): 1}


def test_faults_can_be_waited_for(connect):
    """Until so many have happened."""
    plan = Plan(Rule("drop", "reply"))
    channel = connect(there=plan)
    assert not plan.wait_for(1, timeout=0.01)
    _sends(channel, 1, 2)
    assert plan.wait_for(2)


def test_what_is_no_fault():
    """A misspelt rule would never strike."""
    with pytest.raises(ValueError, match=r"a fault must be one of .*, not 'dorp'"):
        Plan(Rule("dorp"))


def test_what_it_does_not_know_the_inner_one_does():
    """Reading and setting."""
    inner = InProcessTransport("here", Hub())
    outer = FaultyTransport(inner, Plan())
    assert outer.name == "here"
    outer.answerer = print
    assert inner.answerer is print
    outer.close()
