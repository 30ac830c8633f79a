"""The transport within a process, as any channel; and calls in the caller's thread."""

import threading
import time

import numpy as np
import pytest

from jdist import rpc
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.frame import REPLY, Frame
from jdist.rpc.wire.in_process import Hub, InProcessTransport
from tests.rpc.sockets import nothing_left

PATIENCE = 60


@pytest.fixture
def pair():
    """A transport that echoes, with one more leaf, and one that connects to it."""
    hub = Hub()
    a, b = InProcessTransport("a", hub), InProcessTransport("b", hub)
    b.serve(echo)
    with nothing_left():
        yield a, b
        a.close()
        b.close()


def echo(channel):
    try:
        while True:
            frame = channel.receive()
            channel.send(
                Frame(REPLY, frame.id, {}, frame.tree, [*frame.leaves, np.ones(2)])
            )
    except ChannelClosed:
        return


def soon():
    return time.monotonic() + PATIENCE


def test_frames_there_and_back(pair):
    a, b = pair
    channel = a.connect("b", b.address, soon())
    assert channel.peer == "b"
    sent = np.arange(4.0)
    answer = channel.exchange(Frame("x", 1, {}, [1, "two"], [sent]), soon())
    assert answer.tree == [1, "two"]
    assert answer.leaves[0].tolist() == [0, 1, 2, 3]
    assert not np.shares_memory(answer.leaves[0], sent)


def test_a_frame_that_comes_twice(pair):
    a, b = pair
    channel = a.connect("b", b.address, soon())
    for number in (1, 1, 2):
        channel.send(Frame("x", number, {}, number, []))
    assert [channel.receive(soon()).id for _ in range(2)] == [1, 2]


def test_nobody_of_that_name(pair):
    with pytest.raises(ChannelClosed, match="no worker of this name"):
        pair[0].connect("c", "c", soon())


def test_a_worker_that_does_not_listen_yet():
    hub = Hub()
    a, b = InProcessTransport("a", hub), InProcessTransport("b", hub)
    with pytest.raises(ChannelClosed, match="does not listen yet"):
        a.connect("b", b.address, soon())
    a.close()
    b.close()


def test_no_answer_in_time(pair):
    a, b = pair
    channel = a.connect("b", b.address, soon())
    with pytest.raises(TimeoutError, match="no frame arrived"):
        channel.receive(time.monotonic() + 0.02)


@pytest.mark.parametrize("who", ["this side", "that transport", "this transport"])
def test_closing_wakes_whoever_waits(pair, who):
    a, b = pair
    channel = a.connect("b", b.address, soon())
    seen = []

    def wait():
        try:
            channel.receive(soon())
        except ChannelClosed as error:
            seen.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    {"this side": channel.close, "that transport": b.close, "this transport": a.close}[
        who
    ]()
    thread.join()
    assert len(seen) == 1
    with pytest.raises(ChannelClosed, match=seen[0]):
        channel.send(Frame("x", 1, {}, None, []))
    channel.close("again")
    with pytest.raises(ChannelClosed, match=seen[0]):
        channel.receive()


def test_connecting_after_the_end(pair):
    a, b = pair
    a.close()
    with pytest.raises(ChannelClosed, match="the worker has ended"):
        a.connect("b", b.address, soon())


# --- calls in the caller's thread ---


def my_thread():
    return threading.get_ident()


def test_a_call_without_a_limit_of_its_own_runs_in_the_callers_thread(threads):
    here = threading.get_ident()
    assert rpc.rpc_sync("worker1", my_thread) == here
    assert rpc.rpc_sync("worker0", my_thread) == here
    assert rpc.rpc_sync("worker1", my_thread, timeout=PATIENCE) != here
    assert rpc.rpc_async("worker1", my_thread).wait() != here


def test_in_a_process_a_call_to_oneself_does(processes):
    me, told = processes.run(1, call_myself)
    assert me == told


def call_myself():
    return threading.get_ident(), rpc.rpc_sync("worker1", my_thread)


def deep(depth):
    """The threads that a chain of calls back and forth runs on."""
    if depth == 0:
        return [threading.get_ident()]
    other = {"worker0": "worker1", "worker1": "worker0"}[rpc.get_worker_info().name]
    return [threading.get_ident(), *rpc.rpc_sync(other, deep, args=(depth - 1,))]


def test_a_deep_chain_continues_on_another_thread(threads):
    used = deep(300)
    assert len(used) == 301
    assert 1 < len(set(used)) < 60


def interrupt():
    raise KeyboardInterrupt("by the user")


def test_an_interrupt_is_not_an_error_of_the_call(threads):
    """Ctrl-C while a call runs in the main thread ends what the main thread does."""
    with pytest.raises(KeyboardInterrupt, match="by the user"):
        rpc.rpc_sync("worker1", interrupt)
    assert rpc.debug_info()["agent.client_active_calls"] == 0
    with rpc.use_worker("worker1"):
        assert rpc.debug_info()["agent.server_active_calls"] == 0
    assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2
