"""A pool of threads that grows on demand, with a limit for users' functions.

A task goes to the thread that became idle last, because its stack is warm; without an
idle thread a new one starts. A thread that is idle for 10 s ends, and sooner if several
are.

Two kinds of tasks differ in one point. Users' functions (`run_limited`) share a fixed
number of places and wait in order when all are taken. The library's own tasks (`run`)
are not limited, because a function that has a place may wait for one.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("jdist.rpc")
_IDLE_SECONDS = 10.0
_FEW_IDLE = 2
# For the threads beyond a few that a burst leaves.
_SURPLUS_SECONDS = 2.0

Task = Callable[[], None]
_TaskQueue = queue.SimpleQueue[Task | None]
"""Where an idle thread finds its next task; None ends it."""


class ThreadPool:
    """A growing and shrinking set of threads.

    Args:
      name: Name of its threads.
      places: How many limited tasks run at a time.

    Attributes:
      places: The argument of the same name.
    """

    def __init__(self, name: str, places: int) -> None:
        self.places = places
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[_TaskQueue] = []  # of idle threads
        self._waiting: deque[Task] = deque()
        self._taken = 0
        self._coming = False
        self._threads: set[threading.Thread] = set()
        self._closed = False

    @property
    def free(self) -> int:
        """The number of limited tasks that could start at once."""
        with self._lock:
            return max(0, self.places - self._taken)

    def run(self, task: Task) -> None:
        """Runs `task()` on another thread; after `close`, on this one.

        All connections are closed before the pool is, so a task then finds nothing to
        wait for. If the system refuses a new thread, this one runs the task too.
        """
        if not self.start(task):
            task()

    def start(self, task: Task) -> bool:
        """Runs `task()` on another thread.

        Returns:
          False after `close`, or if the system refuses a new thread.
        """
        with self._lock:
            return self._give(task)

    def _give(self, task: Task) -> bool:
        """As `start`; under the lock."""
        # The thread that became idle last: its stack is still in the caches.
        if self._idle:
            self._idle.pop().put(task)
            return True
        return not self._closed and self._start(task)

    def run_limited(self, task: Task) -> None:
        """Runs `task()` on another thread once one of the places is free."""
        with self._lock:
            self._waiting.append(task)
            # Under one lock: `close` waits for the tasks that threads have, and this
            # one would be in between.
            given = not self._take_place() or self._give(self._run_waiting)
        if not given:
            self._run_waiting()

    def close(self, timeout: float) -> list[threading.Thread]:
        """Ends the threads; returns those still busy after `timeout` seconds."""
        with self._lock:
            self._closed = True
            threads = self._threads - {threading.current_thread()}
            for inbox in self._idle:
                inbox.put(None)
            self._idle.clear()
        until = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [thread for thread in threads if thread.is_alive()]

    def _take_place(self) -> bool:
        """Reserves a place for one more thread if a task needs it; under the lock."""
        # One thread at a time is on its way, and calls the next one when it takes a
        # task. Of a burst of short tasks most are then run by threads that are awake,
        # and no task waits behind a long one.
        if self._coming or not self._waiting or self._taken >= self.places:
            return False
        self._coming = True
        self._taken += 1
        return True

    def _run_waiting(self) -> None:
        """Runs waiting tasks in order until none is left."""
        arriving = True
        while (task := self._next_waiting(arriving)) is not None:
            arriving = False
            self._attempt(task)
            task = None  # nothing of it is kept while this thread waits for the lock

    def _next_waiting(self, arriving: bool) -> Task | None:
        with self._lock:
            if arriving:
                self._coming = False
            if not self._waiting:
                self._taken -= 1
                return None
            task = self._waiting.popleft()
            if self._take_place() and not self._give(self._run_waiting):
                # Without one more thread, those that run take the tasks in turn.
                self._coming = False
                self._taken -= 1
        return task

    def _start(self, task: Task) -> bool:
        inbox: _TaskQueue = queue.SimpleQueue()
        inbox.put(task)  # not an argument: a thread keeps its arguments to its end
        thread = threading.Thread(
            target=self._work, args=(inbox,), name=self._name, daemon=True
        )
        try:
            self._threads.add(thread)
            thread.start()
        except BaseException as error:
            self._threads.discard(thread)
            # Raised, either would leave a place taken by a thread that never comes.
            if isinstance(error, RuntimeError | MemoryError):
                return False
            raise
        return True

    def _work(self, inbox: _TaskQueue) -> None:
        task = inbox.get()
        while task is not None:
            self._attempt(task)
            task = None  # nothing of it is kept while the thread is idle
            task = self._next(inbox)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _attempt(self, task: Task) -> None:
        try:
            task()
        except BaseException:  # noqa: BLE001 - the thread serves others after it
            # Tasks report their own failures; this is a failure to report one.
            _log.exception("A task of %s raised an exception.", self._name)

    def _next(self, inbox: _TaskQueue) -> Task | None:
        with self._lock:
            if self._closed:
                return None
            surplus = len(self._idle) >= _FEW_IDLE
            self._idle.append(inbox)
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=_SURPLUS_SECONDS if surplus else _IDLE_SECONDS)
        with self._lock:
            if inbox in self._idle:
                self._idle.remove(inbox)
        # A task may have come at the last moment. Or the thread that took this one out
        # of the list was interrupted before it left a task.
        with contextlib.suppress(queue.Empty):
            return inbox.get_nowait()
        return None
