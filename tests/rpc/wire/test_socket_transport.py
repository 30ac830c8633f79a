"""Workers that listen and connect: routes, refusals, endings, and nothing left over."""

import os
import socket
import threading
import time

import numpy as np
import pytest

from jdist.rpc.base.errors import AuthenticationError
from jdist.rpc.wire import memory, sockets
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.connection import Connection
from jdist.rpc.wire.socket_transport import SocketTransport
from tests.rpc.sockets import (
    KEY,
    PATIENCE,
    ROUTES,
    Outcome,
    Peers,
    blocked,
    call,
    closed_by_peer,
    descriptors,
    echo,
    nothing_left,
    soon,
    wait_until,
)


@pytest.fixture(autouse=True)
def _leaks_nothing():
    with nothing_left():
        yield


@pytest.fixture(params=ROUTES)
def peers(request):
    with Peers(request.param) as made:
        yield made


def test_arrays_go_there_and_back(peers, rng):
    """Of all sizes, bit for bit, over every route."""
    channel = peers.connect()
    assert channel.peer == "there"
    sizes = [0, 1, 77, 10_000, 3_000_001, memory.THRESHOLD // 4 + 5]
    for number, size in enumerate(sizes, 1):
        sent = rng.standard_normal(size, np.float32)
        answer = channel.exchange(call(number, sent, tree=[number]), soon())
        assert answer.tree == [number]
        np.testing.assert_array_equal(answer.leaves[0], sent)


def test_both_directions_at_once(peers, rng):
    """One thread sends while another receives, large arrays both ways."""
    channel = peers.connect()
    arrays = [rng.standard_normal(int(n)) for n in rng.integers(1, 1 << 18, 20)]

    def send():
        for number, array in enumerate(arrays, 1):
            channel.send(call(number, array), soon())

    sending = Outcome(send)
    for number, array in enumerate(arrays, 1):
        answer = channel.receive(soon())
        assert answer.id == number
        np.testing.assert_array_equal(answer.leaves[0], array)
    sending.get()


def test_the_route_is_the_fastest():
    """Unix with memory on one machine; TCP for who is elsewhere or has only a port."""
    with Peers() as peers:
        local = peers.connect()
        assert sockets.is_unix(local._stream._socket)
        assert (local._pool is not None) == memory.available()
        elsewhere = [*peers.there.address[:2], "@jdist-elsewhere"]
        for address in (peers.there.address[:2], elsewhere):
            remote = peers.here.connect("there", address, soon())
            assert not sockets.is_unix(remote._stream._socket)
            assert remote._pool is None
            assert remote.exchange(call(1), soon()).id == 1


def test_another_users_unix_socket_is_not_used(monkeypatch):
    """Neither connected to (TCP instead) nor accepted from, not even to shake hands."""
    with Peers() as peers:
        peers.there.handshake_seconds = 10 * PATIENCE
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 12345)
            channel = peers.here.connect("there", peers.there.address, soon())
            assert not sockets.is_unix(channel._stream._socket)
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(PATIENCE)
                stranger.connect("\0" + peers.there.address[2][1:])
                assert closed_by_peer(stranger) == b""
        assert peers.there.refused == 2  # Ours, and the stranger's.


def test_without_memory_descriptors_arrays_are_copied(monkeypatch, rng):
    """As on macOS; a peer that has them gets along with one that has not."""
    with Peers() as peers:
        monkeypatch.setattr(memory, "available", lambda: False)
        with SocketTransport("plain", KEY) as plain:
            plain.serve(echo)
            for channel in (
                plain.connect("there", peers.there.address, soon()),
                peers.here.connect("plain", plain.address, soon()),
            ):
                assert channel._pool is None
                sent = rng.standard_normal(memory.THRESHOLD // 8 + 3)
                answer = channel.exchange(call(1, sent), soon())
                np.testing.assert_array_equal(answer.leaves[0], sent)


# --- refusals ---


def test_nobody_listens(peers):
    """The port of a worker that ended."""
    with SocketTransport("gone", KEY) as gone:
        address = gone.address
    with pytest.raises(
        ChannelClosed, match=rf"no worker listens at 127.0.0.1:{address[1]}"
    ):
        peers.here.connect("gone", address, soon())
    with pytest.raises(
        ChannelClosed, match=r"no worker listens at no.such.host.invalid:1 "
    ):
        peers.here.connect("gone", ("no.such.host.invalid", 1), soon())


def test_a_wrong_key(peers):
    """The connector learns it; the listener runs nothing and serves on."""
    tls = peers.here._credentials and peers.here._forced
    stranger = Peers(peers.route, key=bytes(range(32)))
    assert bool(tls) == (peers.route == "tls")
    with stranger, pytest.raises(AuthenticationError, match="could not prove that it"):
        stranger.here.connect("there", peers.address, soon())
    assert peers.connect().exchange(call(1), soon()).id == 1
    wait_until(lambda: peers.there.refused == 1)


def test_another_worker_listens(peers):
    """A worker that ended and whose port another one has now."""
    with pytest.raises(
        AuthenticationError, match="'there' listens where 'other' was e"
    ):
        peers.here.connect("other", peers.address, soon())
    assert peers.here.connect("", peers.address, soon()).peer == "there"


def test_a_worker_that_does_not_serve_yet(peers):
    """Connections wait for it, within the deadline."""
    with SocketTransport("late", KEY) as late:
        with pytest.raises(TimeoutError, match="nothing was received in time"):
            peers.here.connect("late", late.address[:2], time.monotonic() + 0.05)
        connecting = Outcome(peers.here.connect, "late", late.address[:2], soon())
        blocked(connecting.thread, SocketTransport._connected)
        late.serve(echo)
        if peers.route == "tls":
            with pytest.raises(ChannelClosed, match="its connection"):
                connecting.get()
        else:
            assert connecting.get().exchange(call(1), soon()).id == 1
    with pytest.raises(TimeoutError, match=r"no time was left to connect to 127.0.0.1"):
        peers.here.connect("late", late.address[:2], time.monotonic() - 1.0)


def test_a_port_that_is_taken(monkeypatch):
    """The constructor leaves nothing behind."""
    here = SocketTransport("here", KEY)
    with here, pytest.raises(OSError, match="in use"):
        SocketTransport("other", KEY, port=here.address[1])
    monkeypatch.setattr(sockets, "_unix_name", lambda _: "\0" + "x" * 200)
    with pytest.raises(OSError, match="too long"):
        SocketTransport("here", KEY)


def test_unix_sockets_with_a_file(monkeypatch):
    """Where names cannot be abstract, a private folder goes with the worker."""
    monkeypatch.setattr(sockets, "_ON_LINUX", False)
    with Peers() as peers:
        path = peers.there.address[2]
        assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
        channel = peers.connect()
        assert sockets.is_unix(channel._stream._socket)
        assert channel.exchange(call(1), soon()).id == 1
    assert not os.path.exists(os.path.dirname(path))


# --- ending ---


def test_close_ends_everything(peers):
    """Channels on both sides, whoever waits in them, and new connections."""
    channel = peers.connect()
    receiving = Outcome(channel.receive)
    blocked(receiving.thread, Connection._next)
    peers.there.close()
    with pytest.raises(ChannelClosed, match="its connection closed"):
        receiving.get()
    with pytest.raises(ChannelClosed, match="no worker listens"):
        peers.connect()
    peers.there.close()
    peers.here.close()
    with pytest.raises(ChannelClosed, match="this worker has ended"):
        peers.connect()
    with pytest.raises(ChannelClosed, match="its connection closed"):
        channel.send(call(1))


def test_close_from_a_serving_thread():
    """A worker may end itself while it answers."""
    ended = threading.Event()

    def serve(channel):
        channel.receive()
        peers.there.close()
        ended.set()

    with Peers(on_channel=serve) as peers:
        channel = peers.connect()
        channel.send(call(1))
        assert ended.wait(PATIENCE)
        with pytest.raises(ChannelClosed, match="its connection closed"):
            channel.receive(soon())


def test_a_serving_thread_that_fails(caplog):
    """Its channel closes, so that the caller learns it, and the error is logged."""

    def serve(channel):
        raise ZeroDivisionError(channel.receive().tree)

    with Peers(on_channel=serve) as peers:
        channel = peers.connect()
        with pytest.raises(ChannelClosed, match="its connection closed"):
            channel.exchange(call(1, tree="by nought"), soon())
    (record,) = caplog.records
    assert record.getMessage().endswith("reads raised an exception.")
    assert str(record.exc_info[1]) == "by nought"


def test_a_channel_outlives_its_first_thread():
    """`on_channel` may hand the channel on and return."""
    channels = []
    with Peers(on_channel=channels.append) as peers:
        near = peers.connect()
        near.send(call(1))
        wait_until(lambda: channels)
        assert channels[0].receive(soon()).id == 1


def test_a_thousand_connections_leave_nothing(peers):
    """The fixture counts descriptors and threads afterwards; this one meanwhile."""
    before = None
    for number in range(1, 1001 if peers.route != "tls" else 201):
        channel = peers.connect()
        assert channel.exchange(call(1), soon()).id == 1
        channel.close()
        if number == 50:
            before = len(descriptors())
    assert len(descriptors()) < before + 50
    assert not peers.here._connections
