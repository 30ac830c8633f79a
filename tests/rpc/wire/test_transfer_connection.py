"""Connections that arrays pass by: order, limits, failures, and what is left over.

Both ends are in this process, and its one server gives itself what it offers.
"""

import contextlib
import gc
import os
import socket
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist import rpc
from jdist._compat import ArrayServer
from jdist.rpc.base.errors import ProtocolError, TransferFailed
from jdist.rpc.codec import Codec
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.wire import transfer_port
from jdist.rpc.wire.connection import Connection, Terms
from jdist.rpc.wire.frame import Frame, Missing
from jdist.rpc.wire.framing import Limits
from jdist.rpc.wire.stream import Stream
from jdist.rpc.wire.tls import TlsConfig
from jdist.rpc.wire.transfer import Transfer
from jdist.rpc.wire.transfer_connection import TransferConnection
from jdist.rpc.wire.transfer_port import Port
from tests.rpc.sockets import (
    Outcome,
    Peers,
    call,
    nothing_left,
    soon,
    wait_until,
)

LEAST = 1 << 12
ON = Transfer(least_bytes=LEAST, cpu=True)


def numbers(count=LEAST, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=count), "float32")


def bits(array):
    return np.asarray(array).tobytes()


@pytest.fixture
def new_port():
    """`new_port()`: a port, closed in the end."""
    with contextlib.ExitStack() as stack:

        def make(settings=ON, device=None):
            made = Port(settings, "tester", "127.0.0.1", device)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def ends(new_port):
    """Two connections with each other, and their ports."""
    with linked(new_port(), new_port()) as ends:
        yield ends


@contextlib.contextmanager
def linked(*ports, terms=None):
    made = []
    for end, name, port in zip(
        socket.socketpair(), ("left", "right"), ports, strict=True
    ):
        arguments = (Stream(end), name, terms or Terms(), None)
        if port is None:
            made.append(Connection(*arguments))
        else:
            made.append(TransferConnection(*arguments, lambda connection: None, port))
    try:
        yield made
    finally:
        for connection in made:
            connection.close()


def test_leaves_keep_their_places(ends):
    """Large JAX arrays go apart; small ones and NumPy's stay where they are."""
    left, right = ends
    large = [numbers(LEAST + k, k) for k in range(3)]
    sent = [
        large[0], np.arange(LEAST), numbers(5), large[1], large[2], np.ones(2),
    ]  # fmt: skip
    left.send(call(1, *sent))
    frame = right.receive(soon())
    assert list(frame.meta) == ["deadline"]
    assert [type(leaf) for leaf in frame.leaves] == [type(leaf) for leaf in sent]
    assert [bits(leaf) for leaf in frame.leaves] == [bits(leaf) for leaf in sent]
    assert (left._port.sent, right._port.received) == (3, 3)


def test_an_offer_ends_when_it_was_taken(ends):
    """The other side says so, on a frame that nobody above sees."""
    left, right = ends
    left.send(call(1, numbers()))
    assert left._port.offers == 1
    right.receive(soon())
    right.send(Frame("reply", 1, {}, None, []))
    assert left.receive(soon()).kind == "reply"
    reader = Outcome(left.receive, soon())
    wait_until(lambda: left._port.offers == 0)
    right.send(Frame("reply", 2, {}, None, []))
    assert reader.get().id == 2


@pytest.mark.parametrize("device", [None, 3])
def test_it_arrives_as_by_the_wire(new_port, device):
    """Device, commitment, weak type."""
    place = None if device is None else jax.devices("cpu")[device]
    weak = jnp.full(LEAST, 1.5) * 2
    weak = jax.lax.full_like(weak, 3.0)
    terms = Terms(device=place)
    for array in (numbers(), weak):
        got = []
        for ports in ((None, None), (new_port(), new_port(device=place))):
            with linked(*ports, terms=terms) as (left, right):
                left.send(call(1, array))
                got += right.receive(soon()).leaves
        wire, apart = got
        assert bits(wire) == bits(apart)
        assert apart.dtype == wire.dtype
        assert apart.devices() == wire.devices()
        assert (apart.committed, apart.weak_type) == (wire.committed, wire.weak_type)


@pytest.mark.parametrize("spec", [PartitionSpec("a"), PartitionSpec()])
def test_sharded_arrays_are_gathered(ends, spec):
    left, right = ends
    mesh = Mesh(np.array(jax.devices("cpu")[2:6]), ("a",))
    array = jax.device_put(numbers(4 * LEAST), NamedSharding(mesh, spec))
    left.send(call(1, array))
    expected = bits(array)
    array.delete()
    (got,) = right.receive(soon()).leaves
    assert len(got.devices()) == 1
    assert bits(got) == expected
    assert left._port.sent == 1


@pytest.mark.parametrize("end", ["delete", "donate"])
def test_the_sender_may_let_go_at_once(ends, end):
    """What is offered is a copy."""
    left, right = ends
    array = numbers()
    expected = bits(array)
    left.send(call(1, array))
    if end == "delete":
        array.delete()
    else:
        jax.jit(lambda x: x + x, donate_argnums=0)(array).block_until_ready()
    assert array.is_deleted()
    assert bits(right.receive(soon()).leaves[0]) == expected


def test_a_failed_computation_fails_on_the_sender(ends, monkeypatch):
    """As on the wire: nothing is sent, and no offer remains."""
    left, right = ends

    def fail(arrays):
        raise jax.errors.JaxRuntimeError("the computation failed")

    with monkeypatch.context() as patched:
        patched.setattr(transfer_port.jax, "block_until_ready", fail)
        with pytest.raises(jax.errors.JaxRuntimeError, match="the computation failed"):
            left.send(call(1, numbers()))
    assert left._port.offers == 0
    left.send(call(2, numbers(5)))
    assert right.receive(soon()).id == 2


# --- when arrays do not come ---


def missing(frame, kind=TransferFailed):
    codec = Codec(FunctionTable())
    with pytest.raises(kind, match=r"An array of worker 'right' did not arr"):
        codec.decode([0, 0], frame.leaves)
    return str(frame.leaves[0].error)


def wrongly_offered(server, number, arrays, seconds):
    """An offer of other arrays than the frame says."""
    server._server.await_pull(number, [array[:3] for array in arrays])


def never_offered(server, number, arrays, seconds):
    """No offer."""


def test_an_error_of_the_sender_reaches_who_needs_the_array(ends, monkeypatch):
    """And nobody else: the connection goes on."""
    left, right = ends
    with monkeypatch.context() as patched:
        patched.setattr(ArrayServer, "offer", wrongly_offered)
        left.send(call(1, np.arange(3), numbers()))
    left.send(call(2, numbers(seed=2)))
    frame = right.receive(soon())
    assert bits(frame.leaves.pop(0)) == bits(np.arange(3))
    assert "it cannot be pulled: " in missing(frame)
    assert bits(right.receive(soon()).leaves[0]) == bits(numbers(seed=2))
    reader = Outcome(left.receive, soon())
    wait_until(lambda: left._port.offers == 0)
    right.send(Frame("reply", 1, {}, None, []))
    reader.get()


def test_the_call_s_own_deadline_is_kept(ends, monkeypatch):
    """The callee does not wait longer than its caller does."""
    left, right = ends
    with monkeypatch.context() as patched:
        patched.setattr(ArrayServer, "offer", never_offered)
        frame = call(1, numbers())
        left.send(frame._replace(meta={"deadline": 0.2}))
    frame = right.receive(soon())
    text = missing(frame, rpc.RpcTimeout)
    assert "RPC ran for more than set timeout (200 ms)" in text
    assert "it had not come after 0.2" in text


def test_the_receiver_s_deadline_is_kept(ends, monkeypatch):
    """Who waits for an answer stops waiting; the connection is as good as before."""
    left, right = ends
    with monkeypatch.context() as patched:
        patched.setattr(ArrayServer, "offer", never_offered)
        left.send(call(1, numbers()))
    with pytest.raises(TimeoutError, match="had not come after"):
        right.receive(time.monotonic() + 0.2)
    left.send(call(2, numbers(seed=2)))
    assert bits(right.receive(soon()).leaves[0]) == bits(numbers(seed=2))


def test_without_any_deadline_there_is_patience(new_port, monkeypatch):
    """That of `Terms.stall`, as for bytes that do not come."""
    with linked(new_port(), new_port(), terms=Terms(stall=0.2)) as (left, right):
        monkeypatch.setattr(ArrayServer, "offer", never_offered)
        left.send(Frame("call", 1, {}, None, [numbers()]))
        assert isinstance(right.receive().leaves[0], Missing)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "", "[::1", "a:b:c"])
def test_an_address_where_nobody_is(ends, monkeypatch, address):
    left, right = ends
    monkeypatch.setattr(Port, "address", address)
    left.send(call(1, numbers())._replace(meta={"deadline": 0.2}))
    missing(right.receive(soon()), (TransferFailed, rpc.RpcTimeout))


# --- nothing is kept for ever ---


def resident():
    """MiB of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def test_receivers_that_never_pull_cost_no_more_than_the_budget(new_port):
    """What is beyond goes by the wire; the memory comes back with the connection."""
    # Pieces of memory beyond 32 MiB go back to the system as soon as they are free.
    # One program makes the array: XLA would free another array when it likes.
    array = jax.block_until_ready(jax.jit(lambda x: jnp.full(40 << 20, x))(np.uint8(7)))
    port = new_port(Transfer(least_bytes=LEAST, most_bytes=3 * array.nbytes, cpu=True))
    gc.collect()
    before = resident()
    with linked(port, new_port()) as (left, right):
        offered = [left._port.offer([array], left) for _ in range(5)]
        assert [number is None for number in offered] == [False] * 3 + [True] * 2
        assert port.offers == 3
        assert resident() - before > 100
        sender = Outcome(left.send, call(1, array))
        assert bits(right.receive(soon()).leaves[0]) == bits(array)
        sender.get()
        assert (port.sent, right._port.received) == (3, 0)
    assert port.offers == 0
    left._port.offer([numbers()], left)  # With it the server forgets the rest.
    wait_until(lambda: resident() - before < 64)


def test_an_offer_that_nobody_takes_ends(new_port, monkeypatch):
    """With the next one, after its time."""
    port = new_port()
    monkeypatch.setattr(transfer_port, "LIFETIME", 0.0)
    first = port.offer([numbers()], "owner")
    monkeypatch.setattr(transfer_port, "LIFETIME", 300.0)
    second = port.offer([numbers()], "owner")
    assert first != second
    assert port.offers == 1


def test_only_the_one_whose_offer_it_is_may_end_it(new_port):
    """Numbers of other connections are nobody's business."""
    port = new_port()
    number = port.offer([numbers()], "owner")
    port.settle(number, "somebody else", taken=False)
    port.settle(number + 1, "owner", taken=False)
    port.drop("somebody else")
    assert port.offers == 1
    port.drop("owner")
    assert port.offers == 0


def test_a_frame_that_was_not_sent_leaves_no_offer(ends):
    left, right = ends
    right.close()
    left.close()
    with pytest.raises(ConnectionError, match="closed on this side"):
        left.send(call(1, numbers()))
    assert left._port.offers == 0


def test_nothing_is_left_of_two_transports(new_port):
    """No thread, no socket, no offer; but for the process's one server."""
    array = numbers()
    first = new_port()
    number = first.offer([array], None)
    first.pull(first.address, number, [jax.typeof(array)], soon())
    with nothing_left(), Peers() as peers:
        peers.here.transfer(ON)
        peers.there.transfer(ON)
        answer = peers.connect().exchange(call(1, array), soon())
        assert bits(answer.leaves[0]) == bits(array)
        ports = [peers.here.port, peers.there.port]
        assert [(p.sent, p.received) for p in ports] == [(1, 1)] * 2
    assert [p.offers for p in ports] == [0, 0]


@pytest.mark.parametrize("who", ["here", "there"])
def test_both_sides_must_want_it(who):
    """Otherwise everything goes by the wire, as if neither did."""
    with Peers() as peers:
        getattr(peers, who).transfer(ON)
        channel = peers.connect()
        array = numbers()
        assert bits(channel.exchange(call(1, array), soon()).leaves[0]) == bits(array)
        assert getattr(peers, who).port.sent == 0
        assert type(channel) is Connection


def test_arrays_do_not_go_past_tls():
    """Where the wire is encrypted, that must be given up first."""
    rule = r"`RpcOptions\(transfer=...\)` sends arrays unencrypted.*insecure=True"
    with Peers("tls", tls=TlsConfig()) as peers:
        with pytest.raises(ValueError, match=rule):
            peers.here.transfer(ON)
        assert peers.here.port is None


# --- what a holder of the key may say ---

GOOD = ["127.0.0.1:1", 5, [[0, "float32", [3], False]]]
BAD = {
    "no row": ["127.0.0.1:1", 5, [3]],
    "nothing": None,
    "no address": [1, 5, GOOD[2]],
    "no number": ["127.0.0.1:1", "5", GOOD[2]],
    "a negative number": ["127.0.0.1:1", -5, GOOD[2]],
    "a long number": ["127.0.0.1:1", 5, GOOD[2], 5],
    "an unknown dtype": ["127.0.0.1:1", 5, [[0, "object", [3], False]]],
    "a negative extent": ["127.0.0.1:1", 5, [[0, "float32", [-3], False]]],
    "a negative place": ["127.0.0.1:1", 5, [[-1, "float32", [3], False]]],
    "no flag": ["127.0.0.1:1", 5, [[0, "float32", [3], 1]]],
    "too much": ["127.0.0.1:1", 5, [[0, "float32", [1 << 40], False]]],
    "too many": ["127.0.0.1:1", 5, GOOD[2] * 20],
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_description_closes_the_channel(new_port, what):
    terms = Terms(limits=Limits(leaves=16))
    with linked(None, new_port(), terms=terms) as (left, right):
        left.send(Frame("call", 1, {"transfer": BAD[what]}, None, []))
        with pytest.raises(ProtocolError, match=r"not say what|More than|No dtype"):
            right.receive(soon())
        with pytest.raises(ConnectionError, match="it sent what is no frame"):
            right.receive(soon())


@pytest.mark.parametrize("tree", [None, 5, [5], ["5", True], [5, 1], [5, True, 0]])
def test_what_is_no_answer_closes_the_channel(new_port, tree):
    with linked(None, new_port()) as (left, right):
        left.send(Frame("taken", 1, {}, tree, []))
        with pytest.raises(ProtocolError, match="What was taken is a number and"):
            right.receive(soon())
