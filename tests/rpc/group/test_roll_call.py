"""The roll call of a run: who came, who did not, who should not have."""

import socket
import threading
import time

import pytest

from jdist.rpc.base.errors import AuthenticationError
from jdist.rpc.group.rendezvous import KEY_VARIABLE, ReservedPort
from jdist.rpc.group.roll_call import (
    _NO_KEY,
    AbsentRanks,
    RunPlace,
    _connected,
    roll_call,
)
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.frame import Frame
from jdist.rpc.wire.socket_transport import SocketTransport
from tests.rpc.roll_callers import Caller
from tests.rpc.sockets import names_unknown_at_first, nothing_left, soon

SOON = 0.3  # Of what must not happen: how long the call waits for those who never come.
PATIENCE = 60.0  # Of what must happen.


@pytest.fixture(autouse=True)
def _leaks_nothing(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with nothing_left():
        yield


@pytest.fixture
def address():
    """Where rank 0 is to listen: a port that is kept from others, as launch does."""
    with ReservedPort() as reserved:
        yield f"127.0.0.1:{reserved.port}"


def port_of(address):
    host, port = address.split(":")
    return host, int(port)


def connect(address):
    """A connection once rank 0 listens."""
    while True:
        try:
            return socket.create_connection(port_of(address), PATIENCE)
        except ConnectionRefusedError:
            threading.Event().wait(0.01)


def test_all_that_came_go_on(address):
    """In any order; rank 0 listens no more then."""
    callers = [Caller(address, rank, 3) for rank in (2, 0, 1)]
    assert [caller.outcome() for caller in callers] == [None] * 3
    with pytest.raises(ConnectionRefusedError, match="refused"):
        socket.create_connection(port_of(address), PATIENCE)
    socket.create_server(port_of(address)).close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_rank_0_listens_on_every_interface(host):
    """Which is the default over several machines."""
    with ReservedPort() as reserved:
        bind = f"[::]:{reserved.port}"
    callers = [Caller(f"{host}:{reserved.port}", rank, 2, bind=bind) for rank in (0, 1)]
    assert [caller.outcome() for caller in callers] == [None] * 2


def test_the_name_of_rank_0_is_published_late(address):
    """It is looked up where rank 0 listens and where the others connect."""
    named = f"rank0.svc:{port_of(address)[1]}"
    with names_unknown_at_first():
        callers = [Caller(named, rank, 2) for rank in (0, 1)]
        assert [caller.outcome() for caller in callers] == [None] * 2


def test_one_alone_needs_no_address():
    roll_call(RunPlace(0, 1, "nowhere:0", "nowhere:0"), SOON)


def test_all_hear_which_ranks_did_not_come(address):
    """Those that came, at the same moment."""
    other = Caller(address, 3, 5)  # it tries again until rank 0 listens
    first = Caller(address, 0, 5, timeout=1.0)
    for error in (first.outcome(), other.outcome()):
        assert isinstance(error, AbsentRanks)
        assert error.ranks == (1, 2, 4)
        assert "Missing ranks: [1, 2, 4]. Here: " in str(error)


def test_rank_0_did_not_come(address):
    """Its address is named, and why it does not answer."""
    expected = rf"Rank 0 of 2 did not answer rank 1 at {address} within 1 s: .*refused"
    with pytest.raises(AbsentRanks, match=expected) as caught:
        # Long enough for a first answer on a machine that is busy.
        roll_call(RunPlace(1, 2, address, address), 1.0)
    assert caught.value.ranks == (0,)


def test_what_is_said_of_rank_0_is_what_an_attempt_with_time_found(address):
    """On a busy machine the last attempt may begin when the time is over."""

    class Busy:
        asked = 0

        def connect(self, name, at, until):
            self.asked += 1
            if self.asked == 1:
                raise ChannelClosed("connection refused")
            time.sleep(max(0, until - time.monotonic()))
            raise TimeoutError("no time was left")

    place = RunPlace(1, 2, address, address)
    with pytest.raises(AbsentRanks, match=r"within 1 s: connection refused\."):
        _connected(Busy(), None, place, 1.0, time.monotonic() + 1.0)


def test_rank_0_left_while_others_waited(address):
    """At once: not when their time is over."""
    with ReservedPort() as reserved:
        at = f"127.0.0.1:{reserved.port}"
        with SocketTransport(":coordinator:", _NO_KEY, port=reserved.port) as transport:
            transport.serve(lambda channel: (channel.receive(soon()), channel.close()))
            other = Caller(at, 1, 2)
            error = other.outcome()
    assert isinstance(error, AbsentRanks)
    assert str(error).startswith("Rank 0 of 2 left while rank 1 waited with it")
    assert error.ranks == (0,)


def test_one_that_came_and_left_again_is_missing(address):
    """It would not come to what follows."""
    first = Caller(address, 0, 3, timeout=1.0)
    connect(address).close()
    with SocketTransport("rank1", _NO_KEY) as transport:
        channel = transport.connect("", port_of(address), soon())
        told = {"name": "rank1", "rank": 1, "world_size": 3, "timeout": PATIENCE}
        channel.send(Frame("group.join", 1, told | {"address": []}, None, []))
        channel.close()
    assert first.outcome().ranks == (1, 2)


def test_one_that_died_when_asked_may_come_again(address):
    """The others are asked a second time whether they live, and answer again."""
    first = Caller(address, 0, 3)
    connect(address).close()
    with SocketTransport("rank1", _NO_KEY) as transport:
        channel = transport.connect("", port_of(address), soon())
        told = {"name": "rank1", "rank": 1, "world_size": 3, "timeout": PATIENCE}
        channel.send(Frame("group.join", 1, told | {"address": []}, None, []))
        # Only those that came before the last one are asked: it must not come before
        # this one was noted, whose beat is answered after that.
        channel.send(Frame("group.beat", 2, {}, None, []))
        while channel.receive(soon()).id != 2:
            pass
        last = Caller(address, 2, 3)
        while channel.receive(soon()).kind != "group.probe":
            pass
        channel.close()
    again = Caller(address, 1, 3)
    assert [one.outcome() for one in (first, last, again)] == [None, None, None]


def test_two_of_one_rank_are_refused(address):
    """All hear it, not only the second."""
    callers = [Caller(address, rank, 3) for rank in (0, 1, 1)]
    for caller in callers:
        error = caller.outcome()
        assert isinstance(error, ValueError)
        assert "`RANK` must differ between processes. Got two of rank 1." in str(error)


def test_another_size_is_refused(address):
    """A group of three and one that believes in two."""
    first, other = Caller(address, 0, 3), Caller(address, 1, 2)
    for caller in (first, other):
        error = caller.outcome()
        assert isinstance(error, ValueError)
        assert "`WORLD_SIZE` must be 3 for every process" in str(error)
        assert "Got rank 1 of 2." in str(error)


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 80, b""])
def test_strangers_do_not_disturb(address, text):
    """A scanner, noise, or one that says nothing at all."""
    first = Caller(address, 0, 2)
    with connect(address) as stranger:
        stranger.sendall(text)
        other = Caller(address, 1, 2)
        assert first.outcome() is None
        assert other.outcome() is None


def test_another_key_is_refused(address, monkeypatch):
    """Where the run has one; the wait for the right one goes on."""
    monkeypatch.setenv(KEY_VARIABLE, "k" * 32)
    first = Caller(address, 0, 2, timeout=2.0)
    connect(address).close()
    monkeypatch.setenv(KEY_VARIABLE, "x" * 32)
    assert isinstance(Caller(address, 1, 2).outcome(), AuthenticationError)
    error = first.outcome()
    assert error.ranks == (1,)
    assert "'rank1'" in str(error)  # told of as a stranger
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ValueError, match="`JDIST_CLUSTER_KEY` must have at least 16"):
        roll_call(RunPlace(0, 2, address, address), SOON)
