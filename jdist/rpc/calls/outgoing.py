"""Calls that this worker makes: one that a thread waits for, and one with a future."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jdist.rpc.base.current import RunningCall
from jdist.rpc.base.deadline import Deadline, to_meta
from jdist.rpc.base.errors import RpcError, RpcTimeout
from jdist.rpc.base.future import Future, complete, run_all
from jdist.rpc.base.interceptor import Operation
from jdist.rpc.base.message_context import MessageContext
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.callee import AFTER
from jdist.rpc.calls.outstanding_calls import OutstandingCalls
from jdist.rpc.calls.peers import Peer, PooledConnection
from jdist.rpc.codec.codes import names_code
from jdist.rpc.wire.channel import ChannelClosed, NotSent
from jdist.rpc.wire.frame import ERROR, Frame
from jdist.rpc.wire.shared_connection import Callbacks, SharedConnection

__all__ = ["AsyncCall", "Outgoing", "Receive", "Submitted", "SyncCall"]

Receive = Callable[[Any, dict[str, Any]], Any]
"""Makes the result of a call of the value and the metadata of its answer."""


class Submitted(NamedTuple):
    """A request that was sent on a shared connection, by its number there."""

    shared: SharedConnection
    number: int


class Outgoing(NamedTuple):
    """A request to be sent, and its destination.

    Of an asynchronous call `ended` is told the error, or None. It runs on the thread
    that learns of it, before anything else, and must not wait. `after` is a request
    that the callee has to end before it can answer this one.
    """

    peer: Peer
    kind: str
    body: Any
    meta: dict[str, Any]
    deadline: Deadline
    operation: Operation
    receive: Receive | None = None
    ended: Callable[[BaseException | None], None] | None = None
    after: Submitted | None = None


class CallingWorker(Protocol):
    """A worker, as the calls that it makes need it."""

    outstanding: OutstandingCalls

    def value_of(
        self, frame: Frame, receive: Receive | None, callee: WorkerInfo
    ) -> Any:
        """Decodes an answer: returns its value or raises its exception."""

    def undelivered(self, message: MessageContext) -> None:
        """Gives up what a message carried, because its call has failed."""

    def lost(self, peer: Peer, operation: Operation, reason: str) -> RpcError:
        """The error for a call whose connection closed."""

    def timed_out(
        self, peer: Peer, operation: Operation, limit: Deadline
    ) -> RpcTimeout:
        """The error for a call whose deadline came."""


class SyncCall:
    """A synchronous call: a thread waits on a pooled connection."""

    __slots__ = (
        "_peer", "answer", "connection", "deadline", "given_up", "operation", "since",
        "take_back",
    )  # fmt: skip

    def __init__(self, peer: Peer, deadline: Deadline, operation: Operation) -> None:
        self._peer = peer
        self.deadline = deadline
        self.operation = operation
        self.since = time.monotonic()
        self.connection: PooledConnection | None = None
        self.answer: Frame | None = None
        self.given_up: str | None = None
        self.take_back: Callable[[], None] | None = None

    @property
    def peer(self) -> str:
        """Name of the callee."""
        return self._peer.info.name

    @property
    def has_answer(self) -> bool:
        """Whether its answer came."""
        return self.answer is not None

    def give_up(self, reason: str) -> None:
        """Ends the call, because the call within which it is made was cancelled."""
        # Noted first: the call may be about to take a connection.
        self.given_up = reason
        self._peer.cut(self, reason)
        if self.take_back is not None:
            self.take_back()

    def run(self, request: tuple[str, dict[str, Any], Any, list[Any]]) -> float | None:
        """Sends a request, as kind, metadata, tree and leaves, and receives its answer.

        Returns:
          What `Peer.give` returns.

        Raises: what `Peer.take` and `Channel.exchange` raise.
        """
        while True:
            connection = self._peer.take(self, self.deadline)
            # It may have been given up before it had a connection to be closed.
            if self.given_up is not None:
                raise ChannelClosed(self.given_up)
            try:
                return self._exchange(connection, request)
            except NotSent as error:
                if connection.unused or self.given_up is not None:
                    raise
                # It had closed while no call used it, so this one may use another.
                self.release(f"it was closed: {error}")

    def _exchange(
        self,
        connection: PooledConnection,
        request: tuple[str, dict[str, Any], Any, list[Any]],
    ) -> float | None:
        kind, meta, tree, leaves = request
        meta = meta | to_meta(self.deadline)
        frame = Frame(kind, next(connection.numbers), meta, tree, leaves)
        try:
            self.answer = connection.channel.exchange(frame, self.deadline.at)
        except TimeoutError:
            # The answer may still come, and must not be taken for that of a later call.
            self.release("the call was given up at its deadline")
            raise
        except ValueError:
            # Refused before a byte was sent, so the connection is as good as before.
            self._peer.give(self)
            raise
        return self._peer.give(self)

    def release(self, reason: str) -> None:
        """Closes the channel if the call still has one; any number of times."""
        if self.connection is not None:
            self._peer.drop(self.connection, reason)
            self.connection = None


class AsyncCall:
    """An asynchronous call: a future that the shared connection completes."""

    __slots__ = (
        "_after",
        "_agent",
        "_ended",
        "_execution",
        "_peer",
        "_receive",
        "deadline",
        "future",
        "message",
        "operation",
        "since",
        "submitted",
    )  # fmt: skip

    def __init__(
        self,
        agent: CallingWorker,
        outgoing: Outgoing,
        message: MessageContext,
        execution: RunningCall | None,
    ) -> None:
        self.message = message
        self._peer = outgoing.peer
        self.operation = outgoing.operation
        self.deadline = outgoing.deadline
        self.since = time.monotonic()
        self.future: Future[Any] = Future()
        self._agent = agent
        self._receive = outgoing.receive
        self._ended = outgoing.ended
        self._execution = execution
        self._after = outgoing.after
        self.submitted: Submitted | None = None

    @property
    def peer(self) -> str:
        """Name of the callee."""
        return self._peer.info.name

    @property
    def has_answer(self) -> bool:
        """Whether its answer came, so that only callbacks still run."""
        return self.future.done()

    def submit(self, shared: SharedConnection, frame: Frame) -> None:
        """Sends it; from here on exactly one of the three ends below comes.

        Raises:
          ValueError: The frame is beyond the limits.
        """
        meta, after = frame.meta, self._after
        # On another connection that number is another request's.
        if after is not None and after.shared is shared:
            meta = meta | {AFTER: after.number}
        number = shared.submit(self, frame.kind, meta, frame.tree, frame.leaves)
        self.submitted = Submitted(shared, number)
        if self._execution is not None and not self.future.done():
            self._execution.begin(self)
            # It may have been answered in between, and ended before it was noted.
            if self.future.done():
                self._execution.end(self)

    def answered(self, frame: Frame) -> Callbacks:
        """See `Pending`."""
        if frame.kind == ERROR or names_code(frame.tree):
            # Not on the reader: constructors and modules are the user's code.
            return [lambda: run_all(self._take_in(frame))]
        return self._take_in(frame)

    def _take_in(self, frame: Frame) -> Callbacks:
        try:
            value = self._agent.value_of(frame, self._receive, self._peer.info)
        except BaseException as error:  # noqa: BLE001 - it becomes the future's
            return self.end(None, error)
        return self.end(value, None)

    def disconnected(self, reason: str) -> Callbacks:
        """See `Pending`."""
        # Not on the reader: to find out who is lost may take a moment.
        return [lambda: self._lose(reason)]

    def expired(self) -> Callbacks:
        """See `Pending`."""
        return [self._time_out]

    def give_up(self, reason: str) -> None:
        """Ends the call, because the call within which it is made was cancelled."""
        sent = self.submitted
        if sent is not None and sent.shared.withdraw(sent.number):
            run_all(self.end(None, RpcTimeout(reason)))

    def end(self, value: Any, error: BaseException | None) -> Callbacks:
        """Completes the future; returns the callbacks that remain to be run."""
        if self._ended is not None:
            self._ended(error)
        callbacks = complete(self.future, value, error)
        if error is not None:
            # The callee may have got the references in it, or not: they are settled.
            self._agent.undelivered(self.message)
        if self._execution is not None:
            self._execution.end(self)
        if not callbacks:
            self._agent.outstanding.end(self)
            return []
        # What callbacks begin must be on the ledger before this call leaves it.
        return [*callbacks, lambda: self._agent.outstanding.end(self)]

    def _lose(self, reason: str) -> None:
        error = self._agent.lost(self._peer, self.operation, reason)
        run_all(self.end(None, error))

    def _time_out(self) -> None:
        error = self._agent.timed_out(self._peer, self.operation, self.deadline)
        run_all(self.end(None, error))
