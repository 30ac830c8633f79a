"""Who may talk: keys, names, versions, and attackers in all places."""

import contextlib
import itertools
import socket
import struct
import time

import pytest

from jdist.rpc.base.errors import AuthenticationError, ProtocolError, RpcError
from jdist.rpc.wire import handshake
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.handshake import (
    Identity,
    Proved,
    accept,
    check_key,
    connect,
)
from jdist.rpc.wire.stream import Stream
from tests.rpc.sockets import KEY, PATIENCE, Outcome, nothing_left, soon

HELLO = 6 + 2 + 4 + 128 + 128 + 32  # As docs/security.md says: 300.
PROOF = 32
HERE, THERE = Identity("here", KEY), Identity("there", KEY)


@pytest.fixture(autouse=True)
def _leaks_nothing():
    with nothing_left():
        yield


@contextlib.contextmanager
def _streams():
    ends = [Stream(end) for end in socket.socketpair()]
    try:
        yield ends
    finally:
        for stream in ends:
            stream.close()


def _ending(stream, function, *args):
    """Runs one side; its stream ends with it, as the transport sees to."""
    try:
        return function(stream, *args)
    except BaseException:
        stream.shut()
        raise


def _meet(connector, listener, peer="there"):
    """Both sides' outcomes."""
    with _streams() as (near, far):
        accepting = Outcome(_ending, far, accept, listener, soon())
        connecting = Outcome(_ending, near, connect, connector, peer, soon())
        accepting.thread.join(PATIENCE)
        connecting.thread.join(PATIENCE)
    return connecting, accepting


def test_both_learn_who_the_other_is():
    """Names and the abilities that both have."""
    able = HERE._replace(memory=True)
    connecting, accepting = _meet(able, THERE)
    assert connecting.get() == Proved("there", memory=False)
    assert accepting.get() == Proved("here", memory=False)
    connecting, accepting = _meet(able, THERE._replace(memory=True))
    assert connecting.get() == Proved("there", memory=True)
    assert accepting.get() == Proved("here", memory=True)


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_a_refusal_is_read_after_its_sender_has_closed(family):
    """The connector may be late: what it sends is then not taken any more."""
    if family == "unix":
        near, far = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
    handshake.refuse(far)
    far.close()
    stream = Stream(near)
    try:
        with pytest.raises(RpcError, match="takes no more connections: its process"):
            connect(stream, HERE, "there", soon())
    finally:
        stream.close()


def test_anybody_with_the_key_will_do():
    """Without an expected name, the one that was proved is told."""
    connecting, accepting = _meet(HERE, THERE, peer="")
    assert connecting.get().peer == "there"
    assert accepting.get().peer == "here"


def test_a_wrong_key():
    """Both sides learn it, and what to do."""
    connecting, accepting = _meet(HERE, THERE._replace(key=bytes(32)))
    for outcome, who in (
        (connecting, "place of worker 'there'"),
        (accepting, "'here'"),
    ):
        message = rf"{who} could not prove that it kno.* JDIST_CLUSTER_KEY, or RpcOpt"
        with pytest.raises(AuthenticationError, match=message):
            outcome.get()


def test_a_listener_that_is_gone_before_it_is_refused():
    """The refusal is lost; the reason is not."""
    with _streams() as (near, far):
        connecting = Outcome(_ending, near, connect, HERE, "there", soon())
        handshake.receive_exactly(far, HELLO, soon())
        far.send([handshake._pack_hello(THERE, "here"), bytes(PROOF)], soon())
        far.shut()
        with pytest.raises(AuthenticationError, match="could not prove"):
            connecting.get()


def test_another_worker_than_expected():
    """The listener knows the key, but is not who was asked for."""
    connecting, accepting = _meet(HERE, THERE, peer="elsewhere")
    message = "'there' listens where 'elsewhere' was expected"
    with pytest.raises(AuthenticationError, match=message):
        connecting.get()
    with pytest.raises(ChannelClosed, match="closed"):
        accepting.get()


def test_another_certificate():
    """Each side sees another certificate: neither accepts."""
    seen = HERE._replace(binding=b"1" * 32)
    connecting, accepting = _meet(seen, THERE._replace(binding=b"2" * 32))
    with pytest.raises(AuthenticationError, match="another process is in between"):
        connecting.get()
    with pytest.raises(AuthenticationError, match="'here' could not prove"):
        accepting.get()


def test_another_version(monkeypatch):
    """Both versions are named on both sides, and nothing is accepted."""
    with _streams() as (near, far):
        hello = bytearray(handshake._pack_hello(HERE, "there"))
        hello[6:8] = struct.pack(">H", 77)
        near.send([bytes(hello)], None)
        with pytest.raises(
            ProtocolError, match=r"'here' speaks version 77 .* version 2"
        ):
            accept(far, THERE, soon())
        answer = handshake.receive_exactly(near, HELLO, soon())
    monkeypatch.setattr(handshake, "VERSION", 77)
    with _streams() as (near, far):
        far.send([answer], None)
        message = r"'there' speaks version 2 .* version 77"
        with pytest.raises(ProtocolError, match=message):
            connect(near, HERE, "there", soon())


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n".ljust(HELLO), "does not speak jdist's protocol"),
        (b"jdist\0" + struct.pack(">HI", 2, 0) + b"\xff" * 288, "name is malformed"),
        (b"jdist\0" + struct.pack(">HI", 2, 0) + b"\x02a\n".ljust(288, b"\0"), "malf"),
        (b"jdist\0" + struct.pack(">HI", 2, 0) + b"\x01ab".ljust(288, b"\0"), "malf"),
        (b"jdist\0" + struct.pack(">HI", 2, 0) + bytes(288), "name is malformed"),
    ],
)
def test_what_is_no_hello(said, message):
    """Refused by the listener and by the connector."""
    with _streams() as (near, far):
        near.send([said], None)
        with pytest.raises(ProtocolError, match=message):
            accept(far, THERE, soon())
    with _streams() as (near, far):
        far.send([said], None)
        with pytest.raises(ProtocolError, match=message):
            connect(near, HERE, "there", soon())


def _relay(change):
    """An attacker between the two, who passes on what `change` makes of it."""
    with _streams() as (near, near_end), _streams() as (far_end, far):
        accepting = Outcome(_ending, far, accept, THERE, soon())
        connecting = Outcome(_ending, near, connect, HERE, "there", soon())
        legs = [(near_end, far_end, HELLO), (far_end, near_end, HELLO + PROOF)]
        legs.append((near_end, far_end, PROOF))
        for leg, (source, target, size) in enumerate(legs):
            try:
                data = handshake.receive_exactly(source, size, soon())
                target.send([change(leg, data)], soon())
            except ChannelClosed:
                break
        near_end.shut()
        far_end.shut()
        connecting.thread.join(PATIENCE)
        accepting.thread.join(PATIENCE)
    return connecting, accepting


def test_a_faithful_relay_is_not_noticed():
    """The control of the next test: unchanged messages are accepted."""
    connecting, accepting = _relay(lambda leg, data: data)
    assert connecting.get().peer == "there"
    assert accepting.get().peer == "here"


@pytest.mark.parametrize("leg", [0, 1, 2])
def test_every_changed_bit_is_noticed(leg, rng):
    """One bit of any message, at random in every field: the listener never accepts."""
    edges = [0, 6, 8, 12, 140, 268, HELLO, HELLO + PROOF] if leg < 2 else [0, PROOF]
    edges = edges[: 7 if leg == 0 else 8]
    for begin, end in itertools.pairwise(edges):
        for _ in range(4):
            at, bit = int(rng.integers(begin, end)), 1 << int(rng.integers(8))

            def change(now, data, at=at, bit=bit):
                if now != leg:
                    return data
                changed = bytearray(data)
                changed[at] ^= bit
                return bytes(changed)

            connecting, accepting = _relay(change)
            with pytest.raises((AuthenticationError, ProtocolError, ChannelClosed)):
                accepting.get()
            if leg < 2:
                with pytest.raises((AuthenticationError, ProtocolError, ChannelClosed)):
                    connecting.get()


def test_a_reflected_proof_is_none():
    """A listener without the key sends back all it gets: it proves nothing."""
    with _streams() as (near, far):
        connecting = Outcome(_ending, near, connect, HERE, "", soon())
        hello = handshake.receive_exactly(far, HELLO, soon())
        far.send([hello, bytes(PROOF)], soon())
        with pytest.raises(AuthenticationError, match="could not prove"):
            connecting.get()


def test_a_proof_cannot_be_had_from_the_victim_itself():
    """The attacker lets the victim's own listener answer the victim's challenge.

    It listens in place of "there", connects back to the listener of "here" and relays.
    The proof it gets is that of a listener named "here", so the name gives it away; a
    connector that expects nobody in particular learns that it reached itself.
    """
    connecting, accepting = _meet(HERE, HERE, peer="there")
    with pytest.raises(AuthenticationError, match="'here' listens where 'there' was"):
        connecting.get()
    with pytest.raises(ChannelClosed, match="closed"):
        accepting.get()


def test_the_listeners_proof_is_none_of_a_connector():
    """An attacker returns the listener's own proof in place of its own."""
    with _streams() as (near, far):
        accepting = Outcome(_ending, far, accept, THERE, soon())
        near.send([handshake._pack_hello(HERE, "there")], None)
        answer = handshake.receive_exactly(near, HELLO + PROOF, soon())
        near.send([answer[HELLO:]], None)
        with pytest.raises(
            AuthenticationError, match="connected as worker 'here' could"
        ):
            accepting.get()


def test_a_replayed_handshake_is_refused():
    """What was once accepted is not accepted again: the listener's nonce is new."""
    sent = []

    def record(leg, data):
        sent.append((leg, data))
        return data

    _relay(record)[1].get()
    with _streams() as (near, far):
        accepting = Outcome(_ending, far, accept, THERE, soon())
        near.send([data for leg, data in sent if leg != 1], None)
        with pytest.raises(AuthenticationError, match="could not prove"):
            accepting.get()
    with _streams() as (near, far):
        far.send([data for leg, data in sent if leg == 1], None)
        with pytest.raises(AuthenticationError, match="could not prove"):
            connect(near, HERE, "there", soon())


def test_a_trickle_does_not_extend_the_deadline():
    """The deadline is for all of it: whoever sends a byte now and then is cut off."""
    with _streams() as (near, far):
        begun = time.monotonic()
        accepting = Outcome(_ending, far, accept, THERE, begun + 0.3)
        hello = handshake._pack_hello(HERE, "there")
        with contextlib.suppress(ChannelClosed):
            for byte in hello[:-1]:
                near.send([bytes([byte])], soon())
                accepting.thread.join(0.01)
        with pytest.raises(TimeoutError, match="nothing was received in time"):
            accepting.get()


def test_a_silent_listener():
    """Connected, but nobody answers."""
    message = "nothing was received in time"
    with _streams() as (near, _), pytest.raises(TimeoutError, match=message):
        connect(near, HERE, "there", time.monotonic() + 0.05)


def test_the_key_is_not_shown():
    """In logs and tracebacks."""
    assert repr(HERE) == "Identity(name='here', key=...)"
    assert KEY.hex() not in repr(HERE)


def test_keys_are_checked():
    """Bytes, and enough of them to be random."""
    assert check_key(bytearray(KEY)) == KEY
    with pytest.raises(TypeError, match=r"must be bytes. Got a str. rpc.new_cluster"):
        check_key("secret")
    with pytest.raises(ValueError, match=r"at least 16 random bytes. Got 15 bytes"):
        check_key(bytes(15))
