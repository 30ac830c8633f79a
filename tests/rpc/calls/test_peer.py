"""Channels to one worker: given back when no call uses them, replaced when closed."""

import gc
import itertools
import os
import signal
import socket
import threading
import time

import pytest

from jdist import rpc
from jdist.rpc.base import current
from jdist.rpc.calls import peers
from jdist.rpc.calls.callee import ServedConnection
from jdist.rpc.group.rendezvous import ReservedPort
from jdist.rpc.wire.channel import ChannelClosed, NotSent
from jdist.rpc.wire.connection import Connection
from jdist.rpc.wire.stream import Stream
from tests.rpc.sockets import (
    PATIENCE,
    Peers,
    call,
    connected_pair,
    raw_pair,
    soon,
    wait_until,
)

MANY = 30
_together = threading.Barrier(MANY)
_count = itertools.count(1)


def meet():
    """All these calls are under way at once."""
    _together.wait(PATIENCE)


def served():
    """The channels that this worker serves."""
    agent = current.worker()
    found = [one for one in gc.get_objects() if type(one) is ServedConnection]
    return [one for one in found if one._channel in agent._transport._connections]


def serving():
    """How many they are."""
    return len(served())


def increase():
    """Tells how many times it was called."""
    return next(_count)


def close_incoming():
    """Closes the channels of synchronous calls, as what lies between may do."""
    for one in served():
        if one._channel.peer == "worker0" and not one._running:
            one._channel.close("closed by a test")


def call_many(to):
    agent = current.worker()

    def run():
        with current.acting_as(agent):
            rpc.rpc_sync(to, meet)

    threads = [threading.Thread(target=run) for _ in range(MANY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)


def burst(to):
    agent = current.worker()
    there = agent.directory.find(to)
    before = len(agent._transport._connections), rpc.rpc_sync(to, serving)
    call_many(to)
    assert len(there._idle) == MANY
    assert rpc.rpc_sync(to, serving) >= before[1] + MANY - 1
    usual, peers._IDLE_SECONDS = peers._IDLE_SECONDS, 0.0
    try:
        # The next call that ends has them looked at.
        assert rpc.rpc_sync(to, max, args=(1, 2)) == 2
        wait_until(lambda: len(there._idle) == 1)
    finally:
        peers._IDLE_SECONDS = usual
    wait_until(lambda: len(agent._transport._connections) <= before[0] + 1)
    wait_until(lambda: rpc.rpc_sync(to, serving) <= before[1] + 1)


def test_channels_that_no_call_uses_are_given_back(processes):
    """With their threads on the callee; only the one used last is kept."""
    processes.run(0, burst, "worker1")


def idle_for_a_moment(to):
    """What was used a moment ago stays, and the alarm knows when it is old."""
    there = current.worker().directory.find(to)
    call_many(to)
    now = time.monotonic()
    due = there.expire(now)
    assert now < due <= now + peers._IDLE_SECONDS
    assert len(there._idle) == MANY
    assert there.expire(now + 2 * peers._IDLE_SECONDS) is None
    assert len(there._idle) == 1


def test_channels_are_kept_for_a_while(processes):
    processes.run(0, idle_for_a_moment, "worker1")


# --- channels that were closed while no call used them ---


def stale(to, noticed):
    """The next call runs, and runs once."""
    there = current.worker().directory.find(to)
    usual = Connection.usable
    if not noticed:  # as if it closed between the look and the call
        Connection.usable = lambda channel: True
    try:
        for _ in range(3):
            before = rpc.rpc_sync(to, increase)
            idle = list(there._idle)
            assert idle
            rpc.rpc_async(to, close_incoming).wait()
            for connection in idle:
                wait_until(lambda channel=connection.channel: not usual(channel))
            assert rpc.rpc_sync(to, increase) == before + 1
            assert not set(idle) & set(there._idle)
    finally:
        Connection.usable = usual


@pytest.mark.parametrize("noticed", [True, False])
def test_a_channel_that_closed_meanwhile_costs_no_call(processes, noticed):
    processes.run(0, stale, "worker1", noticed)


def stale_line(to):
    """Asynchronous calls go on a new one although nothing has read the old's end."""
    there = current.worker().directory.find(to)
    for number in range(20):
        before = rpc.rpc_async(to, increase).wait(PATIENCE)
        there.shared._channel._cut("sending was interrupted")
        assert rpc.rpc_async(to, increase).wait(PATIENCE) == before + 1, number


def test_a_shared_channel_that_closed_meanwhile_costs_no_call(processes):
    processes.run(0, stale_line, "worker1")


def test_what_was_not_sent_says_so():
    """By the sender that finds it closed, on either side; what may have been, not."""
    with connected_pair() as (left, right):
        right.close("done")
        with pytest.raises(NotSent, match="its connection broke"):
            left.send(call(1))
        with pytest.raises(NotSent, match="its connection broke"):
            left.send(call(2))
        with pytest.raises(ChannelClosed, match="its connection closed") as caught:
            left.receive()
        assert type(caught.value) is ChannelClosed
    with raw_pair() as (connection, theirs):
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelClosed, match="its connection closed") as caught:
            connection.exchange(call(1), soon())
        assert type(caught.value) is ChannelClosed


@pytest.mark.parametrize("route", ["unix", "tcp", "tls"])
def test_a_channel_tells_whether_it_is_usable(route):
    with Peers(route) as peers:
        channel = peers.connect()
        assert channel.exchange(call(1), soon()).id == 1
        assert channel.usable()
        (there,) = peers.there._connections
        there.close("closed there")
        wait_until(lambda: not channel.usable())
        again = peers.connect()
        again.close("closed here")
        assert not again.usable()


def test_tcp_connections_are_kept_alive():
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as sock,
    ):
        stream = Stream(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        for option, seconds in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5)):
            assert sock.getsockopt(socket.IPPROTO_TCP, option) == seconds
        stream.close()


# --- a child of a worker's process ---


def fork_and_call(to):
    """What the child sees; its parent goes on."""
    read, write = os.pipe()
    reference = rpc.remote(to, max, args=(3, 4))
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE))
        told = [outcome(operation, to, reference) for operation in CHILDS]
        os.write(write, "\n".join(told).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        told = pipe.read().split("\n")
    os.waitpid(child, 0)
    assert rpc.rpc_sync(to, max, args=(1, 2)) == 2
    assert rpc.rpc_async(to, max, args=(1, 2)).wait(PATIENCE) == 2
    assert reference.to_here() == 4
    return told


def outcome(operation, *args):
    try:
        return f"{operation.__name__}: returned {operation(*args)}"
    except BaseException as error:  # noqa: BLE001 - the child must not go on as a host
        return f"{operation.__name__}: {error}".replace("\n", " ")


def sync(to, reference):
    return rpc.rpc_sync(to, max, args=(1, 2))


def asynchronous(to, reference):
    return rpc.rpc_async(to, max, args=(1, 2)).wait()


def fetch(to, reference):
    return reference.to_here()


def who(to, reference):
    return rpc.get_worker_info()


def end(to, reference):
    return rpc.shutdown()


CHILDS = [sync, asynchronous, fetch, who, end]


def test_a_forked_child_cannot_call_as_its_parent(processes):
    told = processes.run(0, fork_and_call, "worker1")
    for operation, text in zip(CHILDS, told, strict=True):
        why = "This process was forked from that of worker0, whose connections"
        assert text.startswith(f"{operation.__name__}: {why}")
        assert "become a worker of its own by rpc.init_rpc" in text


def become(port):
    place = ("127.0.0.1", port)
    rpc.init_rpc("alone", rank=0, world_size=1, coordinator=place)
    larger = rpc.rpc_sync("alone", max, args=(1, 2))
    rpc.shutdown()
    return larger


def fork_and_become(port):
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE))
        os._exit(7 if outcome(become, port) == "become: returned 2" else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_can_become_a_worker(processes):
    with ReservedPort() as reserved:
        assert processes.run(0, fork_and_become, reserved.port) == 7
