"""Ten thousand strings of bytes against a worker that serves somebody meanwhile.

Half come from strangers, half over channels of a peer that knows the key and went mad.
The frames as such are attacked in `test_hostile_frames`; here it is what listens and
connects that must answer or close, serve on, run nothing and leak nothing.
"""

import contextlib
import socket
import threading

import numpy as np
import pytest

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.wire import handshake
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.frame import Frame, Limits, pack
from jdist.rpc.wire.handshake import Identity
from jdist.rpc.wire.stream import Stream
from jdist.rpc.wire.tls import FIRST_BYTE
from tests.rpc.sockets import (
    KEY,
    PATIENCE,
    Outcome,
    Peers,
    call,
    closed_by_peer,
    nothing_left,
    soon,
    wait_until,
)

LIMITS = Limits(header_bytes=1 << 16, body_bytes=1 << 20, leaves=64)
TIMES = 5000


class _CallLog:
    """Serves like `echo` and writes down every request."""

    def __init__(self):
        self.calls = []
        self.channels = 0

    def __call__(self, channel):
        self.channels += 1
        try:
            while True:
                frame = channel.receive()
                self.calls.append(frame.kind)
                channel.send(Frame("reply", frame.id, {}, frame.tree, frame.leaves))
        except (ChannelClosed, ProtocolError):
            channel.close()


@pytest.fixture(params=["unix", "tcp"])
def besieged(request):
    """Peers, their call_log, and an honest caller who must be served throughout."""
    call_log = _CallLog()
    with (
        nothing_left(),
        Peers(request.param, call_log, limits=LIMITS) as peers,
        _honest_caller(peers),
    ):
        yield peers, call_log


@contextlib.contextmanager
def _honest_caller(peers):
    channel = peers.connect()
    stop = threading.Event()

    def call_on():
        number = 0
        while not (stop.is_set() and number):
            number += 1
            sent = np.arange(number % 50)
            answer = channel.exchange(call(number, sent, kind="honest"), soon())
            np.testing.assert_array_equal(answer.leaves[0], sent)
            if number % 10 == 0:
                peers.connect().close()
            stop.wait(0.005)

    calling = Outcome(call_on)
    try:
        yield
    finally:
        stop.set()
        calling.get()


def _connect(peers):
    if peers.route == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + peers.there.address[2][1:])
    else:
        sock = socket.create_connection(peers.address)
    sock.settimeout(PATIENCE)
    return sock


def _damaged(data, rng):
    """A copy with bytes changed, cut out, doubled, or an end missing."""
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(data)))
        match rng.integers(4):
            case 0:
                data[at] = rng.integers(256)
            case 1:
                del data[at : at + int(rng.integers(1, 9))]
            case 2:
                data[at:at] = data[at : at + int(rng.integers(1, 9))]
            case 3:
                del data[max(1, at) :]
        data = data or bytearray(1)
    return bytes(data)


def test_strangers_say_what_they_like(besieged, rng):
    """Noise, damaged hellos, TLS's first byte, other protocols: nobody gets in."""
    peers, call_log = besieged
    hello = handshake._pack_hello(Identity("here", KEY), "there")
    others = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x80\x04.", FIRST_BYTE * 99, b""]
    for number in range(TIMES):
        match number % 4:
            case 0:
                data = rng.bytes(int(rng.integers(0, 2000)))
            case 1:
                data = _damaged(hello + rng.bytes(32), rng)
            case 2:
                data = hello[: int(rng.integers(len(hello)))]
            case 3:
                data = others[number // 4 % len(others)] + rng.bytes(number % 7)
        with _connect(peers) as sock, contextlib.suppress(OSError):
            sock.sendall(data)
            if number % 100 == 0:  # The others do not even wait for an answer.
                sock.shutdown(socket.SHUT_WR)
                assert len(closed_by_peer(sock)) in (0, len(hello) + 32)
    assert set(call_log.calls) <= {"honest"}
    wait_until(lambda: peers.there.refused == TIMES)
    wait_until(lambda: not peers.there._strangers)


def _mad_peer(peers):
    """A socket whose handshake has been done with the right key."""
    sock = _connect(peers)
    handshake.connect(Stream(sock), Identity("mad", KEY), "there", soon())
    sock.settimeout(PATIENCE)
    return sock


def test_a_peer_with_the_key_sends_damaged_frames(besieged, rng):
    """Each is answered, or its channel closes and only that one."""
    peers, _ = besieged
    pieces = pack(call(1, rng.standard_normal(20), np.arange(9000), kind="damaged"))
    good = b"".join(pieces)
    sock = _mad_peer(peers)
    closed = 0
    for _ in range(TIMES):
        data = _damaged(good, rng) if rng.integers(2) else _damaged(pieces[0], rng)
        try:
            sock.sendall(data)
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while sock.recv(1 << 20):
                    pass
                raise ConnectionResetError
            sock.settimeout(PATIENCE)
        except ConnectionError:
            closed += 1
            sock.close()
            sock = _mad_peer(peers)
    sock.close()
    assert closed > TIMES // 50
    assert peers.there.refused == 0


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 4, b"\x00\x00\x02\x00", b"HTTP"],
    ids=["all", "header", "text"],
)
def test_an_announcement_beyond_the_limits(besieged, data):
    """The channel closes at once, before anything more is sent or allocated."""
    peers, call_log = besieged
    with _mad_peer(peers) as sock:
        sock.sendall(data.ljust(12, b"x"))
        assert closed_by_peer(sock) == b""
    assert set(call_log.calls) <= {"honest"}


def test_a_crowd_of_slow_strangers(besieged, rng):
    """More than may be there at once: the oldest go, the honest caller is served."""
    peers, _ = besieged
    peers.there.most_strangers = 8
    peers.there.crowded_seconds = 0.02
    hello = handshake._pack_hello(Identity("here", KEY), "there")
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(_connect(peers)) for _ in range(40)]
        for at in range(20):
            for sock in crowd:
                with contextlib.suppress(ConnectionError):
                    sock.send(hello[at : at + 1])
        for sock in crowd[:30]:
            assert closed_by_peer(sock) == b""
        assert len(peers.there._strangers) <= 8 + 1
