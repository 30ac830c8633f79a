"""Who has not proved himself gets little, and nobody else suffers for it."""

import contextlib
import errno
import selectors
import socket
import threading

import pytest

from jdist.rpc.base.errors import RpcError
from jdist.rpc.wire.socket_transport import SocketTransport
from tests.rpc.sockets import (
    PATIENCE,
    ROUTES,
    Outcome,
    Peers,
    blocked,
    call,
    closed_by_peer,
    descriptors,
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


def test_a_slow_stranger_is_cut_off(peers):
    """A byte now and then does not keep a connection."""
    peers.there.handshake_seconds = 0.3
    with _stranger(peers) as slow:
        trickle = selectors.DefaultSelector()
        trickle.register(slow, selectors.EVENT_READ)
        with trickle, contextlib.suppress(ConnectionError):
            while not trickle.select(0.02):
                slow.send(b"j")
        assert closed_by_peer(slow) == b""
    assert peers.there._strangers == {}


def test_strangers_are_few(peers):
    """The one who has taken the longest has to go; an honest one gets in."""
    peers.there.handshake_seconds = PATIENCE
    peers.there.most_strangers = 3
    peers.there.crowded_seconds = 0.01
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(_stranger(peers)) for _ in range(12)]
        channel = peers.connect()
        assert channel.exchange(call(1), soon()).id == 1
        for stranger in crowd[:8]:
            assert closed_by_peer(stranger) == b""
        # Each one holds a thread, beside one that serves; those it let go are idle.
        pool = peers.there._threads
        assert len(pool._threads) - len(pool._idle) <= 3 + 2
        peers.there.close()
        for stranger in crowd[8:]:
            assert closed_by_peer(stranger) == b""


def test_close_does_not_wait_for_a_crowd(peers):
    """Strangers inside, others in the queue, and nobody's time is up."""
    peers.there.handshake_seconds = peers.there.crowded_seconds = PATIENCE
    peers.there.most_strangers = 2
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(_stranger(peers)) for _ in range(6)]
        wait_until(lambda: len(peers.there._strangers) == 2)
        blocked(peers.there._accepting, SocketTransport._welcome)
        peers.there.close()
        assert not peers.there._accepting.is_alive()
        for stranger in crowd:
            assert closed_by_peer(stranger) == b""


def test_honest_ones_in_a_crowd_all_get_in(peers):
    """Many more at once than may be unproved: they wait their turn, none has to go."""
    peers.there.most_strangers = 2
    peers.there.crowded_seconds = PATIENCE
    connecting = [Outcome(peers.connect) for _ in range(40)]
    channels = [outcome.get() for outcome in connecting]
    for channel in channels:
        assert channel.exchange(call(1), soon()).id == 1
    assert peers.there.refused == 0


def _stranger(peers):
    if peers.route == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + peers.there.address[2][1:])
    else:
        sock = socket.create_connection(peers.there.address[:2])
    sock.settimeout(PATIENCE)
    return sock


def test_descriptors_of_a_stranger_are_dropped():
    """The kernel closes what nobody asked for."""
    with Peers() as peers, _stranger(peers) as stranger, open(__file__) as file:
        socket.send_fds(stranger, [b"jdist\0"], [file.fileno()] * 50)
        assert peers.connect().exchange(call(1), soon()).id == 1
        assert list(descriptors().values()).count(__file__) == 1


def test_out_of_descriptors(monkeypatch):
    """The listener lets a stranger go, and serves when there are some again."""
    with Peers() as peers:
        failures = _fail_to_accept(monkeypatch, 2)
        with _stranger(peers) as stranger:
            assert peers.connect().exchange(call(1), soon()).id == 1
            next(failures)
            assert peers.connect().exchange(call(1), soon()).id == 1
            assert list(failures) == []
            assert closed_by_peer(stranger) == b""


@pytest.mark.parametrize("route", ["unix", "tcp"])
def test_out_of_descriptors_without_strangers(monkeypatch, route):
    """Who connects is told so, and what to do; then the listener serves again."""
    with Peers(route) as peers:
        failures = _fail_to_accept(monkeypatch, 2)
        next(failures)
        told = r"takes no more connections: its process may open no more.*`ulimit -n`"
        with pytest.raises(RpcError, match=told):
            peers.connect()
        assert list(failures) == []
        assert peers.connect().exchange(call(1), soon()).id == 1


def _fail_to_accept(monkeypatch, times):
    """Has accepting fail so often, once the first one of these was taken."""
    failures, real = iter(range(times + 1)), socket.socket.accept
    begun = []

    def accept(listening):
        if begun and next(failures, None) is not None:
            raise OSError(24, "Too many open files")
        return real(listening)

    class Failures:
        def __iter__(self):
            return failures

        def __next__(self):
            begun.append(next(failures))

    monkeypatch.setattr(socket.socket, "accept", accept)
    return Failures()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
def test_the_connecting_side_is_out_of_descriptors(monkeypatch, error):
    """Both ways fail; the next connection succeeds."""
    with Peers() as peers:
        real = socket.socket.__init__

        def fail(*args, **settings):
            raise OSError(error, "Too many open files")

        monkeypatch.setattr(socket.socket, "__init__", fail)
        told = r"may open no more files \(.* limited to \d+\).*to 'there'.*`ulimit -n`"
        with pytest.raises(RpcError, match=told):
            peers.connect()
        monkeypatch.setattr(socket.socket, "__init__", real)
        assert peers.connect().exchange(call(1), soon()).id == 1


def test_out_of_threads(monkeypatch):
    """The connection is refused and the next one served."""
    with Peers() as peers:
        failures = iter(range(1))
        real = threading.Thread.start

        def start(thread):
            if "reads" in thread.name and next(failures, None) is not None:
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(RpcError, match="takes no more connections: its process"):
            peers.connect()
        assert peers.connect().exchange(call(1), soon()).id == 1
