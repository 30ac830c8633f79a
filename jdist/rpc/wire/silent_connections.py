"""The silent connections of a transport, and the one thread that waits for all of them.

A thread that reads a connection costs no hand-off while frames come, and in a large
group a worker would have hundreds that wait for nothing. So while many threads read, a
thread leaves a connection on which nothing came for a while, and a single thread, the
leader, waits for all of these. Once one can be read, the leader reads that one itself,
after it has passed the lead to a follower (the leader/followers pattern). So a frame
that ends a silence is not handed from thread to thread either.
"""

import contextlib
import logging
import select
import selectors
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.wire.stream import leave_to_parent

__all__ = ["PATIENCE", "SilentConnections"]

_log = logging.getLogger("jdist.rpc")

PATIENCE = 0.01
"""Seconds without a frame after which a thread leaves a connection, while many threads
read."""

_FEW = 7
"""Threads that may stay in any group: of three workers, each reads three connections
from each other one, and one from the coordinator. They wait without a limit, because a
limit in each receive costs calls time."""

# Others look only at those descriptors that are known when the wait begins.
_CAN_BE_ADDED_TO = hasattr(select, "epoll") or hasattr(select, "kqueue")

Read = Callable[[], None]
"""Reads a connection on this thread until it is silent or has closed."""


class _Silent(NamedTuple):
    """A connection without a thread."""

    read: Read
    ended: Callable[[], bool]
    pool: ThreadPool


class SilentConnections:
    """The silent connections of one transport.

    A thread that begins to read one of its connections does so within `run`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fewer = threading.Condition(self._lock)
        self._selector: selectors.BaseSelector | None = None
        self._silent = 0  # that the selector knows
        self._readable: deque[_Silent] = deque()
        self._led = False
        self._closing = False
        self._reading = 0
        self._peers: Counter[str] = Counter()
        self._most = _FEW

    @property
    def crowded(self) -> bool:
        """Whether many threads read, so that they should not wait for long."""
        return self._reading > self._most

    def opened(self, peer: str) -> None:
        """Counts a connection to this peer."""
        with self._lock:
            self._peers[peer] += 1
            self._most = max(_FEW, len(self._peers) // 2)

    def closed(self, peer: str) -> None:
        """Counts one less."""
        with self._lock:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]
            self._most = max(_FEW, len(self._peers) // 2)

    def run(self, read: Read, pool: ThreadPool) -> None:
        """Calls `read` on this thread, and has one of the pool lead if none does."""
        with self._lock:
            self._reading += 1
        self._call(read)
        with self._lock:
            leaderless = self._silent and not self._led
        if leaderless:
            try:
                pool.start(self._follow)
            except (RuntimeError, MemoryError):  # the system refuses a new thread
                self._follow()

    def add(
        self, descriptor: int, read: Read, ended: Callable[[], bool], pool: ThreadPool
    ) -> bool:
        """Has `read` called, by the thread that leads, once the descriptor can be read.

        Args:
          descriptor: Of a connection that this thread reads no longer.
          read: See there.
          ended: Whether all that `read` would find is that the connection has closed.
          pool: Lends the thread that leads next.

        Returns:
          False if it cannot be waited for here.
        """
        with self._lock:
            if self._closing or not _CAN_BE_ADDED_TO:
                return False
            try:
                if self._selector is None:
                    self._selector = selectors.DefaultSelector()
                    leave_to_parent(self._selector)
                silent = _Silent(read, ended, pool)
                self._selector.register(descriptor, selectors.EVENT_READ, silent)
            except OSError:
                return False  # no more files
            self._silent += 1
            return True

    def close(self, until: float) -> None:
        """Ends the wait, after the connections were closed.

        Args:
          until: When to return if threads still read connections.
        """
        with self._lock:
            self._closing = True
            self._fewer.wait_for(
                lambda: not (self._silent or self._readable or self._led),
                max(0.0, until - time.monotonic()),
            )
            self._release()

    def _follow(self) -> None:
        """Leads and reads in turn, as long as no other thread leads."""
        while (read := self._lead()) is not None:
            self._call(read)
            del read  # it has the connection, and this thread may lead for long

    def _call(self, read: Read) -> None:
        try:
            read()
        except BaseException:  # noqa: BLE001 - others may wait for this thread to lead
            _log.exception("A thread that read a connection failed.")
        with self._lock:
            self._reading -= 1

    def _lead(self) -> Read | None:
        """Waits for a connection to be read; None if there is nothing to wait for."""
        with self._lock:
            if self._led:
                return None
            self._led = True
        while True:
            with self._lock:
                if self._readable:
                    next_ = self._readable.popleft()
                    self._reading += 1
                    self._led = False
                    more = self._silent or self._readable
                    self._fewer.notify_all()
                    break
                if not self._silent:
                    self._led = False
                    self._fewer.notify_all()
                    self._release()
                    return None
                selector = self._selector
            assert selector is not None
            found = selector.select()
            with self._lock:
                for key, _ in found:
                    selector.unregister(key.fd)
                    self._silent -= 1
                    self._readable.append(key.data)
        # To end a connection takes less than to start a thread, and when a worker or a
        # whole group ends, hundreds close at once. So this thread leads again after it.
        if more and not next_.ended():
            # If the system refuses a new thread, this one leads when it has read.
            with contextlib.suppress(RuntimeError, MemoryError):
                next_.pool.start(self._follow)
        return next_.read

    def _release(self) -> None:
        """Closes the selector if nothing will be added to it; under the lock."""
        over = self._closing and not (self._silent or self._led)
        if over and self._selector is not None:
            self._selector.close()
