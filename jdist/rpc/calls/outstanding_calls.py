"""The calls under way on one worker, for debugging and for a graceful end.

Every call is entered twice: by its caller, from before it is sent until its callbacks
have run, and by its callee, from its arrival until its answer is sent. So a message in
flight is always noted at one side at least, and none is in flight when no worker has
outstanding calls.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from jdist.rpc.base.deadline import Deadline
from jdist.rpc.base.errors import RpcTimeout
from jdist.rpc.base.interceptor import Operation

__all__ = ["OutstandingCalls", "describe"]

_OVERDUE = 60.0
"""Seconds after its deadline for which a graceful end waits for a call: its function
may be about to return."""


class Entry(Protocol):
    """One call under way, seen from one side."""

    @property
    def peer(self) -> str:
        """Name of the worker on the other side."""

    @property
    def operation(self) -> Operation:
        """The function, or the kind of the request."""

    @property
    def since(self) -> float:
        """When it began, in `time.monotonic()` seconds."""

    @property
    def deadline(self) -> Deadline:
        """When it must be over."""

    @property
    def has_answer(self) -> bool:
        """Whether its answer came, so that only what follows from it still runs."""


def end_of(entry: Entry) -> float | None:
    """The moment at which a call must be over; None for one without a deadline."""
    return entry.deadline.at


class OutstandingCalls:
    """The calls of one worker that are under way, on either side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._sent: set[Any] = set()
        self._served: set[Any] = set()
        # Two looks that find nothing under way and the same count saw nothing begin
        # between them.
        self._begun = 0
        # A notification costs time at every call: there is one only while something
        # waits.
        self._watched = 0

    def send(self, entry: Entry) -> None:
        """A call goes out."""
        with self._lock:
            self._begun += 1
            self._sent.add(entry)

    def serve(self, entry: Entry) -> None:
        """A call came in."""
        with self._lock:
            self._begun += 1
            self._served.add(entry)

    def end(self, entry: Entry) -> None:
        """The call is over, on this side; any number of times."""
        with self._lock:
            self._sent.discard(entry)
            self._served.discard(entry)
            if self._watched and not self._sent and not self._served:
                self._empty.notify_all()

    def sent(self) -> list[Any]:
        """The calls of this worker that are not answered yet."""
        with self._lock:
            return list(self._sent)

    def served(self) -> list[Any]:
        """The calls that this worker is executing for others and for itself."""
        with self._lock:
            return list(self._served)

    def when_empty(
        self,
        deadline: Deadline,
        check: Callable[[], None],
        end: Callable[[Entry], float | None] = end_of,
        begun: float | None = None,
        until: float | None = None,
    ) -> int | None:
        """Waits until no call is under way; how many have ever begun, at that moment.

        Args:
          deadline: Of the wait.
          check: Called at the beginning and after each `wake`; ends the wait by raising
            an exception.
          end: Of a call, the moment after which nothing waits for it; None for one
            that may take as long as it likes.
          begun: The moment from which it is overdue at the earliest; by default now.
          until: The moment at which to return None if calls are still under way.

        Raises:
          RpcTimeout: Some still are at the deadline, or long after their own ends; the
            message names them.
        """
        begun = time.monotonic() if begun is None else begun
        with self._lock:
            self._watched += 1
            try:
                while True:
                    check()
                    if not self._sent and not self._served:
                        return self._begun
                    if deadline.remaining() == 0:
                        raise RpcTimeout(
                            f"Calls were still under way after {deadline.timeout:.2f} "
                            f"seconds: {self._describe()}."
                        )
                    patience = self._patience(begun, end)
                    if patience is not None and patience <= 0:
                        raise RpcTimeout(
                            f"Calls were still under way {_OVERDUE:g} seconds after "
                            "their own deadlines, or long after their other worker had "
                            "none of them, when nothing waits for them any more: "
                            f"{self._describe()}."
                        )
                    rest = None if until is None else until - time.monotonic()
                    if rest is not None and rest <= 0:
                        return None
                    left = (deadline.remaining(), patience, rest)
                    self._empty.wait(
                        min((s for s in left if s is not None), default=None)
                    )
            finally:
                self._watched -= 1

    def _patience(
        self, begun: float, end: Callable[[Entry], float | None]
    ) -> float | None:
        """Seconds until every call is long overdue; None if one may take for ever."""
        ends = [end(entry) for entry in (*self._sent, *self._served)]
        if None in ends:
            return None
        last = max((at for at in ends if at is not None), default=begun)
        return max(last, begun) + _OVERDUE - time.monotonic()

    def at_rest(self) -> int | None:
        """The number of calls that ever began; None while one is under way."""
        with self._lock:
            return None if self._sent or self._served else self._begun

    def wake(self) -> None:
        """Has those who wait in `when_empty` check again."""
        with self._lock:
            self._empty.notify_all()

    def _describe(self) -> str:
        ways = [("waiting for", self._sent), ("serving", self._served)]
        return "; ".join(
            f"{way} {describe(entry)}" for way, entries in ways for entry in entries
        )


def describe(entry: Entry) -> str:
    """One call in words, such as `rpc_sync(add) of 'b' since 0.2 s`."""
    seconds = time.monotonic() - entry.since
    return f"{entry.operation} of {entry.peer!r} since {seconds:.1f} s"
