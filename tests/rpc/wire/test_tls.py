"""TLS: certificates made and given, men in the middle, and who may go without."""

import contextlib
import socket
import sys
import threading
import time

import numpy as np
import pytest

from jdist import _errors
from jdist.rpc.base.errors import AuthenticationError
from jdist.rpc.wire import socket_transport, tls
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.connection import Connection
from jdist.rpc.wire.socket_transport import SocketTransport
from jdist.rpc.wire.stream import CutOff, Stream
from jdist.rpc.wire.tls import Credentials, TlsConfig, TlsStream
from tests.rpc.sockets import (
    KEY,
    PATIENCE,
    Outcome,
    Peers,
    blocked,
    call,
    closed_by_peer,
    echo,
    nothing_left,
    soon,
    wait_until,
)


@pytest.fixture(autouse=True)
def _leaks_nothing():
    with nothing_left():
        yield


@pytest.fixture
def _off_loopback(monkeypatch):
    """Every address counts as another machine's."""
    monkeypatch.setattr(socket_transport, "is_loopback", lambda _: False)


# --- who must, who may ---


@pytest.mark.usefixtures("_off_loopback")
def test_off_loopback_everything_is_encrypted():
    """Without being asked for, with certificates made at start."""
    with SocketTransport("here", KEY) as here, SocketTransport("there", KEY) as there:
        there.serve(echo)
        with _Wire(there.address[:2]) as wire:
            channel = here.connect("there", wire.address, soon())
            sent = np.frombuffer(b"attack at dawn!!" * 10, np.uint8)
            answer = channel.exchange(call(1, sent), soon())
            assert answer.leaves[0].tobytes() == sent.tobytes()
            assert isinstance(channel._stream, TlsStream)
            assert channel._stream._tls.version() == "TLSv1.3"
            channel.close()
            assert not any(b"attack at dawn" in seen for seen in wire.seen.values())


def test_the_wire_can_be_read_without_tls():
    """The control of the test above."""
    with Peers("tcp") as peers, _Wire(peers.address) as wire:
        channel = peers.here.connect("there", wire.address, soon())
        sent = np.frombuffer(b"attack at dawn!!" * 10, np.uint8)
        channel.exchange(call(1, sent), soon())
        channel.close()
        assert all(b"attack at dawn" in seen for seen in wire.seen.values())


@pytest.mark.usefixtures("_off_loopback")
def test_a_plain_peer_is_refused_off_loopback():
    """By the listener; and a plain listener by the connector."""
    with (
        SocketTransport("safe", KEY) as safe,
        SocketTransport("plain", KEY, insecure=True) as plain,
    ):
        safe.serve(echo)
        plain.serve(echo)
        with pytest.raises(ChannelClosed, match="its connection"):
            plain.connect("safe", safe.address[:2], soon())
        with pytest.raises(ChannelClosed, match="its connection"):
            safe.connect("plain", plain.address[:2], soon())
        wait_until(lambda: safe.refused == plain.refused == 1)


@pytest.mark.usefixtures("_off_loopback")
def test_insecure_must_be_said_by_both():
    """Then the wire is plain, and the key is proved all the same."""
    settings = {"insecure": True}
    with Peers("tcp", **settings) as peers:
        channel = peers.connect()
        assert isinstance(channel._stream, Stream)
        assert channel.exchange(call(1), soon()).id == 1
        with (
            SocketTransport("other", bytes(32), **settings) as other,
            pytest.raises(AuthenticationError, match="could not prove"),
        ):
            other.connect("there", peers.address, soon())


@pytest.mark.usefixtures("_off_loopback")
def test_one_machine_needs_no_tls():
    """The Unix socket leads nowhere else."""
    with Peers("unix") as peers:
        assert isinstance(peers.connect()._stream, Stream)


def test_certificates_and_insecure_contradict():
    """Which of them is meant cannot be known."""
    message = r"`SocketTransport\(insecure=...\)` must not be True when certificates"
    with pytest.raises(ValueError, match=message):
        SocketTransport("here", KEY, tls=TlsConfig(), insecure=True)


def test_tls_on_loopback_is_for_both():
    """Where one side was told to use it, the other cannot go without."""
    with SocketTransport("plain", KEY) as plain, Peers("tls") as peers:
        plain.serve(echo)
        with pytest.raises(ChannelClosed, match="its connection"):
            plain.connect("there", peers.address, soon())
        with pytest.raises(ChannelClosed, match="its connection"):
            peers.here.connect("plain", plain.address[:2], soon())


def test_without_cryptography(monkeypatch):
    """What to install, or what to give instead."""
    monkeypatch.setitem(sys.modules, "cryptography", None)
    message = r"needs the package `cryptography`: `pip install .*\[tls\]'`. Or give"
    with pytest.raises(_errors.Unavailable, match=message):
        SocketTransport("here", KEY, host="0.0.0.0")
    SocketTransport("here", KEY, host="0.0.0.0", insecure=True).close()
    SocketTransport("here", KEY).close()


def test_what_is_no_configuration():
    """Authorities or a key without a certificate prove nothing."""
    message = r"`TlsConfig\(certfile=...\)` must be given with a keyfile or a cafile"
    with pytest.raises(ValueError, match=message):
        TlsConfig(cafile="ca.pem")
    with pytest.raises(ValueError, match=message):
        TlsConfig(keyfile="key.pem")
    with pytest.raises(FileNotFoundError, match="No such file"):
        SocketTransport("here", KEY, tls=TlsConfig("no.pem"))


# --- in the middle ---


class _Wire:
    """Somebody on the way who sees all bytes and passes them on.

    `wrap_near` and `wrap_far` may make TLS sockets of his ends.
    """

    def __init__(self, target, wrap_near=None, wrap_far=None):
        self._target = target
        self._wraps = wrap_near, wrap_far
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._meet)]
        self.address = self._listener.getsockname()
        self.seen = {"near": b"", "far": b""}

    def __enter__(self):
        self._threads[0].start()
        return self

    def __exit__(self, *details):
        for thread in self._threads:
            thread.join(PATIENCE)
        self._listener.close()

    def _meet(self):
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        with near, far, contextlib.suppress(OSError):
            wrap_near, wrap_far = self._wraps
            near_end = wrap_near(near) if wrap_near else near
            far_end = wrap_far(far) if wrap_far else far
            back = threading.Thread(target=self._pass, args=("far", far_end, near_end))
            self._threads.append(back)
            back.start()
            self._pass("near", near_end, far_end)
            back.join(PATIENCE)
            for end in (near_end, far_end):
                end.close()

    def _pass(self, name, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen[name] += data
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_a_man_in_the_middle_is_noticed():
    """He ends TLS with a certificate of his own and begins it anew: both refuse."""
    his = Credentials(TlsConfig())
    with Peers("tls") as peers:
        wire = _Wire(
            peers.address,
            lambda near: his.listener.wrap_socket(near, server_side=True),
            lambda far: his.connector.wrap_socket(far),
        )
        with (
            wire,
            pytest.raises(AuthenticationError, match="another process is in between"),
        ):
            peers.here.connect("there", wire.address, soon())
        assert wire.seen["near"].startswith(b"jdist\0")  # He could read that much.
        wait_until(lambda: peers.there.refused == 1)


def test_a_faithful_wire_is_not_noticed():
    """The control: he passes on what he cannot read."""
    with Peers("tls") as peers, _Wire(peers.address) as wire:
        channel = peers.here.connect("there", wire.address, soon())
        assert channel.exchange(call(1), soon()).id == 1
        channel.close()


def test_a_flipped_bit_closes_the_channel():
    """TLS notices what is changed on the way."""
    with _tls_pair() as (near, far, between):
        near.send([b"a frame"], soon())
        cipher = bytearray(between.recv(1 << 16))
        cipher[-1] ^= 1
        far._stream._socket.setblocking(True)
        far._received.write(bytes(cipher))
        with pytest.raises(ChannelClosed, match=r"TLS connection broke .*(BAD|MAC)"):
            far.receive_into(memoryview(bytearray(100)), soon())


@contextlib.contextmanager
def _tls_pair():
    """Two ends that have shaken hands; what `near` sends afterwards goes nowhere."""
    credentials = Credentials(TlsConfig())
    ends = [Stream(end) for end in socket.socketpair()]
    accepting = Outcome(TlsStream, ends[1], credentials.listener, True, soon())
    near = TlsStream(ends[0], credentials.connector, False, soon())
    far = accepting.get()
    ours, between = socket.socketpair()
    between.settimeout(PATIENCE)
    near._stream.close()
    near._stream = Stream(ours)
    try:
        yield near, far, between
    finally:
        near._stream.close()
        far._stream.close()
        between.close()


# --- deadlines and endings ---


def test_a_deadline_after_encryption_cuts_off():
    """What is encrypted and not sent cannot be taken back."""
    with _tls_pair() as (near, _, between):
        with pytest.raises(CutOff, match="the peer did not read in time"):
            near.send([bytes(1 << 24)], time.monotonic() + 0.05)
        with pytest.raises(CutOff, match="the peer did not read in time"):
            near.send([b"not a byte of it fits"], time.monotonic() + 0.05)
        assert between.recv(1 << 16)


def test_a_silent_peer_during_the_tls_handshake():
    """Its deadline is that of the whole."""
    with Peers("tls") as peers, socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(TimeoutError, match="nothing was received in time"):
            peers.here.connect("there", silent.getsockname(), time.monotonic() + 0.05)
        peers.there.handshake_seconds = 0.05
        with socket.create_connection(peers.address) as sock:
            sock.settimeout(PATIENCE)
            sock.send(tls.FIRST_BYTE)
            assert closed_by_peer(sock) == b""


def test_what_is_not_tls():
    """A first byte promises TLS and noise follows."""
    with Peers("tls") as peers:
        with socket.create_connection(peers.address) as sock:
            sock.settimeout(PATIENCE)
            sock.send(tls.FIRST_BYTE + bytes(range(200)))
            assert len(closed_by_peer(sock)) < 100  # An alert at most.
        assert peers.connect().exchange(call(1), soon()).id == 1
    with Peers("tcp") as peers:
        with socket.create_connection(peers.address) as sock:
            sock.settimeout(PATIENCE)
            sock.send(tls.FIRST_BYTE)
            assert closed_by_peer(sock) == b""
        assert peers.connect().exchange(call(1), soon()).id == 1


def test_close_wakes_who_waits():
    """In TLS as without."""
    with Peers("tls") as peers:
        channel = peers.connect()
        waiting = Outcome(channel.receive)
        blocked(waiting.thread, Connection._next)
        channel.close("enough")
        with pytest.raises(ChannelClosed, match="enough"):
            waiting.get()
