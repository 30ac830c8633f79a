"""Ports that stay free for whom they were chosen, and the variables of a run."""

import socket
import struct

import pytest

from jdist.rpc.group.rendezvous import LOOPBACK, Rendezvous, ReservedPort
from jdist.rpc.wire.socket_transport import SocketTransport

# Linux 6.3: the kernel chooses a free port from this range only.
IP_LOCAL_PORT_RANGE = 51


@pytest.fixture
def reserved():
    with ReservedPort() as port:
        yield port.port


def test_a_server_can_use_the_port_again_and_again(reserved):
    for _ in range(3):
        with (
            socket.create_server((LOOPBACK, reserved)) as server,
            socket.create_connection((LOOPBACK, reserved), timeout=10) as client,
        ):
            connection, address = server.accept()
            connection.close()
            assert address == client.getsockname()


def test_rpcs_own_listener_can_too(reserved):
    for _ in range(2):
        transport = SocketTransport("first", b"k" * 32, port=reserved)
        assert transport.address[1] == reserved
        transport.close()


def test_before_that_connecting_is_refused_at_once(reserved):
    with pytest.raises(ConnectionRefusedError, match="refused"):
        socket.create_connection((LOOPBACK, reserved), timeout=10)


def test_who_asks_for_any_port_does_not_get_it(reserved):
    only = struct.pack("I", reserved << 16 | reserved)
    with socket.socket() as stranger:
        try:
            stranger.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, only)
        except OSError:
            pytest.skip("this kernel cannot be told which free port to choose")
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="already in use"):
            stranger.bind((LOOPBACK, 0))
    with socket.create_server((LOOPBACK, 0)) as server, socket.socket() as stranger:
        stranger.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, only)
        with pytest.raises(OSError, match=r"[Cc]annot assign"):
            stranger.connect(server.getsockname())


def test_a_port_in_use_is_not_reserved():
    with (
        socket.create_server((LOOPBACK, 0)) as server,
        pytest.raises(OSError, match="already in use"),
    ):
        ReservedPort(server.getsockname()[1])


def test_ranks_count_through_the_machines():
    second = Rendezvous(
        nprocs=3,
        nnodes=2,
        node_rank=1,
        address="fd00::7",
        port=29500,
        jax_port=29501,
        key="secret",
    )
    assert [second.rank(local) for local in range(3)] == [3, 4, 5]
    told = second.variables(2)
    assert told["JAX_COORDINATOR_ADDRESS"] == "[fd00::7]:29501"
    assert not [name for name in told if "BIND" in name]
    assert {name: told[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK")} == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "GROUP_RANK": "1",
    }
    assert "secret" not in repr(second)
