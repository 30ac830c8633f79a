"""The one timer thread of a worker: deadlines, retries, heartbeats.

The thread never waits for anything but the next moment. Alarms ring on it and must not
wait either; actions that may send or wait go to the thread pool.
"""

import heapq
import itertools
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from jdist.rpc.base.thread_pool import ThreadPool

_log = logging.getLogger("jdist.rpc")
_RETRY_SECONDS = 1.0
_GATHERING = 0.002
"""Seconds, by which an appointment may be late while objects are collected."""

Ring = Callable[[float], float | None]
"""Called with the time; returns the next moment at which to be called, or None."""


class _Appointment(NamedTuple):
    at: float
    order: int  # of equal moments, so that the heap never compares what follows
    ring: Callable[[float], object]


class _Finalizer(weakref.ref[Any]):
    """A weak reference that enters the timer's queue when its object is collected."""

    __slots__ = ("ring",)

    ring: Callable[[float], object]


class Alarm:
    """A function that is called when the earliest of the announced moments has come.

    An announcement is not taken back: what it was for may be over when the moment
    comes, and the function finds that out. So `set` is one comparison in most calls.
    """

    __slots__ = ("_lock", "_next", "_ring", "_timer")

    def __init__(self, timer: "Timer", ring: Ring) -> None:
        self._timer = timer
        self._ring = ring
        self._next = math.inf
        self._lock = threading.Lock()

    def set(self, at: float | None) -> None:
        """Sets the alarm to this moment unless it is set to an earlier one."""
        if at is None or at >= self._next:
            return
        with self._lock:
            if at < self._next:
                # In this order: an interrupt in between must not leave a moment noted
                # of which the timer was not told, which would keep it from later ones.
                self._timer.at(at, self._due)
                self._next = at

    def _due(self, now: float) -> None:
        with self._lock:
            if now < self._next:
                return  # it rang at this moment already, and has a later one
            # Reset before it rings, which may miss moments announced from here on.
            self._next = math.inf
        upcoming: float | None = now + _RETRY_SECONDS
        try:
            upcoming = self._ring(now)
        finally:
            self.set(upcoming)


class Timer:
    """Calls functions at given moments.

    Args:
      name: Name of its thread.
      pool: Runs the actions of `later`.

    Example:
      >>> pool = ThreadPool("example", 1)
      >>> timer, done = Timer("timer", pool), threading.Lock()
      >>> _ = done.acquire()
      >>> timer.later(0.001, done.release)
      >>> done.acquire(timeout=60)
      True
      >>> timer.close()
      >>> pool.close(60)
      []
    """

    def __init__(self, name: str, pool: ThreadPool) -> None:
        self._pool = pool
        # A queue of C: `put` takes no lock of Python's, so that a finalizer may call it
        # on a thread that holds any lock.
        self._queue: queue.SimpleQueue[_Appointment | _Finalizer | None]
        self._queue = queue.SimpleQueue()
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def alarm(self, ring: Ring) -> Alarm:
        """Makes an alarm; `ring(now)` runs on the timer's thread and must not wait."""
        return Alarm(self, ring)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Calls `action()` on a thread of the pool after `seconds`.

        Takes no lock: finalizers may call it. After `close` the action is dropped.
        """

        self.at(time.monotonic() + seconds, lambda now: self._pool.run(action))

    def at(self, moment: float, ring: Callable[[float], object]) -> None:
        """Calls `ring(now)` once on the timer's thread; it must not wait."""
        self._queue.put(_Appointment(moment, next(self._order), ring))

    def when_collected(
        self, thing: object, ring: Callable[[float], object]
    ) -> weakref.ref[Any]:
        """Calls `ring(now)` on the timer's thread once `thing` is collected.

        Keep the result for as long as this is wanted. `ring` must not refer to `thing`.
        """
        # The callback is C: where an object happens to be collected, no Python code
        # runs that could need a lock, or be lost to an interrupt.
        collected = _Finalizer(thing, self._queue.put)
        collected.ring = ring
        return collected

    def close(self) -> None:
        """Ends the thread; idempotent."""
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        appointments: list[_Appointment] = []
        while True:
            # A wait may end a little early, so the moment is compared again.
            while appointments and appointments[0].at <= time.monotonic():
                self._call(heapq.heappop(appointments).ring)
            seconds = None
            if appointments:
                seconds = max(0.0, appointments[0].at - time.monotonic())
            try:
                item = self._queue.get(timeout=seconds)
            except queue.Empty:
                continue
            if item is None:
                return
            if isinstance(item, _Finalizer):
                self._call(item.ring)
                # A program may drop thousands of objects in a loop: to wake for each of
                # them would take the interpreter from it as often.
                if self._queue.empty():
                    self._rest(_GATHERING)
            else:
                heapq.heappush(appointments, item)

    _rest = staticmethod(time.sleep)

    def _call(self, ring: Callable[[float], object]) -> None:
        try:
            ring(time.monotonic())
        except Exception:  # noqa: BLE001 - the thread has other deadlines to keep
            # Such as a thread that the system refuses to start.
            _log.exception("%s: an alarm failed.", self._thread.name)
