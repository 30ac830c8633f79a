"""The silent connections of a transport, and the one thread that waits for all of them.

A thread that reads a connection costs no hand-off while frames come, and in a large
group a worker would have hundreds that wait for nothing. So while many threads read, a
thread leaves a connection on which nothing came for a while, and a single thread waits
for all of these. Once one can be read, it passes that one to a thread of the pool.
"""

import functools
import logging
import selectors
import threading
from collections.abc import Callable, Collection

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

Read = Callable[[], None]
"""Reads a connection on this thread until it is silent or has closed."""


class SilentConnections:
    """The silent connections of one transport.

    A thread that begins to read one of its connections does so within `run`.

    Args:
      connections: All of its open connections.
      pool: Lends the threads that wait and read.

    Attributes:
      reading: How many threads read.
    """

    def __init__(self, connections: Collection[object], pool: ThreadPool) -> None:
        self.reading = 0
        self._connections = connections
        self._pool = pool
        self._lock = threading.Lock()
        self._selector: selectors.BaseSelector | None = None
        self._watched = False

    @property
    def few_read(self) -> bool:
        """Whether a thread may stay with a connection on which nothing comes."""
        # Of a large group half as many as it has workers, each with ten connections.
        return self.reading <= max(_FEW, len(self._connections) // 10)

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

    def add(self, descriptor: int, read: Read, ended: Callable[[], bool]) -> bool:
        """Has `read` called, on another thread, once the descriptor can be read.

        Args:
          descriptor: Descriptor of a connection that this thread no longer reads.
          read: See there.
          ended: Whether all that `read` would find is that the connection has closed.

        Returns:
          False if it cannot be waited for here.
        """
        with self._lock:
            try:
                if self._selector is None:
                    self._selector = selectors.DefaultSelector()
                    leave_to_parent(self._selector)
                selector = self._selector
                selector.register(descriptor, selectors.EVENT_READ, (read, ended))
            except (OSError, MemoryError):
                return False  # no more files
            if not self._watched:
                watch = functools.partial(self._watch, selector)
                self._watched = self._pool.start(watch)
            if not self._watched:
                selector.unregister(descriptor)
            return self._watched

    def close(self) -> None:
        """Closes the selector, after the connections and the pool were closed."""
        with self._lock:
            # A thread that still runs a function of the user gives it back itself.
            if self._selector is not None and not self._watched:
                self._selector.close()
            self._selector = None

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Waits for the silent connections until there is none."""
        while True:
            with self._lock:
                if not selector.get_map():
                    self._watched = False
                    return
            for key, _ in selector.select():
                with self._lock:
                    selector.unregister(key.fd)
                self._pass_on(*key.data)
                del key  # it has the connection, and this thread may wait for long

    def _pass_on(self, read: Read, ended: Callable[[], bool]) -> None:
        # To end a connection takes less than to start a thread, and when a worker or a
        # whole group ends, hundreds close at once. So this thread reads the end itself;
        # and whatever comes, if there is no other thread.
        if ended() or not self._pool.start(functools.partial(self.run, read)):
            self.run(read)
