"""Addresses, listening sockets, and what counts as this machine."""

import socket
import struct

import pytest

from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.sockets import (
    Address,
    Attempt,
    Listener,
    dial,
    is_loopback,
    parse_address,
)
from tests.rpc.sockets import nothing_left, soon, wait_until


@pytest.fixture(autouse=True)
def _leaks_nothing():
    with nothing_left():
        yield


@pytest.mark.parametrize(
    "address",
    ["host:80", ("host",), ("host", "80"), ("host", 0), (1, 2), None, ("h", 1, 2)],
)
def test_what_is_no_address(address):
    """Named with what it should be."""
    message = r"`connect\(address=...\)` must be \(host, port\) or another transport's"
    with pytest.raises(ValueError, match=message):
        parse_address(address)


def test_a_socket_that_reaches_itself(monkeypatch):
    """TCP allows it; no worker listens there all the same."""
    connect = socket.socket.connect

    def reach_itself(tcp, there):
        tcp.bind(("127.0.0.1", 0))
        connect(tcp, tcp.getsockname())

    monkeypatch.setattr(socket.socket, "connect", reach_itself)
    with pytest.raises(
        ChannelClosed, match=r"no worker listens at 127.0.0.1:1 \(it reached itself"
    ):
        dial(Address("127.0.0.1", 1), soon(), Attempt())


def test_a_socket_that_was_reset_at_once(monkeypatch):
    """A listener that ends resets what it has not accepted."""
    connect, linger = socket.socket.connect, struct.pack("ii", 1, 0)

    def be_reset(tcp, there):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            connect(tcp, listener.getsockname())
            accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        accepted.close()
        wait_until(lambda: not _has_peer(tcp))

    monkeypatch.setattr(socket.socket, "connect", be_reset)
    with pytest.raises(ChannelClosed, match=r"listens at 127.0.0.1:1 \(.*not conn"):
        dial(Address("127.0.0.1", 1), soon(), Attempt())


def _has_peer(connected):
    try:
        return bool(connected.getpeername())
    except OSError:
        return False


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("localhost", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("192.0.2.1", False),
        ("no.such.host.invalid", False),
    ],
)
def test_what_is_loopback(host, expected):
    """All interfaces are not, and what cannot be found is not."""
    assert is_loopback(host) is expected


def test_all_interfaces_are_advertised_as_one():
    """Nobody can connect to 0.0.0.0; on another platform there is a file to remove."""
    listener = Listener("0.0.0.0", 0)
    assert listener.address.host not in ("", "0.0.0.0")
    dial(listener.address._replace(unix=""), soon(), Attempt()).close()
    listener.close()
    listener.close()
