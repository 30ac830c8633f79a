"""A shared: a channel on which many requests are under way at once.

Who reads completes what the answers belong to. A thread that waits for an answer reads
itself for as long as a short call takes, so that no thread hands over to another. When
its answer takes longer, for the main thread, and for everybody who does not wait by
himself, a thread of the pool reads, and leaves the reading to the next one who waits.
"""

import functools
import itertools
import threading
import time
from collections.abc import Callable
from contextvars import Context
from typing import Any, Protocol

from jdist.rpc.base.deadline import Deadline
from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.future import Future, run_all, unwatch, watch
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.wire.channel import Channel, ChannelClosed, NotSent
from jdist.rpc.wire.frame import CANCEL, Frame
from jdist.rpc.wire.relief import SHORTLY, Reading, Relief

Callbacks = list[Callable[[], None]]

_BRISK = 0.002
"""Seconds for which a thread that waits reads itself. Then a thread of the pool does,
which has no deadline, and can be awaited in more ways than a socket."""

_AT_REST = 20
"""Looks until an idle connection is read again; once closed, calls take another one."""


class Pending(Protocol):
    """A request that waits for its answer. Exactly one of these is called, once."""

    deadline: Deadline

    def answered(self, frame: Frame) -> Callbacks:
        """The answer came; what is to be run now, outside the reading thread."""

    def disconnected(self, reason: str) -> Callbacks:
        """There will be no answer."""

    def expired(self) -> Callbacks:
        """The deadline came first."""


class SharedConnection:
    """The requesting side of a shared channel.

    Args:
      channel: Owned by the connection from now on.
      pool: Lends the thread that reads when nobody who waits does.
      relief: Looks after the reading meanwhile.
      on_push: Called with frames that answer no request of this connection.
      on_closed: Called once with the reason when the channel has closed.
    """

    def __init__(
        self,
        channel: Channel,
        pool: ThreadPool,
        relief: Relief,
        on_push: Callable[[Frame], None] | None = None,
        on_closed: Callable[[str], None] | None = None,
    ) -> None:
        self._channel = channel
        self._pool = pool
        self._on_push = on_push
        self._on_closed = on_closed
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._leaving: set[int] = set()  # being sent: `submit` sees that it closes
        # Threads that wait, and would read, and how to wake them.
        self._ready: dict[Future[Any], threading.Semaphore] = {}
        self._counted_on: dict[Future[Any], None] = {}
        self._reading = Reading(relief, self._start)
        self.closed: str | None = None
        self._start()

    def submit(
        self, pending: Pending, kind: str, meta: dict[str, Any], tree: Any, leaves: Any
    ) -> int:
        """Sends a request; its number, for `withdraw`.

        Failures reach `pending`, except what is wrong with the request itself.

        Raises:
          ValueError: The frame is beyond the limits.
          NotSent: The channel is closed, and the request may go on another one.
        """
        number = next(self._numbers)
        self._leaving.add(number)
        self._pending[number] = pending
        try:
            frame = Frame(kind, number, meta, tree, leaves, shared=True)
            self._channel.send(frame, pending.deadline.at)
        except NotSent as error:
            # The thread that reads may not have noticed yet.
            self.closed = self.closed or str(error)
            if self._pending.pop(number, None) is not None:
                raise
        except TimeoutError:
            self._expire(number)
        except ChannelClosed as error:
            self._disconnect(number, str(error))
        except BaseException:  # it is beyond the limits, or Ctrl-C came
            self._pending.pop(number, None)
            raise
        finally:
            self._leaving.discard(number)
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
            self._pool.run(lambda: run_all(callbacks))

    def _cancel(self, number: int) -> None:
        # Not on this thread: the channel may be full, which may be why time ran out.
        self._pool.run(lambda: self._say_cancelled(number))

    def _say_cancelled(self, number: int) -> None:
        try:
            self._channel.send(Frame(CANCEL, number, {}, None, [], shared=True))
        except ChannelClosed:
            return  # then there is nothing left to cancel

    # --- who reads ---

    def attend(self, future: Future[Any], until: float | None) -> bool:
        """See `Source.attend`: reads until the future is completed, or not for long.

        Not on the main thread: Ctrl-C may come there between any two steps, and an
        answer that was received and not passed on would be lost to another thread.
        """
        if _may_be_interrupted():
            return future.done()
        limit = time.monotonic() + _BRISK
        if until is not None and until < limit:
            limit = until
        while not future.done():
            if self._reading.take():
                return self._read_for(future, limit)
            if not self._wait_to_read(future, limit):
                return future.done()
        return True

    def expect(self, future: Future[Any]) -> None:
        """See `Source.expect`: has it read as long as the future is open."""
        self._counted_on[future] = None
        if future.done():
            self.settled(future)
        elif not _may_be_interrupted():
            self._reading.relieve()
        elif self._reading.free:
            self._pool.run(self._read_if_free)

    def settled(self, future: Future[Any]) -> None:
        """See `Source.settled`."""
        self._counted_on.pop(future, None)

    def _read_for(self, future: Future[Any], limit: float) -> bool:
        """Reads on a thread that waits and has the reading."""
        try:
            rest = self._read_until(future, limit)
        except (ChannelClosed, ProtocolError) as error:
            self._end(str(error))
            return future.done()
        except BaseException:
            self._reading.leave()
            raise
        if rest is not None:
            self._reading.hand_over(rest)
        elif not self._leave_to_another():
            self._reading.hand_over()
        return future.done()

    def _read_until(
        self, future: Future[Any], limit: float
    ) -> Callable[[], Frame] | None:
        """None once the future is completed; how to read on if that takes longer."""
        try:
            while not future.done():
                frame = self._channel.receive_brief(limit)
                if not isinstance(frame, Frame):
                    return frame
                # Not in the context of the one who waits: it is anybody's answer.
                self._later(Context().run(self._take_in, frame))
                if time.monotonic() >= limit:
                    return self._channel.receive
        except TimeoutError:
            return self._channel.receive
        return None

    def _wait_to_read(self, future: Future[Any], limit: float) -> bool:
        """Waits while another thread reads; False when it took too long."""
        wake = threading.Semaphore(0)
        self._ready[future] = wake
        try:
            if watch(future, wake.release, counts=False):
                return True
            left = limit - time.monotonic()
            return self._reading.free or (left > 0 and wake.acquire(timeout=left))
        finally:
            self._ready.pop(future, None)
            unwatch(future, wake.release)

    def _leave_to_another(self) -> bool:
        """Leaves the reading; False, and it is not left, if somebody must go on."""
        for future, wake in list(self._ready.items()):
            if not future.done():
                self._reading.leave()
                wake.release()
                return True
        if self._counted_on:
            return False
        self._reading.leave(SHORTLY if self._pending else _AT_REST)
        return True

    def _start(self, first: Callable[[], Frame] | None = None) -> None:
        self._pool.run(functools.partial(self._read, first or self._channel.receive))

    def _read_if_free(self) -> None:
        if self._reading.take():
            self._read(self._channel.receive)

    def _read(self, first: Callable[[], Frame]) -> None:
        if self._read_one(first):
            while self._read_one(self._channel.receive):
                pass

    def _read_one(self, receive: Callable[[], Frame]) -> bool:
        """Passes one answer on; whether this thread shall wait for the next one.

        A function of its own, so that nothing of an answer is kept while waiting.
        """
        try:
            frame = receive()
        except (ChannelClosed, ProtocolError) as error:
            self._end(str(error))
            return False
        callbacks = self._take_in(frame)
        if callbacks:
            # They may wait for another answer, which others may read meanwhile.
            self._reading.leave()
            run_all(callbacks)
            return self._reading.take()
        return not (self._ready and self._leave_to_another())

    def _take_in(self, frame: Frame) -> Callbacks:
        pending = self._pending.pop(frame.id, None)
        if pending is not None:
            return pending.answered(frame)
        if self._on_push is not None:
            self._on_push(frame)
        return []

    def _end(self, reason: str) -> None:
        self.closed = reason
        self._channel.close(reason)
        for number in list(self._pending):
            if number not in self._leaving:
                self._disconnect(number, reason)
        if self._on_closed is not None:
            self._on_closed(reason)


def _may_be_interrupted() -> bool:
    """Whether Python runs signal handlers on this thread."""
    return threading.current_thread() is threading.main_thread()
