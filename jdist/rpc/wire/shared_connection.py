"""A multiplexed connection, shared by asynchronous calls.

The thread that reads it completes the calls as their answers arrive. It runs nothing
else: users' functions, such as callbacks of futures and the constructors of what an
answer holds, run on the pool, so that no function can keep an answer from being read.
"""

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol

from jdist.rpc.base.current import Deadline, Meta
from jdist.rpc.base.errors import RpcError
from jdist.rpc.base.future import run_all
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.codec.codes import Tree
from jdist.rpc.wire.channel import Channel, ChannelClosed, NotSent, Reader
from jdist.rpc.wire.frame import CANCEL, Frame

_CANCEL_SECONDS = 1.0

Callbacks = list[Callable[[], None]]


class Pending(Protocol):
    """A request that waits for its answer. Exactly one of these is called, once.

    Each returns the callbacks to be run on the pool.
    """

    deadline: Deadline

    def answered(self, frame: Frame) -> Callbacks:
        """Handles the answer."""

    def disconnected(self, reason: str) -> Callbacks:
        """Handles a connection that closed before an answer came."""

    def expired(self) -> Callbacks:
        """Handles a deadline that passed before an answer came."""


class SharedConnection:
    """The requesting side of a multiplexed connection.

    Args:
      channel: Owned by the connection.
      pool: Runs the reader and what calls leave to be run.
      on_push: Called by the reader with frames that answer no request; must not wait.
      on_closed: Called by the reader, once, with the reason why the channel closed.

    Attributes:
      closed: Why the channel is closed, or None.
    """

    def __init__(
        self,
        channel: Channel,
        pool: ThreadPool,
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
        self.closed: str | None = None
        if not pool.start(self._read):
            reason = "there is no thread to read it"
            channel.close(reason)
            raise RpcError(f"A connection to {channel.peer!r} was closed: {reason}.")

    def submit(
        self, pending: Pending, kind: str, meta: Meta, tree: Tree, leaves: list[Any]
    ) -> int:
        """Sends a request; returns its number, for `withdraw`.

        Failures reach `pending`, except what is wrong with the request itself.

        Raises:
          ValueError: The frame is beyond the limits.
          NotSent: The channel is closed, and the request may go on another one.
        """
        number = next(self._numbers)
        self._leaving.add(number)
        # Before it is sent: the answer may arrive before `send` returns.
        self._pending[number] = pending
        try:
            frame = Frame(kind, number, meta, tree, leaves, shared=True)
            self._channel.send(frame, pending.deadline.at)
        except NotSent as error:
            # The reader may not have noticed yet.
            self.closed = self.closed or str(error)
            if self._pending.pop(number, None) is not None:
                raise
        except TimeoutError:
            self._expire(number)
        except ChannelClosed as error:
            self._disconnect(number, str(error))
        except BaseException:
            # Nothing was sent of what is beyond the limits; but Ctrl-C may come later.
            self.withdraw(number)
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
        """Ends the requests whose deadline has come; returns the next deadline."""
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
            self._run_later(pending.expired())

    def _disconnect(self, number: int, reason: str) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._run_later(pending.disconnected(reason))

    def _run_later(self, callbacks: Callbacks) -> None:
        if callbacks:
            self._pool.run(lambda: run_all(callbacks))

    def _cancel(self, number: int) -> None:
        # Not on this thread: the channel may be full, which may be why time ran out.
        self._pool.run(lambda: self._send_cancel(number))

    def _send_cancel(self, number: int) -> None:
        # A limit of its own: without a thread of the pool this is the timer's, and a
        # peer that is frozen reads nothing.
        until = time.monotonic() + _CANCEL_SECONDS
        # If it is closed, there is nothing left to cancel. And the callee keeps the
        # deadline too; this only spares it some work.
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self._channel.send(Frame(CANCEL, number, {}, None, [], shared=True), until)

    # --- the reader ---

    def _read(self) -> None:
        self._channel.read(Reader(self._take, self._end))

    def _take(self, frame: Frame) -> None:
        if not self._answer(frame.id, frame) and self._on_push is not None:
            self._on_push(frame)

    def _answer(self, number: int, frame: Frame) -> bool:
        """Passes an answer to its request; False if no request of this number waits."""
        pending = self._pending.pop(number, None)
        if pending is None:
            return False
        self._run_later(pending.answered(frame))
        return True

    def _end(self, reason: str) -> None:
        self.closed = reason
        self._channel.close(reason)
        for number in list(self._pending):
            if number not in self._leaving:
                self._disconnect(number, reason)
        if self._on_closed is not None:
            self._on_closed(reason)
