"""Threads that take over work, started on demand and kept for a while.

A task goes to the thread that became idle last (its stack is warm); without an idle
thread a new one starts. A thread idle for long ends.

Functions of the user's have as many places as the ceiling says; beyond it they wait in
order. What the library itself has to do needs no place, nor do calls that a called
function makes: they must go on when every place is taken by functions that wait for
them.
"""

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("jdist.rpc")
_IDLE_SECONDS = 10.0


class ThreadPool:
    """A growing and shrinking set of threads.

    Args:
      name: What its threads are called.
      ceiling: The number of places.
    """

    def __init__(self, name: str, ceiling: int) -> None:
        self._name = name
        self._ceiling = ceiling
        self._lock = threading.Lock()
        self._idle: list[_Post] = []
        self._waiting: deque[Callable[[], None]] = deque()
        self._taken = 0
        self._threads: set[threading.Thread] = set()
        self._closed = False

    @property
    def ceiling(self) -> int:
        """The most threads there may be."""
        return self._ceiling

    @property
    def idle(self) -> int:
        """How many more tasks could start at once."""
        with self._lock:
            return max(0, self._ceiling - len(self._threads) + len(self._idle))

    def run(self, task: Callable[[], None]) -> None:
        """Has `task()` run on another thread; after `close`, on this one.

        By then all channels are closed, so that a task finds nothing to wait for.
        """
        with self._lock:
            if self._idle:
                post = self._idle.pop()
                post.task = task
                post.ready.release()
                return
            if not self._closed:
                self._start(task)
                return
        task()

    def enter(self, otherwise: Callable[[], None]) -> bool:
        """Takes a place for what this thread is about to run; `leave` gives it back.

        Args:
          otherwise: What waits for a place if there is none. It runs on another thread.

        Returns:
          Whether there was one.
        """
        with self._lock:
            if self._taken >= self._ceiling and not self._closed:
                self._waiting.append(otherwise)
                return False
            self._taken += 1
            return True

    def leave(self) -> None:
        """Gives a place back, or on to the task that has waited for longest."""
        task = self._following()
        if task is None:
            return
        try:
            self.run(functools.partial(self._in_place, task))
        except RuntimeError:  # the system has no thread left to give
            self._in_place(task)

    def _in_place(self, task: Callable[[], None] | None) -> None:
        """Runs a task that has a place, and then those that wait for it."""
        while task is not None:
            self._attempt(task)
            task = self._following()

    def _following(self) -> Callable[[], None] | None:
        """The task that a place goes on to; None, and the place is free, for none."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._taken -= 1
            return None

    def close(self, timeout: float) -> list[threading.Thread]:
        """Ends the threads; those still busy after `timeout` seconds are returned."""
        with self._lock:
            self._closed = True
            threads = self._threads - {threading.current_thread()}
            for post in self._idle:
                post.ready.release()
            self._idle.clear()
        until = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [thread for thread in threads if thread.is_alive()]

    def _start(self, task: Callable[[], None]) -> None:
        post = _Post()
        post.task = task  # not an argument: those a thread keeps to its end
        thread = threading.Thread(
            target=self._work, args=(post,), name=self._name, daemon=True
        )
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:  # the system has no thread left to give
            self._threads.discard(thread)
            raise

    def _work(self, post: "_Post") -> None:
        task, post.task = post.task, None
        while task is not None:
            self._attempt(task)
            task = None  # nothing of it is kept while the thread is idle
            task = self._next(post)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _attempt(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException:  # noqa: BLE001 - the thread serves others after it
            # Tasks report their own failures; this is one in reporting.
            _log.exception("A task of %s raised an exception.", self._name)

    def _next(self, post: "_Post") -> Callable[[], None] | None:
        with self._lock:
            if self._closed:
                return None
            post.task = None
            self._idle.append(post)
        if post.ready.acquire(timeout=_IDLE_SECONDS):
            return post.task
        with self._lock:
            if post in self._idle:
                self._idle.remove(post)
                return None
        # A task was handed over in the last moment; or the thread that was about to do
        # so was interrupted, and there is none.
        post.ready.acquire(blocking=False)
        return post.task


class _Post:
    """Where one idle thread waits for its next task."""

    __slots__ = ("ready", "task")

    def __init__(self) -> None:
        self.task: Callable[[], None] | None = None
        self.ready = threading.Lock()
        self.ready.acquire()
