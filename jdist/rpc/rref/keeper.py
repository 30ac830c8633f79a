"""The thread that does what may not be done where it becomes due.

A finalizer runs on any thread, in the midst of anything, perhaps while that thread has
the very lock that it would need. So it only puts what is over into a queue, whose `put`
takes no lock of Python's; and this thread sees to it. It lets some gather first: to
wake up for each, and to tell each owner of it, would cost as much as a call.
"""

import functools
import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_log = logging.getLogger("jdist.rpc")
_END = object()
GATHERING = 0.01
"""Seconds for which what is dropped may wait for more of its kind."""


class _Appointment(NamedTuple):
    at: float
    order: int
    action: Callable[[], None]


class Keeper:
    """Takes over what finalizers drop, and acts at appointed times.

    Args:
      name: What its thread is called; it starts with the first thing to do.
      on_dropped: Called with all that was dropped meanwhile.
    """

    def __init__(self, name: str, on_dropped: Callable[[list[Any]], None]) -> None:
        self._name = name
        self._on_dropped = on_dropped
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._appointments: list[_Appointment] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def drop(self) -> Callable[[Any], None]:
        """Takes what is over; from finalizers, hence it neither waits nor locks."""
        return self._queue.put

    def start(self) -> None:
        """There will be something to do; any number of times."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(
                    target=self._run, name=self._name, daemon=True
                )
                self._thread.start()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Has `action()` called in so many seconds; never, once closed."""
        self.start()
        at = time.monotonic() + seconds
        self._queue.put(_Appointment(at, next(self._order), action))

    def close(self) -> None:
        """Ends the thread."""
        with self._lock:
            self._closed.set()
            thread = self._thread
        self._queue.put(_END)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            items = self._next_items()
            if _END in items:
                return
            dropped = [item for item in items if not isinstance(item, _Appointment)]
            for item in items:
                if isinstance(item, _Appointment):
                    heapq.heappush(self._appointments, item)
            if dropped:
                self._do(functools.partial(self._on_dropped, dropped))
            while self._appointments and self._appointments[0].at <= time.monotonic():
                self._do(heapq.heappop(self._appointments).action)

    def _next_items(self) -> list[Any]:
        seconds = None
        if self._appointments:
            seconds = max(0.0, self._appointments[0].at - time.monotonic())
        items = []
        try:
            items.append(self._queue.get(timeout=seconds))
            if not isinstance(items[0], _Appointment):
                self._closed.wait(GATHERING)
            while True:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            return items

    def _do(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # noqa: BLE001 - the thread has others to serve
            _log.exception("A task of %s raised an exception.", self._name)
