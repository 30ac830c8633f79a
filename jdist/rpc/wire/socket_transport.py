"""Channels over sockets, between processes of one machine and between machines.

A peer must prove that it knows the cluster's key before anything of it is decoded.
Until then its connection costs the listener a thread and a descriptor, for a limited
time, and the number of such connections is limited.
"""

import contextlib
import functools
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jdist._errors import value_error
from jdist.rpc.base.errors import AuthenticationError, RpcError
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.wire import handshake, memory
from jdist.rpc.wire.channel import Channel, ChannelClosed
from jdist.rpc.wire.connection import Connection, Terms
from jdist.rpc.wire.frame import Limits
from jdist.rpc.wire.handshake import NO_BINDING, REMEDY, Identity
from jdist.rpc.wire.silent_connections import SilentConnections
from jdist.rpc.wire.sockets import (
    LOOPBACK,
    Address,
    Attempt,
    Listener,
    dial,
    is_loopback,
    is_unix,
    out_of_files,
    parse_address,
    same_user,
)
from jdist.rpc.wire.stream import Polling, Stream
from jdist.rpc.wire.tls import (
    FIRST_BYTE,
    Credentials,
    TlsConfig,
    TlsStream,
    connector_context,
)

_ENDED = "this worker has ended"


def _spare_descriptor() -> int:
    """Opens a descriptor to be given up when a connection must be refused."""
    # Without it a process out of descriptors could not accept the connection, and so
    # not say why it refuses it.
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _no_more_files(peer: str) -> str:
    import resource  # Windows, where this module can be imported, has none

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"This process may open no more files (their number is limited to {most}), and "
        f"a connection to {peer!r} is one. {REMEDY}"
    )


class SocketTransport:
    """A `jdist.rpc.wire.channel.Transport` over Unix sockets, TCP and TLS.

    Listening begins with the constructor; `serve` begins to accept.

    Args:
      name: Name of this worker; proved to its peers together with the key.
      key: The cluster's secret, random bytes.
      host: Interface to listen on.
      port: TCP port; 0 for any free one.
      device: Where received JAX arrays are placed; None for JAX's default.
      limits: How much a peer may announce.
      tls: Certificates. By default TLS is used off loopback, with a self-signed
        certificate; a configuration given here makes TCP on loopback use TLS too.
      insecure: Plain TCP off loopback: a machine on the way can read and change all
        that is sent. The key must be proved nevertheless.

    Attributes:
      address: Address at which others reach this worker; a list of plain values.
      handshake_seconds: How long a stranger may take for its proof. Settable.
      most_strangers: How many may be doing so at once. Others wait in the system's
        queue. Settable.
      crowded_seconds: While others wait, the time after which the one who has taken
        the longest has to go. Settable.
      polling: Seconds to look for a message before sleeping, see `Polling`; 0 for
        never. Settable.
      refused: Connections that ended without a proof.
      on_refused: Called with a text for each peer that could not prove the key;
        settable.

    Raises:
      TypeError: The key is not bytes.
      ValueError: It is too short; or `tls` and `insecure` contradict each other.
      Unavailable: A certificate has to be made and `cryptography` is not installed.
      OSError: The host is not of this machine, or the port is taken.
    """

    handshake_seconds = 10.0
    most_strangers = 64
    crowded_seconds = 1.0
    polling = 0.0
    on_refused: Callable[[str], None] | None = None

    def __init__(
        self,
        name: str,
        key: bytes,
        host: str = LOOPBACK,
        port: int = 0,
        *,
        device: jax.Device | None = None,
        limits: Limits | None = None,
        tls: TlsConfig | None = None,
        insecure: bool = False,
    ) -> None:
        if tls is not None and insecure:
            rule = "must not be True when certificates are given"
            raise value_error("SocketTransport(insecure=...)", rule, "both")
        self._me = Identity(name, handshake.check_key(key))
        self._terms = Terms(limits or Limits(), device)
        self._insecure = insecure
        self._forced = tls is not None
        self._credentials = None
        if tls is not None or not (insecure or is_loopback(host)):
            self._credentials = Credentials(tls or TlsConfig())
        self._listener = Listener(host, port)
        self.address = list(self._listener.address)
        self._pool = memory.MemoryPool() if memory.available() else None
        self.refused = 0
        self._lock = threading.Lock()
        self._strangers: dict[Any, float] = {}  # streams, since when; oldest first
        self._room = threading.Condition(self._lock)
        self._attempts: dict[Attempt, str] = {}  # to which worker
        self._abandoned: dict[str, str] = {}
        self._connections: set[Connection] = set()
        self._threads = ThreadPool(f"{name} reads", 1)
        self._silent = SilentConnections(self._connections, self._threads)
        self._accepting: threading.Thread | None = None
        self._on_channel: Callable[[Channel], None]  # from `serve` on
        self._closed = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._full = False
        self._spare = _spare_descriptor()

    def __enter__(self) -> "SocketTransport":
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    # --- connecting ---

    def connect(
        self, peer: str, address: Any, deadline: float | None = None
    ) -> Connection:
        """Opens a channel; see `Transport.connect`.

        Args:
          peer: Name of the worker that must listen there. Empty for any that knows the
            key, as the coordinator; the channel's `peer` is then the name it proved.
          address: What the peer's `address` is, or `(host, port)`.
          deadline: For all of it.
        """
        found, attempt = parse_address(address), Attempt()
        with self._lock:
            if self._closed.is_set():
                raise ChannelClosed(_ENDED)
            if peer in self._abandoned:
                raise ChannelClosed(self._abandoned[peer])
            self._attempts[attempt] = peer
        try:
            return self._connect(found, peer, deadline, attempt)
        except (ChannelClosed, TimeoutError) as error:
            if attempt.given_up is not None:
                raise ChannelClosed(attempt.given_up) from error
            raise
        except OSError as error:
            if out_of_files(error):
                raise RpcError(_no_more_files(peer)) from error
            raise
        finally:
            with self._lock:
                self._attempts.pop(attempt, None)

    def abandon(self, peer: str, reason: str) -> None:
        """Closes every channel to and from `peer`; see `Transport.abandon`."""
        with self._lock:
            self._abandoned.setdefault(peer, reason)
            under_way = [one for one, to in self._attempts.items() if to == peer]
            connections = [one for one in self._connections if one.peer == peer]
        for attempt in under_way:
            attempt.give_up(reason)
        for connection in connections:
            connection.close(reason)

    def _connect(
        self, address: Address, peer: str, deadline: float | None, attempt: Attempt
    ) -> Connection:
        sock = dial(address, deadline, attempt)
        try:
            return self._connected(Stream(sock), is_unix(sock), peer, deadline)
        except BaseException as error:
            sock.close()
            if isinstance(error.__cause__, ssl.SSLError):
                raise AuthenticationError(f"TLS was refused: {error}.") from error
            raise

    def _connected(
        self, stream: Stream, local: bool, peer: str, deadline: float | None
    ) -> Connection:
        tls, binding = None, NO_BINDING
        if not local and self._wants_tls(stream):
            known = self._credentials
            context = connector_context() if known is None else known.connector
            tls = TlsStream(stream, context, False, deadline)
            binding = tls.peer_fingerprint()
        me = self._identity(local, binding)
        proved = handshake.connect(tls or stream, me, peer, deadline)
        return self._adopt(stream, tls, proved)

    def _wants_tls(self, stream: Stream) -> bool:
        return self._forced or not (self._insecure or is_loopback(stream.peer_host()))

    def _identity(self, local: bool, binding: bytes) -> Identity:
        able = local and self._pool is not None
        return self._me._replace(memory=able, binding=binding)

    def _adopt(
        self, stream: Stream, tls: TlsStream | None, proved: handshake.Proved
    ) -> Connection:
        stream.passes_descriptors = proved.memory
        if self.polling:
            stream.polling = Polling(self.polling)
        pool = self._pool if proved.memory else None
        connection = Connection(
            stream, proved.peer, self._terms, self._silent, pool, self._forget, tls
        )
        with self._lock:
            self._connections.add(connection)
        # `close` may have taken its copy of the connections before this one was added.
        if self._closed.is_set():
            connection.close(_ENDED)
        return connection

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    # --- accepting ---

    def serve(self, on_channel: Callable[[Channel], None]) -> None:
        """Begins to accept; see `Transport.serve`."""
        if self._closed.is_set():
            return
        self._on_channel = on_channel
        thread = threading.Thread(
            target=self._accept, name=f"{self._me.name} listens", daemon=True
        )
        thread.start()
        self._accepting = thread

    def close(self) -> None:
        """Stops accepting, closes every channel, joins its threads; see `Transport`.

        A thread that still executes a call after a second is left to end by itself.
        """
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            self._room.notify_all()
        until = time.monotonic() + 1.0
        self._wake.close()
        if self._accepting is not None:
            self._accepting.join(until - time.monotonic())
        # Before the channels: a peer that sees its own close finds the port free.
        self._listener.close()
        # No strangers and no connections are added from here on.
        with self._lock:
            for stream in self._strangers:
                stream.shut()
            connections, attempts = list(self._connections), list(self._attempts)
        for attempt in attempts:
            attempt.give_up(_ENDED)
        for connection in connections:
            connection.close(_ENDED)
        self._threads.close(until - time.monotonic())
        self._silent.close()
        self._woken.close()
        os.close(self._spare)
        if self._pool is not None:
            self._pool.close()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            for source in (*self._listener.sockets, self._woken):
                selector.register(source, selectors.EVENT_READ)
            while not self._closed.is_set():
                for ready, _ in selector.select():
                    if ready.fileobj is not self._woken:
                        assert isinstance(ready.fileobj, socket.socket)
                        self._accept_from(ready.fileobj)

    def _accept_from(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the peer is gone already
        except OSError:
            self._make_room(listening)
            return
        self._full = False
        try:
            self._welcome(sock)
        except OSError:
            self._dismiss(sock)  # it was gone before the handshake

    def _make_room(self, listening: socket.socket) -> None:
        """Frees a descriptor or refuses a connection, at the limit of open files."""
        # In three steps: peers in their handshake get a moment to finish it; then the
        # slowest is dismissed; and when none is left, the connection is refused rather
        # than left to wait for its deadline.
        with self._lock:
            crowded = bool(self._strangers)
            if crowded and self._full:
                self._dismiss_oldest()
        if crowded or not self._full:
            self._full = True
            self._closed.wait(0.05)  # keeps the loop from spinning
            return
        os.close(self._spare)
        try:
            sock, _ = listening.accept()
            with contextlib.suppress(OSError):  # it is gone
                handshake.refuse(sock)
            self._dismiss(sock)
        except OSError:
            self._closed.wait(0.05)  # another thread took the descriptor, or it left
        finally:
            self._spare = _spare_descriptor()

    def _welcome(self, sock: socket.socket) -> None:
        if is_unix(sock) and not same_user(sock):
            self._dismiss(sock)
            return
        stream = Stream(sock)
        with self._lock:
            while len(self._strangers) >= self.most_strangers:
                since = next(iter(self._strangers.values()))
                left = since + self.crowded_seconds - time.monotonic()
                if left <= 0 or self._closed.is_set():
                    self._dismiss_oldest()
                else:
                    self._room.wait(left)
            self._strangers[stream] = time.monotonic()
        serve = functools.partial(self._serve, stream, is_unix(sock))
        if not self._threads.start(serve):
            with contextlib.suppress(OSError):  # it is gone
                handshake.refuse(sock)
            self._dismiss(stream)

    def _dismiss_oldest(self) -> None:
        stream = next(iter(self._strangers))
        stream.shut()  # its thread wakes up and closes it
        del self._strangers[stream]

    def _dismiss(self, stranger: Stream | socket.socket) -> None:
        with self._lock:
            self._strangers.pop(stranger, None)
            self.refused += 1  # before the close, which a peer may see at once
            stranger.close()
            self._room.notify()

    def _serve(self, stream: Stream, local: bool) -> None:
        deadline = time.monotonic() + self.handshake_seconds
        try:
            origin = "this machine" if local else stream.peer_host()
            connection = self._accepted(stream, local, deadline)
        except (ChannelClosed, TimeoutError, RpcError) as error:
            # The other side gets the error from its own handshake.
            self._dismiss(stream)
            if isinstance(error, AuthenticationError) and self.on_refused is not None:
                self.on_refused(f"{error} It came from {origin}.")
            return
        except BaseException:
            self._dismiss(stream)
            raise
        with self._lock:
            self._strangers.pop(stream, None)
            self._room.notify()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(connection.close, "its serving thread failed")
            self._on_channel(connection)
            on_failure.pop_all()

    def _accepted(self, stream: Stream, local: bool, deadline: float) -> Connection:
        tls, binding = None, NO_BINDING
        if not local and stream.peek(deadline) == FIRST_BYTE:
            if self._credentials is None:
                raise AuthenticationError("A peer began TLS, which is not set up here.")
            binding = self._credentials.fingerprint
            tls = TlsStream(stream, self._credentials.listener, True, deadline)
        elif not local and self._wants_tls(stream):
            raise AuthenticationError("A peer came without TLS.")
        me = self._identity(local, binding)
        proved = handshake.accept(tls or stream, me, deadline)
        return self._adopt(stream, tls, proved)
