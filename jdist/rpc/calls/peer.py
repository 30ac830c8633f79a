"""The channels from one worker to one other.

A synchronous call has a channel to itself while it lasts, so that its callee's thread
runs it and answers with no hand-over on either side. Idle channels are kept, the last
used first. All asynchronous calls share one channel.
"""

import itertools
import threading
import time
from typing import Any, Protocol

from jdist.rpc.base.deadline import Deadline
from jdist.rpc.base.device_maps import DeviceMaps
from jdist.rpc.base.interrupt_safe_lock import InterruptSafeLock
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.wire.channel import Channel, ChannelClosed, Transport
from jdist.rpc.wire.shared_connection import SharedConnection

_IDLE_SECONDS = 10.0
"""After which a channel that no call uses is closed, unless it is the only one."""


class PooledConnection:
    """A channel for one call at a time.

    Attributes:
      channel: The channel.
      numbers: Of its requests.
      unused: Whether it was opened for the call that has it.
      idle_since: When its last call ended.
    """

    __slots__ = ("channel", "idle_since", "numbers", "unused")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.numbers = itertools.count(1)
        self.unused = True
        self.idle_since = 0.0


class Caller(Protocol):
    """What takes a connection."""

    connection: PooledConnection | None


class Peer:
    """What one worker knows of another, and its ways there.

    Args:
      info: The other worker.
      transport_name: The name that its transport proves, see `PeerRecord`.
      address: Where it listens, for `transport`.
      transport: Connects to it.
      pool: Runs the reader of the shared connection.
    """

    def __init__(
        self,
        info: WorkerInfo,
        transport_name: str,
        address: Any,
        transport: Transport,
        pool: ThreadPool,
    ) -> None:
        self.info = info
        self.transport_name = transport_name
        self.asking = InterruptSafeLock()
        self.shared: SharedConnection | None = None
        self.departed: str | None = None
        self._address = address
        self._transport = transport
        self._pool = pool
        self._idle: list[PooledConnection] = []
        self._busy: set[PooledConnection] = set()
        self._lock = threading.Lock()
        self._opening = InterruptSafeLock()

    @property
    def device_maps(self) -> DeviceMaps:
        """On which devices this worker's arrays arrive, there among others."""
        return self._transport.device_maps

    def take(self, caller: Caller, deadline: Deadline) -> PooledConnection:
        """A channel for one synchronous call, to be given back or dropped.

        It is `caller.connection` before it is returned, so that no interrupt loses it.

        Raises: what `Transport.connect` raises.
        """
        while self._take_idle(caller):
            assert caller.connection is not None
            if caller.connection.channel.usable():
                return caller.connection
            # The peer, or what lies between, has closed it since.
            self.drop(caller.connection, "it was closed while no call used it")
            caller.connection = None
        caller.connection = connection = PooledConnection(self._connect(deadline))
        with self._lock:
            if self.departed is None:
                self._busy.add(connection)
        self._check_present(connection.channel)
        return connection

    def _take_idle(self, caller: Caller) -> bool:
        with self._lock:
            if not self._idle:
                return False
            # An interrupt may leave it with both; the one that drops it closes it.
            caller.connection = connection = self._idle[-1]
            connection.unused = False
            self._busy.add(connection)
            self._idle.pop()
            return True

    def give(self, connection: PooledConnection) -> float | None:
        """The call is over and its answer was received; when to `expire` channels."""
        connection.idle_since = time.monotonic()
        with self._lock:
            self._busy.discard(connection)
            self._idle.append(connection)
            several = len(self._idle) > 1
        return connection.idle_since + _IDLE_SECONDS if several else None

    def drop(self, connection: PooledConnection, reason: str) -> None:
        """The call was given up; closing its channel is how the callee learns it."""
        with self._lock:
            self._busy.discard(connection)
        connection.channel.close(reason)

    def expire(self, now: float) -> float | None:
        """Closes the channels that were idle for long; when to look again.

        Each has a thread and a descriptor on both sides. The one used last is kept.
        """
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
        """The shared channel, connected at the first call.

        Raises: what `Transport.connect` raises.
        """

        def opened() -> SharedConnection:
            self._opening.acquire(deadline.at, "another call was still connecting")
            shared = self.shared
            if shared is None or shared.closed is not None:
                channel = self._connect(deadline)
                shared = self.shared = SharedConnection(channel, self._pool)
                self._check_present(channel)
            return shared

        return self._opening.releasing(opened)

    def close(self, reason: str) -> None:
        """The worker is gone: everything under way ends with `reason`."""
        with self._lock:
            self.departed = self.departed or reason
            connections = [*self._busy, *self._idle]
            self._idle.clear()
        for connection in connections:
            connection.channel.close(reason)
        self._transport.abandon(self.transport_name, reason)
        shared = self.shared
        if shared is not None:
            shared.close(reason)

    def _connect(self, deadline: Deadline) -> Channel:
        if self.departed is not None:
            raise ChannelClosed(self.departed)
        return self._transport.connect(self.transport_name, self._address, deadline.at)

    def _check_present(self, channel: Channel) -> None:
        """Closes a channel that was being opened while the worker departed."""
        if self.departed is not None:
            channel.close(self.departed)
            raise ChannelClosed(self.departed)
