"""The roll call before a group starts, in the words of who trains over replicas."""

import socket
import threading

import pytest

from jdist.data_parallel.data.process_group import ProcessLost, _call_roll
from jdist.rpc.group.rendezvous import ReservedPort
from jdist.rpc.group.roll_call import RunPlace
from tests.rpc import roll_callers

SOON = 0.3  # Of what must not happen: how long the call waits for those who never come.
PATIENCE = 60.0  # Of what must happen.


@pytest.fixture
def address():
    """Where rank 0 is to listen: a port that is kept from others, as launch does."""
    with ReservedPort() as reserved:
        yield f"127.0.0.1:{reserved.port}"


class Caller(roll_callers.Caller):
    """One that trains over replicas."""

    answer = staticmethod(_call_roll)


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


def test_the_others_go_on_when_jaxs_coordinator_listens(address):
    """In any order; none of them takes rank 0's roll call for it."""
    early = Caller(address, 2, 3)
    first = Caller(address, 0, 3)
    late = Caller(address, 1, 3)
    coordinator = Coordinator(address, first, others=2)
    assert [caller.outcome() for caller in (early, first, late)] == [None] * 3
    coordinator.join(PATIENCE)


def test_jaxs_coordinator_that_never_listens_is_rank_0s_loss(address):
    first, other = Caller(address, 0, 2), Caller(address, 1, 2, timeout=2.0)
    assert first.outcome() is None
    error = other.outcome()
    assert isinstance(error, ProcessLost)
    assert error.ranks == (0,)
    assert f"Rank 0 of 2 did not answer rank 1 at {address} within 2 s" in str(error)


def test_all_hear_who_did_not_come(address):
    """By rank, on those that came, at the same moment."""
    first, other = Caller(address, 0, 5, timeout=SOON), Caller(address, 3, 5)
    for error in (first.outcome(), other.outcome()):
        assert isinstance(error, ProcessLost)
        assert error.ranks == (1, 2, 4)
        assert str(error).startswith("Ranks 1, 2, 4 of 5 did not come within")


def test_rank_0_did_not_come(address):
    """Its address is named, and why it does not answer."""
    place = RunPlace(1, 2, address, address)
    expected = (
        rf"Rank 0 of 2 did not answer rank 1 at {address} within 0.3 s: .*refused"
    )
    with pytest.raises(ProcessLost, match=expected) as caught:
        _call_roll(place, SOON)
    assert caught.value.ranks == (0,)
