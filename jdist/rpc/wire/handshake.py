"""Mutual authentication of two workers by the cluster's key.

It happens before anything is decoded, with messages of fixed size only:

    connector -> listener   HELLO   version, abilities, both names, nonce a
    listener  -> connector  HELLO   version, abilities, both names, nonce b
                            PROOF   HMAC(key, "listener"  | binding | HELLO | HELLO)
    connector -> listener   PROOF   HMAC(key, "connector" | binding | HELLO | HELLO)
                            or 32 zero bytes, if the listener's proof is not right

Each proof covers both hellos as they were sent, so versions, names and both nonces
cannot be altered, nor a proof be used in another handshake (the nonces are new) or in
the other direction (the labels differ). `binding` is the SHA-256 of the listener's TLS
certificate as this side sees it, or 32 zero bytes without TLS: a man in the middle must
show another certificate, and then the two sides do not agree on what was proved.

The key itself never travels. A peer that talks to a worker can try guesses against the
proof it got, offline, so the key must be random: `new_cluster_key` makes one.
"""

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
from typing import NamedTuple

from jdist._errors import type_error, value_error
from jdist._tree import type_name
from jdist.rpc.base.errors import AuthenticationError, ProtocolError, RpcError
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.wire.channel import NotSent
from jdist.rpc.wire.tls import ByteStream

NO_BINDING = bytes(32)
SHORTEST_KEY = 16
SAME_KEY = "JDIST_CLUSTER_KEY, or RpcOptions(key=...), must be the same on all workers."

VERSION = 2
"""Version of the handshake and of frames. Workers of two versions do not talk."""

_MAGIC = b"jdist\x00"
_REFUSAL = b"jdist\x01"
_NAME = 128
_NONCE = 32
_HELLO = struct.Struct(f">6sHI{_NAME}s{_NAME}s{_NONCE}s")
_PROOF = hashlib.sha256().digest_size
_WRONG_KEY = bytes(_PROOF)
"""Sent in place of the connector's proof, so that the listener learns what is wrong
too."""

_LISTENER = b"jdist listener\x00\x00"
_CONNECTOR = b"jdist connector\x00"
_MEMORY = 1  # the ability to take large arrays as memory descriptors

REMEDY = (
    "Every synchronous call that is under way has a connection: make fewer at a time, "
    "use rpc_async, whose calls share one, or raise the limit with `ulimit -n`."
)
"""Remedy for a process that may open no more files."""


class Proved(NamedTuple):
    """The outcome of a handshake.

    Attributes:
      peer: The other side's name, which its proof covers.
      memory: Whether both sides take large arrays as memory descriptors.
    """

    peer: str
    memory: bool


class Identity(NamedTuple):
    """One side of a handshake.

    Attributes:
      name: Name of this worker.
      key: Key of the cluster.
      memory: Whether this side takes large arrays as memory descriptors.
      binding: SHA-256 of the listener's certificate, or NO_BINDING without TLS.
    """

    name: str
    key: bytes
    memory: bool = False
    binding: bytes = NO_BINDING

    def __repr__(self) -> str:
        return f"Identity(name={self.name!r}, key=...)"


class _Hello(NamedTuple):
    version: int
    memory: bool
    name: str


def check_key(key: object, call: str = "SocketTransport(key=...)") -> bytes:
    """Checks a key, which must not be so short that it could be guessed.

    Args:
      key: The secret.
      call: Function and argument, or the variable, for the messages.

    Raises:
      TypeError: Not bytes.
      ValueError: Shorter than SHORTEST_KEY bytes.
    """
    remedy = "rpc.new_cluster_key() makes one."
    if not isinstance(key, bytes | bytearray):
        raise type_error(call, "must be bytes", type_name(key), remedy)
    if len(key) < SHORTEST_KEY:
        rule = f"must have at least {SHORTEST_KEY} random bytes"
        raise value_error(call, rule, f"{len(key)} bytes", remedy)
    return bytes(key)


def connect(
    stream: ByteStream, me: Identity, peer: str, deadline: float | None
) -> Proved:
    """The connecting side's handshake.

    Args:
      stream: A new connection.
      me: This side.
      peer: The worker that must be there; empty: any that knows the key.
      deadline: For all of it.

    Raises:
      AuthenticationError: The listener does not know the key, or is another worker.
      ProtocolError: It speaks another version, or is no worker at all.
      RpcError: Its process has no descriptor or thread for this connection.
      ChannelClosed, TimeoutError: As `Stream.receive_into`.
    """
    mine = _pack_hello(me, peer)
    # A listener that `refuse`s may have closed before this is sent; its answer can
    # still be read.
    with contextlib.suppress(NotSent):
        stream.send([mine], deadline)
    theirs = receive_exactly(stream, _HELLO.size, deadline)
    hello = _read_hello(theirs)
    _check_version(hello)
    proof = receive_exactly(stream, _PROOF, deadline)
    # In constant time: a comparison that ends at the first wrong byte would reveal its
    # position.
    if not hmac.compare_digest(proof, _prove(_LISTENER, me, mine, theirs)):
        with contextlib.suppress(ConnectionError, TimeoutError):
            stream.send([_WRONG_KEY], deadline)
        raise AuthenticationError(
            f"What listens {f'in place of worker {peer!r}' if peer else 'there'} could "
            f"not prove that it knows the cluster's key: the keys differ, or another "
            f"process is in between. {SAME_KEY}"
        )
    if peer and hello.name != peer:
        raise AuthenticationError(
            f"Worker {hello.name!r} listens where {peer!r} was expected."
        )
    stream.send([_prove(_CONNECTOR, me, mine, theirs)], deadline)
    return Proved(hello.name, me.memory and hello.memory)


def refuse(sock: socket.socket) -> None:
    """Refuses a connector because this process has no descriptor or thread for it."""
    # The answer has a hello's size and proves nothing: believing it costs the connector
    # no more than a closed connection would. Where TLS is expected it is no answer.
    sock.setblocking(False)
    sock.send(_REFUSAL.ljust(_HELLO.size, b"\x00"))


def accept(stream: ByteStream, me: Identity, deadline: float | None) -> Proved:
    """The listening side's handshake.

    Args:
      stream: A connection just accepted.
      me: This side.
      deadline: For all of it, however slowly the other side sends.

    Raises:
      AuthenticationError: The connector does not know the key, or another one.
      ProtocolError: It speaks another version, or is no worker at all.
      ChannelClosed, TimeoutError: As `Stream.receive_into`.
    """
    theirs = receive_exactly(stream, _HELLO.size, deadline)
    hello = _read_hello(theirs)
    mine = _pack_hello(me, hello.name)
    # Sent to a peer of another version too, so that its error can name both versions.
    stream.send([mine, _prove(_LISTENER, me, theirs, mine)], deadline)
    _check_version(hello)
    proof = receive_exactly(stream, _PROOF, deadline)
    if not hmac.compare_digest(proof, _prove(_CONNECTOR, me, theirs, mine)):
        raise AuthenticationError(
            f"What connected as worker {hello.name!r} could not prove that it knows "
            f"the cluster's key. {SAME_KEY}"
        )
    return Proved(hello.name, me.memory and hello.memory)


def _prove(label: bytes, me: Identity, connector: bytes, listener: bytes) -> bytes:
    # Every part has a fixed size, so no two different sets of parts join alike.
    message = label + me.binding + connector + listener
    return hmac.digest(me.key, message, "sha256")


def _pack_hello(me: Identity, peer: str) -> bytes:
    nonce = secrets.token_bytes(_NONCE)
    names = _pack_name(me.name), _pack_name(peer)
    abilities = _MEMORY if me.memory else 0
    return _HELLO.pack(_MAGIC, VERSION, abilities, *names, nonce)


def _pack_name(name: str) -> bytes:
    data = name.encode("ascii")
    return bytes([len(data)]) + data


def _read_hello(data: bytes) -> _Hello:
    magic, version, abilities, name, _, _ = _HELLO.unpack(data)
    if magic == _REFUSAL:
        raise RpcError(
            "The worker there takes no more connections: its process may open no more "
            f"files, or start no more threads. {REMEDY}"
        )
    if magic != _MAGIC:
        raise ProtocolError("The other side does not speak jdist's protocol.")
    return _Hello(version, bool(abilities & _MEMORY), _read_name(name))


def _read_name(field: bytes) -> str:
    size = field[0]
    name, padding = field[1 : 1 + size], field[1 + size :]
    try:
        if size >= _NAME or any(padding):
            raise ValueError("not within its field")
        return WorkerInfo(name.decode("ascii"), 0).name
    except ValueError as error:
        raise ProtocolError(f"The other side's name is malformed: {error}") from error


def _check_version(hello: _Hello) -> None:
    if hello.version != VERSION:
        raise ProtocolError(
            f"Worker {hello.name!r} speaks version {hello.version} of jdist's protocol "
            f"and this one version {VERSION}: install one jdist everywhere."
        )


def receive_exactly(stream: ByteStream, size: int, deadline: float | None) -> bytes:
    """Receives this many bytes; raises as `Stream.receive_into`."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        rest = rest[stream.receive_into(rest, deadline, whole=True) :]
    return bytes(data)
