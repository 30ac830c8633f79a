"""The silent connections of a transport, and the one thread that waits for all of them.

A thread that reads a connection costs no hand-off while frames come, and in a large
group a worker would have hundreds that wait for nothing. So while many threads read, a
thread leaves a connection on which nothing came for a while, and a single thread waits
for all of these. Once one can be read, it passes that one to a thread of the pool.
"""

import contextlib
import functools
import logging
import select
import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.wire.stream import leave_to_parent

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

    Attributes:
      reading: How many threads read.
      most: How many of them may stay with a connection on which nothing comes.
    """

    def __init__(self) -> None:
        self.reading = 0
        self._lock = threading.Lock()
        self._over = threading.Condition(self._lock)
        self._selector: selectors.BaseSelector | None = None
        self._silent = 0  # that the selector knows
        self._watched = False
        self._closing = False
        self._peers: Counter[str] = Counter()
        self.most = self._limit()

    def opened(self, peer: str) -> None:
        """Counts a connection to this peer."""
        with self._lock:
            self._peers[peer] += 1
            self.most = self._limit()

    def closed(self, peer: str) -> None:
        """Counts one less."""
        with self._lock:
            self._peers -= Counter((peer,))  # drops a peer without any
            self.most = self._limit()

    def run(self, read: Read) -> None:
        """Calls `read` on this thread."""
        with self._lock:
            self.reading += 1
        try:
            read()
        except BaseException:  # noqa: BLE001 - the thread may have others to wait for
            _log.exception("A thread that read a connection failed.")
        with self._lock:
            self.reading -= 1

    def add(
        self, descriptor: int, read: Read, ended: Callable[[], bool], pool: ThreadPool
    ) -> bool:
        """Has `read` called, on another thread, once the descriptor can be read.

        Args:
          descriptor: Descriptor of a connection that this thread no longer reads.
          read: See there.
          ended: Whether all that `read` would find is that the connection has closed.
          pool: Lends the threads that wait and read.

        Returns:
          False if it cannot be waited for here.
        """
        with self._lock:
            if self._closing or not _CAN_BE_ADDED_TO:
                return False
            silent = _Silent(read, ended, pool)
            try:
                if self._selector is None:
                    self._selector = selectors.DefaultSelector()
                    leave_to_parent(self._selector)
                selector = self._selector
                if not self._watched:
                    pool.start(functools.partial(self._watch, selector))
                    self._watched = True
                selector.register(descriptor, selectors.EVENT_READ, silent)
            except (OSError, RuntimeError, MemoryError):
                return False  # no more files, or no more threads
            self._silent += 1
            return True

    def close(self, until: float) -> None:
        """Ends the wait, after the connections were closed.

        Args:
          until: When to return if threads still read connections.
        """
        with self._lock:
            self._closing = True
            self._over.wait_for(
                lambda: not self._watched, max(0.0, until - time.monotonic())
            )
            self._release()

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Waits for the silent connections until there is none."""
        while True:
            with self._lock:
                if not self._silent:
                    self._watched = False
                    self._over.notify_all()
                    self._release()
                    return
            for key, _ in selector.select():
                with self._lock:
                    selector.unregister(key.fd)
                    self._silent -= 1
                self._pass_on(key.data)
                del key  # it has the connection, and this thread may wait for long

    def _pass_on(self, silent: _Silent) -> None:
        # To end a connection takes less than to start a thread, and when a worker or a
        # whole group ends, hundreds close at once. So this thread reads the end itself.
        if not silent.ended():
            # If the system refuses a new thread, this one reads.
            with contextlib.suppress(RuntimeError, MemoryError):
                silent.pool.start(functools.partial(self.run, silent.read))
                return
        self.run(silent.read)

    def _limit(self) -> int:
        return max(_FEW, len(self._peers) // 2)

    def _release(self) -> None:
        """Closes the selector if nothing will be added to it; under the lock."""
        if self._closing and not self._watched and self._selector is not None:
            self._selector.close()
