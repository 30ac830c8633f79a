"""One thread that wakes when the next deadline comes, and not before."""

import logging
import math
import threading
import time
from collections.abc import Callable

_log = logging.getLogger("jdist.rpc")


class Alarm:
    """Calls a function at moments that are announced to it.

    Nobody takes an announcement back: what was waited for may be over by then, and the
    function looks. So announcing is one comparison, unless the moment is the earliest.

    Args:
      name: What its thread is called.
      ring: Called with the time; the next moment that it knows of, or None.
    """

    def __init__(self, name: str, ring: Callable[[float], float | None]) -> None:
        self._name = name
        self._ring = ring
        self._next = math.inf
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    def set(self, at: float | None) -> None:
        """Has the alarm ring at this moment, if it does not ring earlier."""
        if at is None or at >= self._next:
            return
        # In this order, because an interrupt may come in between: a moment that was
        # noted, and of which the thread was not told, would keep later ones from it.
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(
                    target=self._run, name=self._name, daemon=True
                )
                thread.start()
                self._thread = thread
            self._changed.notify_all()
            self._next = min(self._next, at)

    def close(self) -> None:
        """Ends the thread."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closed and self._next > time.monotonic():
                    until = self._next
                    seconds = None if until == math.inf else until - time.monotonic()
                    self._changed.wait(seconds)
                if self._closed:
                    return
                # Before looking: a moment announced from now on is compared with this.
                self._next = math.inf
            try:
                upcoming = self._ring(time.monotonic())
            except Exception:  # noqa: BLE001 - logged; the thread must go on
                # Such as no thread to be had. Deadlines must be kept all the same.
                _log.exception("Deadlines could not be looked at; trying again.")
                upcoming = time.monotonic() + 1.0
            if upcoming is not None:
                with self._lock:
                    self._next = min(self._next, upcoming)
