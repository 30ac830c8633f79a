"""The roll call before a group starts: who came, who did not, who should not have."""

import socket
import threading

import pytest

from jdist.data_parallel.data.roll_call import Place, ProcessLost, roll_call
from jdist.rpc.group.rendezvous import ReservedPort

SOON = 0.3  # Of what must not happen: how long the call waits for those who never come.
PATIENCE = 60.0  # Of what must happen.


@pytest.fixture
def address():
    """Where rank 0 is to listen: a port that is kept from others, as launch does."""
    with ReservedPort() as reserved:
        yield f"127.0.0.1:{reserved.port}"


class Caller(threading.Thread):
    """A thread that answers the roll call, and keeps what came of it."""

    def __init__(self, address, rank, size, timeout=PATIENCE):
        super().__init__(daemon=True)
        self.place = Place(rank, size, address, address)
        self.timeout = timeout
        self.error = None
        self.start()

    def run(self):
        try:
            roll_call(self.place, self.timeout)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def outcome(self):
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.error


class Coordinator(threading.Thread):
    """In the place of JAX's coordinator: listens when rank 0 no longer does."""

    def __init__(self, address, caller, others):
        super().__init__(daemon=True)
        self.address = address
        self.caller = caller
        self.others = others
        self.start()

    def run(self):
        self.caller.join(PATIENCE)
        host, port = self.address.split(":")
        with socket.create_server((host, int(port))) as server:
            server.settimeout(PATIENCE)
            for _ in range(self.others):
                server.accept()[0].close()


def connect(address):
    """A connection once rank 0 listens."""
    host, port = address.split(":")
    while True:
        try:
            return socket.create_connection((host, int(port)), PATIENCE)
        except ConnectionRefusedError:
            threading.Event().wait(0.01)


def test_all_that_came_go_on(address):
    """In any order; the others only when somebody listens for JAX."""
    early = Caller(address, 2, 3)
    first = Caller(address, 0, 3)
    late = Caller(address, 1, 3)
    coordinator = Coordinator(address, first, others=2)
    assert [caller.outcome() for caller in (early, first, late)] == [None] * 3
    coordinator.join(PATIENCE)


def test_one_alone_needs_nobody():
    """Without an address that anybody could listen at."""
    roll_call(Place(0, 1, "nowhere:0", "nowhere:0"), SOON)


def test_all_hear_who_did_not_come(address):
    """By rank, on those that came, at the same moment."""
    first, other = Caller(address, 0, 5, timeout=SOON), Caller(address, 3, 5)
    for error in (first.outcome(), other.outcome()):
        assert isinstance(error, ProcessLost)
        assert error.ranks == (1, 2, 4)
        assert "Ranks 1, 2, 4 of 5 did not come within" in str(error)


def test_rank_0_did_not_come(address):
    """Its address is named, and why it does not answer."""
    place = Place(1, 2, address, address)
    expected = (
        rf"Rank 0 of 2 did not answer rank 1 at {address} within 0.3 s: .*refused"
    )
    with pytest.raises(ProcessLost, match=expected) as caught:
        roll_call(place, SOON)
    assert caught.value.ranks == (0,)


def test_one_that_came_and_left_again_is_missing(address):
    """It would not come to what follows."""
    first = Caller(address, 0, 3, timeout=SOON)
    with connect(address) as connection:
        connection.sendall(b"1 of 3\n")
    assert first.outcome().ranks == (1, 2)


def test_two_of_one_rank_are_refused(address):
    """Everybody hears it, not only the second."""
    first, one = Caller(address, 0, 3), Caller(address, 1, 3)
    other = Caller(address, 1, 3)
    for caller in (first, one, other):
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
    """A scanner, noise, or somebody who says nothing at all."""
    first = Caller(address, 0, 2)
    with connect(address) as stranger:
        stranger.sendall(text)
        coordinator = Coordinator(address, first, others=1)
        other = Caller(address, 1, 2)
        assert first.outcome() is None
        assert other.outcome() is None
        coordinator.join(PATIENCE)
