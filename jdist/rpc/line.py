"""A line: a channel on which many requests are under way at once.

One thread reads it and completes what the answers belong to. Before that thread runs
anybody's callbacks it passes the reading on, so that a callback may wait for another
answer of the same line.
"""

import itertools
from collections.abc import Callable
from typing import Any, Protocol

from jdist.rpc.channel import Channel, ChannelClosed
from jdist.rpc.crew import Crew
from jdist.rpc.deadline import Deadline
from jdist.rpc.errors import ProtocolError
from jdist.rpc.frame import CANCEL, Frame

Callbacks = list[Callable[[], None]]


class Pending(Protocol):
    """A request that waits for its answer. Exactly one of these is called, once."""

    deadline: Deadline

    def answered(self, frame: Frame) -> Callbacks:
        """The answer came; what is to be run now, outside the reading thread."""

    def disconnected(self, reason: str) -> Callbacks:
        """There will be no answer."""

    def expired(self) -> Callbacks:
        """The deadline came first."""


class Line:
    """The requesting side of a shared channel.

    Args:
      channel: Owned by the line from now on.
      crew: Lends the thread that reads.
      on_push: Called with frames that answer no request of this line.
      on_closed: Called once with the reason when the channel has closed.
    """

    def __init__(
        self,
        channel: Channel,
        crew: Crew,
        on_push: Callable[[Frame], None] | None = None,
        on_closed: Callable[[str], None] | None = None,
    ) -> None:
        self._channel = channel
        self._crew = crew
        self._on_push = on_push
        self._on_closed = on_closed
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self.closed: str | None = None
        crew.run(self._read)

    def submit(
        self, pending: Pending, kind: str, meta: dict[str, Any], tree: Any, leaves: Any
    ) -> int:
        """Sends a request; its number, for `withdraw`.

        Failures reach `pending`, except what is wrong with the request itself.

        Raises:
          ValueError: The frame is beyond the limits.
        """
        number = next(self._numbers)
        self._pending[number] = pending
        try:
            frame = Frame(kind, number, meta, tree, leaves, shared=True)
            self._channel.send(frame, pending.deadline.at)
        except ValueError:
            self._pending.pop(number, None)
            raise
        except TimeoutError:
            self._expire(number)
        except ChannelClosed as error:
            self._disconnect(number, str(error))
        if self.closed is not None:  # it may have closed before this request was noted
            self._disconnect(number, self.closed)
        return number

    def withdraw(self, number: int) -> bool:
        """Forgets a request and tells the other side; False if it was answered."""
        if self._pending.pop(number, None) is None:
            return False
        self._cancel(number)
        return True

    def expire(self, now: float) -> float | None:
        """Ends the requests whose deadline has come; the next deadline."""
        waiting = [
            (pending.deadline.at, number)
            for number, pending in list(self._pending.items())
            if pending.deadline.at is not None
        ]
        for at, number in waiting:
            if at <= now:
                self._expire(number)
        return min((at for at, _ in waiting if at > now), default=None)

    def close(self, reason: str) -> None:
        """Closes the channel; requests under way end with `reason`."""
        self._channel.close(reason)

    def _expire(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._cancel(number)
            self._later(pending.expired())

    def _disconnect(self, number: int, reason: str) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._later(pending.disconnected(reason))

    def _later(self, callbacks: Callbacks) -> None:
        if callbacks:
            self._crew.run(lambda: _run(callbacks))

    def _cancel(self, number: int) -> None:
        # Not on this thread: the channel may be full, which may be why time ran out.
        self._crew.run(lambda: self._say_cancelled(number))

    def _say_cancelled(self, number: int) -> None:
        try:
            self._channel.send(Frame(CANCEL, number, {}, None, [], shared=True))
        except ChannelClosed:
            return  # then there is nothing left to cancel

    def _read(self) -> None:
        while self._read_one():
            pass

    def _read_one(self) -> bool:
        """Passes one answer on; whether this thread shall wait for the next one.

        A function of its own, so that nothing of an answer is kept while waiting.
        """
        try:
            frame = self._channel.receive()
        except (ChannelClosed, ProtocolError) as error:
            self._end(str(error))
            return False
        pending = self._pending.pop(frame.id, None)
        if pending is None:
            if self._on_push is not None:
                self._on_push(frame)
            return True
        callbacks = pending.answered(frame)
        if not callbacks:
            return True
        self._crew.run(self._read)
        _run(callbacks)
        return False

    def _end(self, reason: str) -> None:
        self.closed = reason
        self._channel.close(reason)
        for number in list(self._pending):
            self._disconnect(number, reason)
        if self._on_closed is not None:
            self._on_closed(reason)


def _run(callbacks: Callbacks) -> None:
    for callback in callbacks:
        callback()
