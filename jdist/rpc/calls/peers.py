"""The directory of the workers that one worker knows, and its connections to them.

A synchronous call has a connection to itself while it lasts, so that its callee's
thread runs it and answers without a hand-off between threads on either side. Idle
connections are kept, the last used first. All asynchronous calls share one connection.
"""

import itertools
import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol

from jdist._errors import value_error
from jdist.rpc.base.current import Deadline
from jdist.rpc.base.errors import RpcError
from jdist.rpc.base.interrupt_safe_lock import InterruptSafeLock
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.worker_info import PeerRecord, WorkerInfo
from jdist.rpc.wire.channel import Channel, ChannelClosed, Transport
from jdist.rpc.wire.shared_connection import SharedConnection

_IDLE_SECONDS = 10.0
"""Seconds without a call after which a channel is closed, unless it is the only one."""


class PooledConnection:
    """An exclusive connection: one call at a time.

    Attributes:
      channel: The channel.
      numbers: Counter of its requests.
      unused: Whether it was opened for the call that has it.
      idle_since: Time at which its last call ended.
    """

    __slots__ = ("channel", "idle_since", "numbers", "unused")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.numbers = itertools.count(1)
        self.unused = True
        self.idle_since = 0.0


class ConnectionHolder(Protocol):
    """A call that takes a connection and must not lose it."""

    connection: PooledConnection | None


class Peer:
    """Another worker, and the connections to it.

    Args:
      record: The other worker, and where it listens, for `transport`.
      transport: Connects to it.
      pool: Runs the reader of the shared connection.
    """

    def __init__(
        self, record: PeerRecord, transport: Transport, pool: ThreadPool
    ) -> None:
        self.info, self.transport_name, self._address = record
        self.asking = False  # what it is doing, for the message of a timeout
        self.shared: SharedConnection | None = None
        self.departed: str | None = None
        self.lost: str | None = None  # the reason, unless it left in order
        self._transport = transport
        self._pool = pool
        self._idle: list[PooledConnection] = []
        self._lock = threading.Lock()
        self._opening = InterruptSafeLock()

    def take(self, caller: ConnectionHolder, deadline: Deadline) -> PooledConnection:
        """Takes a channel for one synchronous call, to be given back or dropped.

        It is `caller.connection` before it is returned, so that no interrupt loses it.

        Raises: what `Transport.connect` raises.
        """
        while True:
            with self._lock:
                if not self._idle:
                    break
                # An interrupt may leave it with both; the call closes it then.
                caller.connection = connection = self._idle[-1]
                connection.unused = False
                self._idle.pop()
            if connection.channel.usable():
                return connection
            # The peer, or a middlebox between, has closed it since.
            connection.channel.close("it was closed while no call used it")
            caller.connection = None
        caller.connection = connection = PooledConnection(self._connect(deadline))
        return connection

    def give(self, caller: ConnectionHolder) -> float | None:
        """Returns a finished call's connection to the pool, and when to `expire` it."""
        with self._lock:
            connection = caller.connection
            assert connection is not None
            connection.idle_since = time.monotonic()
            if self.departed is None:
                self._idle.append(connection)
            # Only now: an interrupt may leave it with both, and must not with neither.
            caller.connection = None
            several = len(self._idle) > 1
        return connection.idle_since + _IDLE_SECONDS if several else None

    def cut(self, caller: ConnectionHolder, reason: str) -> None:
        """Closes the channel of a call that waits for its answer; any thread."""
        # Under the lock: once given back, the connection may be another call's.
        with self._lock:
            if caller.connection is not None:
                caller.connection.channel.close(reason)

    def expire(self, now: float) -> float | None:
        """Closes channels that were idle for long; returns when to look again."""
        # Each has a thread and a descriptor on both sides. The one used last is kept.
        with self._lock:
            spare, last = self._idle[:-1], self._idle[-1:]
            old = [
                connection
                for connection in spare
                if connection.idle_since + _IDLE_SECONDS <= now
            ]
            kept = [connection for connection in spare if connection not in old]
            self._idle = kept + last
        for connection in old:
            connection.channel.close("no call used it")
        return min(
            (connection.idle_since + _IDLE_SECONDS for connection in kept), default=None
        )

    def open_shared(self, deadline: Deadline) -> SharedConnection:
        """Returns the shared connection, opened at the first call.

        Raises: what `Transport.connect` raises.
        """

        def opened() -> SharedConnection:
            self._opening.acquire(deadline.at, "another call was still connecting")
            shared = self.shared
            if shared is None or shared.closed is not None:
                channel = self._connect(deadline)
                shared = self.shared = SharedConnection(channel, self._pool)
            return shared

        return self._opening.releasing(opened)

    def close(self, reason: str) -> None:
        """Ends everything under way with `reason`, because the worker is gone."""
        with self._lock:
            # The first reason stays: it says how the loss was noticed.
            self.departed = self.departed or reason
            self._idle.clear()
        self._transport.abandon(self.transport_name, reason)

    def _connect(self, deadline: Deadline) -> Channel:
        if departed := self.departed:
            raise ChannelClosed(departed)
        name, address = self.transport_name, self._address
        channel = self._transport.connect(name, address, deadline.at)
        # `close` may have ended all channels just before there was this one.
        if self.departed is not None:
            channel.close(self.departed)
        return channel


class Directory:
    """The workers that one worker knows, itself included.

    One that is about to join is known already, and may be called: it serves no call
    before it has joined. All others know it then, so that it may be spoken of with any
    of them.

    Args:
      info: The worker itself, for messages.
    """

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self._lock = threading.Lock()
        self._complete = threading.Event()
        self._by_name: dict[str, Peer] = {}
        self._by_rank: dict[int, Peer] = {}
        self._by_incarnation: dict[int | None, Peer] = {}
        self._by_transport: dict[str, Peer] = {}

    def complete(self, peers: Iterable[Peer]) -> None:
        """Enter the first members, which completes this worker's join."""
        for peer in peers:
            self.know(peer)
        self._complete.set()

    def know(self, peer: Peer) -> None:
        """Enter a worker, in place of an earlier one of its name or rank."""
        with self._lock:
            self._by_incarnation[peer.info.incarnation] = peer
            self._by_transport[peer.transport_name] = peer
            self._by_name[peer.info.name] = peer
            self._by_rank[peer.info.id] = peer

    def expel(self, peer: Peer) -> None:
        """Stop serving a departed worker, whose name may be given again."""
        with self._lock:
            self._by_transport.pop(peer.transport_name, None)

    def peers(self) -> list[Peer]:
        """The latest worker of each rank, in order."""
        with self._lock:
            return [self._by_rank[rank] for rank in sorted(self._by_rank)]

    def present(self) -> list[Peer]:
        """The known workers that are not gone: all that can have connections."""
        # By incarnation: one whose name has a successor was called by its WorkerInfo.
        with self._lock:
            known = list(self._by_incarnation.values())
        return [peer for peer in known if peer.departed is None]

    def find(self, to: Any) -> Peer:
        """Find a worker by name, rank or WorkerInfo.

        A WorkerInfo that came from the group means that very worker, also when another
        one has its name and rank meanwhile.

        Raises:
          RpcError: No worker has that name or rank.
          ValueError: `to` is of another type.
        """
        peer = self._by_name.get(to) if type(to) is str else self._look_up(to)
        if peer is None:
            known = ", ".join(
                f"{one.info.name} ({one.info.id})" for one in self.peers()
            )
            raise RpcError(
                f"name:{self._info.name},rank:{self._info.id} could not find "
                f"destination {to!r}. The group has {known}."
            )
        return peer

    def of_incarnation(self, incarnation: int) -> Peer | None:
        """Find a worker; None if it was gone before this one joined."""
        return self._by_incarnation.get(incarnation)

    def lost(self) -> dict[str, str]:
        """The lost workers without a successor, by name, each with the reason."""
        with self._lock:
            peers = self._by_name.items()
            return {name: peer.lost for name, peer in peers if peer.lost is not None}

    def caller(self, transport_name: str, until: float | None) -> WorkerInfo | None:
        """Find the worker that proved this name, once this one belongs to the group.

        Other workers may learn a little earlier that this one belongs to it. None for a
        worker that does not belong to the group, or no longer: one that was frozen and
        declared lost may not know it yet.
        """
        if transport_name not in self._by_transport:
            self._complete.wait(None if until is None else until - time.monotonic())
        peer = self._by_transport.get(transport_name)
        return None if peer is None or peer.departed is not None else peer.info

    def _look_up(self, to: Any) -> Peer | None:
        if type(to) is WorkerInfo:
            of_name = self._by_name.get(to.name)
            incarnation = to.incarnation
            peer = of_name if incarnation is None else self.of_incarnation(incarnation)
            return peer if peer and (peer.info is to or peer.info == to) else None
        if isinstance(to, int) and not isinstance(to, bool):
            return self._by_rank.get(to)
        if isinstance(to, str):
            return self._by_name.get(str(to))
        rule = "must be a name, a rank or a WorkerInfo"
        rule += " (Cannot get WorkerInfo from name)"
        raise value_error("rpc(to=...)", rule, to)
