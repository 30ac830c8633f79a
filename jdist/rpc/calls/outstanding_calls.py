"""The calls under way on one worker, and what they need of it.

Every call is entered twice: by its caller, from before it is sent until its callbacks
have run, and by its callee, from its arrival until its answer is sent. So a message in
flight is always noted at one side at least, and none is in flight when no worker has
outstanding calls.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from jdist.rpc.base import current, device_maps
from jdist.rpc.base.current import Deadline, Meta, Operation, RunningCall, with_deadline
from jdist.rpc.base.errors import ProtocolError, RpcError, RpcTimeout, WorkerLost
from jdist.rpc.base.future import Future, complete, run_all
from jdist.rpc.base.options import RpcOptions
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.peers import Peer, PooledConnection
from jdist.rpc.codec import Codec, remote_exception
from jdist.rpc.codec.codec import MessageContext
from jdist.rpc.codec.codes import Tree, names_code
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.wire.channel import ChannelClosed, NotSent
from jdist.rpc.wire.frame import ERROR, REPLY, Frame
from jdist.rpc.wire.shared_connection import Callbacks, SharedConnection

AFTER = "after"
"""In the metadata of a request: the number of one on the same connection, before the
end of which it cannot be answered."""

_OVERDUE = 60.0
"""Seconds after its deadline for which a graceful end waits for a call: its function
may be about to return."""


class CallUnderWay:
    """One call, seen from one side.

    Args:
      worker: The worker on the other side.
      operation: The function, or the kind of the request.
      deadline: The moment at which it must be over.

    Attributes:
      since: The moment at which it began, of `time.monotonic()`.
    """

    __slots__ = ("__weakref__", "deadline", "operation", "since", "worker")

    def __init__(
        self, worker: WorkerInfo, operation: Operation, deadline: Deadline
    ) -> None:
        self.worker = worker
        self.operation = operation
        self.deadline = deadline
        self.since = time.monotonic()

    @property
    def peer(self) -> str:
        """Name of the worker on the other side."""
        return self.worker.name

    @property
    def has_answer(self) -> bool:
        """Whether its answer came, so that only what follows from it still runs."""
        return False  # once it has one, its callee no longer enters it


class OutstandingCalls:
    """The calls of one worker that are under way, on either side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._sent: set[CallUnderWay] = set()
        self._served: set[Any] = set()  # of `Execution`
        # Two looks that find nothing under way and the same count saw nothing begin
        # between them.
        self._begun = 0
        # A notification costs time at every call: there is one only while something
        # waits.
        self._watched = 0

    def send(self, entry: CallUnderWay) -> None:
        """Records an outgoing call."""
        with self._lock:
            self._begun += 1
            self._sent.add(entry)

    def serve(self, entry: CallUnderWay) -> None:
        """Records an incoming call."""
        with self._lock:
            self._begun += 1
            self._served.add(entry)

    def end(self, entry: CallUnderWay) -> None:
        """Removes a call that is over on this side; idempotent."""
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
        end: Callable[[CallUnderWay], float | None],
        begun: float,
        until: float,
    ) -> int | None:
        """Waits until no call is under way; returns how many have ever begun.

        Args:
          deadline: Deadline of the wait.
          check: Called at the beginning and after each `wake`; ends the wait by raising
            an exception.
          end: The moment of a call after which nothing waits for it; None for one
            that may take as long as it likes.
          begun: The moment from which it is overdue at the earliest.
          until: The moment at which to return None if calls are still under way.

        Raises:
          RpcTimeout: Some still are at the deadline, or long after their own ends; the
            message names them.
        """
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
                    rest = until - time.monotonic()
                    if rest <= 0:
                        return None
                    left = (deadline.remaining(), patience, rest)
                    self._empty.wait(min(s for s in left if s is not None))
            finally:
                self._watched -= 1

    def _patience(
        self, begun: float, end: Callable[[CallUnderWay], float | None]
    ) -> float | None:
        """Seconds until every call is long overdue; None if one may take for ever."""
        ends = [end(entry) for entry in (*self._sent, *self._served)]
        if None in ends:
            return None
        last = max((at for at in ends if at is not None), default=begun)
        return max(last, begun) + _OVERDUE - time.monotonic()

    def wake(self) -> None:
        """Wakes the threads in `when_empty`, which then check again."""
        with self._lock:
            self._empty.notify_all()

    def _describe(self) -> str:
        ways = [("waiting for", self._sent), ("serving", self._served)]
        return "; ".join(
            f"{way} {describe(entry)}" for way, entries in ways for entry in entries
        )


def describe(entry: CallUnderWay) -> str:
    """Describes a call, such as `rpc_sync(add) of 'b' since 0.2 s`."""
    seconds = time.monotonic() - entry.since
    return f"{entry.operation} of {entry.peer!r} since {seconds:.1f} s"


# --- calls that this worker makes ---

Receive = Callable[[Any, Meta], Any]
"""Makes the result of a call from the value and the metadata of its answer."""


class Submitted(NamedTuple):
    """A request that was sent on a shared connection, by its number there."""

    shared: SharedConnection
    number: int


class Outgoing(msgspec.Struct, frozen=True):
    """A request to be sent, and its destination.

    For an asynchronous call, `ended` is called with the error or None on the receiving
    thread, before anything else; it must not wait. `after` is a request that the callee
    has to end before it can answer this one.
    """

    peer: Peer
    kind: str
    body: Any
    meta: Meta
    deadline: Deadline
    operation: Operation
    receive: Receive | None = None
    ended: Callable[[BaseException | None], None] | None = None
    after: Submitted | None = None


Contents = tuple[str, Meta, Tree, list[Any]]
"""Kind, metadata, tree and leaves of a request that has no number yet."""

# --- what calls need of their worker ---


class CallingWorker:
    """The part of a worker that encodes calls, reads answers and explains failures.

    Args:
      info: Its name and rank.
      functions: The functions that others may call.
      options: See there.

    Attributes:
      device_maps: On which of their devices its arrays arrive on others.
      codec: Encodes values as frames and decodes them.
      outstanding: The calls under way.
      pool: Threads for users' functions and for the library's work.
      hint: Says what another worker is doing, for the message of a timeout.
      ending: Whether its shutdown has begun to take it out of the group. It stays so.
      closed: Whether it was shut down.
      group: Its `CoordinatorClient`, once it has joined.
      references: Its `References`: to its values, and to those of other workers.
    """

    # Untyped, as imports run downwards.
    group: Any
    references: Any

    def __init__(
        self, info: WorkerInfo, functions: FunctionTable, options: RpcOptions
    ) -> None:
        self.info = info
        self.options = options
        self.device_maps = device_maps.DeviceMaps()
        self.codec = Codec(functions, options.allow_pickle)
        self.outstanding = OutstandingCalls()
        self.pool = ThreadPool(f"{info.name} rpc", options.threads)
        self.hint: Callable[[Peer], str] = lambda peer: ""  # set by `debug`
        self.ending = False
        self.closed = False

    def encode(
        self, value: Any, message: MessageContext, answer: bool = False
    ) -> tuple[Tree, list[Any]]:
        """Encodes a value for a call, or an answer, as a tree and leaves."""
        try:
            tree, leaves = self.codec.encode(value, message)
            if leaves and self.device_maps.in_force:
                to = message.worker.incarnation
                self.device_maps.label(leaves, message.meta, to, answer)
            return tree, leaves
        except BaseException:
            self.undelivered(message)
            raise

    def undelivered(self, message: MessageContext) -> None:
        """Gives up the references and values in the message of a failed call."""
        self.references.undelivered(message)
        for callback in message.if_lost:
            callback()

    def value_of(
        self, frame: Frame, receive: Receive | None, callee: WorkerInfo
    ) -> Any:
        """Decodes an answer: returns its value or raises its exception."""
        message = MessageContext(callee, frame.meta)
        try:
            leaves = frame.leaves
            if device_maps.DEVICES in frame.meta:
                leaves = device_maps.placed(leaves, frame.meta)
            value = self.codec.decode(frame.tree, leaves, message)
        except BaseException:
            # Its sender counts the references in it as delivered.
            self.references.decline(frame.tree, callee)
            raise
        if frame.kind == REPLY:
            return value if receive is None else receive(value, frame.meta)
        if frame.kind != ERROR:
            raise ProtocolError(f"A frame of kind {frame.kind!r} is not an answer.")
        raise self.rebuild(value)

    def describe(self, error: BaseException) -> dict[str, Any]:
        """Describes an exception of this worker by plain values, to be sent."""
        return remote_exception.describe(error, self.info.name)

    def rebuild(self, description: dict[str, Any]) -> Exception:
        """Makes the exception that another worker has described.

        Raises:
          ProtocolError: `description` is not what `describe` makes.
        """
        return remote_exception.rebuild(description, self.codec.functions)

    def lost(self, peer: Peer, operation: Operation, reason: str) -> RpcError:
        """Makes the error for a call whose channel closed."""
        # The others close their channels to a worker that leaves before it does itself.
        if self.ending:
            return RpcError(f"RPC was shut down on this worker during {operation}.")
        expelled = self.group.expelled()
        if expelled is not None:
            return WorkerLost(self.info.name, str(operation), expelled)
        known = peer.departed or f"its connection closed ({reason})"
        return WorkerLost(peer.info.name, str(operation), known)

    def timed_out(
        self, peer: Peer, operation: Operation, limit: Deadline
    ) -> RpcTimeout:
        """Makes the error for a call past its deadline, with the callee's activity."""
        return RpcTimeout(
            f"{current.exceeded(limit)} and will now be marked with an error: "
            f"{operation} to {peer.info.name!r}.{self.hint(peer)}"
        )


# --- calls under way ---


class SyncCall(CallUnderWay):
    """A synchronous call: a thread waits on a pooled connection.

    Args:
      outgoing: The request.
      execution: The call within which it is made, if there is one.
    """

    __slots__ = ("_peer", "answer", "connection", "execution", "given_up", "take_back")

    def __init__(self, outgoing: Outgoing, execution: RunningCall | None) -> None:
        super().__init__(outgoing.peer.info, outgoing.operation, outgoing.deadline)
        self._peer = outgoing.peer
        self.execution = execution
        self.connection: PooledConnection | None = None
        self.answer: Frame | None = None
        self.given_up: str | None = None
        self.take_back: Callable[[], None] | None = None

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

    def run(self, kind: str, meta: Meta, tree: Tree, leaves: list[Any]) -> float | None:
        """Sends a request and receives its answer.

        Returns:
          What `Peer.give` returns.

        Raises: what `Peer.take` and `Channel.exchange` raise.
        """
        peer, deadline = self._peer, self.deadline
        while True:
            connection = peer.take(self, deadline)
            # It may have been given up before it had a connection to be closed.
            if self.given_up is not None:
                raise ChannelClosed(self.given_up)
            number = next(connection.numbers)
            frame = Frame(kind, number, with_deadline(meta, deadline), tree, leaves)
            try:
                self.answer = connection.channel.exchange(frame, deadline.at)
            except NotSent as error:
                if connection.unused or self.given_up is not None:
                    raise
                # It had closed while no call used it, so this one may use another.
                self.release(f"it was closed: {error}")
            except TimeoutError:
                # The answer may still come, and is not that of a later call.
                self.release("the call was given up at its deadline")
                raise
            except ValueError:
                # Refused before a byte was sent: the connection is as good as before.
                peer.give(self)
                raise
            else:
                return peer.give(self)

    def release(self, reason: str) -> None:
        """Closes the channel if the call still has one; idempotent."""
        if self.connection is not None:
            self.connection.channel.close(reason)  # which informs the callee
            self.connection = None


class AsyncCall(CallUnderWay):
    """An asynchronous call: a future that the shared connection completes."""

    __slots__ = (
        "_after", "_agent", "_ended", "_execution", "_peer", "_receive", "future",
        "message", "submitted",
    )  # fmt: skip

    def __init__(
        self,
        agent: CallingWorker,
        outgoing: Outgoing,
        message: MessageContext,
        execution: RunningCall | None,
    ) -> None:
        super().__init__(outgoing.peer.info, outgoing.operation, outgoing.deadline)
        self.message = message
        self.future: Future[Any] = Future()
        self._agent = agent
        # Not the request itself, which holds the arguments.
        self._peer = outgoing.peer
        self._after = outgoing.after
        self._receive = outgoing.receive
        self._ended = outgoing.ended
        self._execution = execution
        self.submitted: Submitted | None = None

    @property
    def has_answer(self) -> bool:
        """Whether its answer came, so that only callbacks still run."""
        return self.future.done()

    def submit(self, shared: SharedConnection, contents: Contents) -> None:
        """Sends the request; exactly one of the three methods below is then called.

        Raises:
          ValueError: The frame is beyond the limits.
        """
        kind, meta, tree, leaves = contents
        after = self._after
        # On another connection that number is another request's.
        if after is not None and after.shared is shared:
            meta = meta | {AFTER: after.number}
        number = shared.submit(self, kind, meta, tree, leaves)
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
            value = self._agent.value_of(frame, self._receive, self.worker)
        except BaseException as error:  # noqa: BLE001 - it becomes the future's
            return self.end(None, error)
        return self.end(value, None)

    def disconnected(self, reason: str) -> Callbacks:
        """See `Pending`."""
        # Not on the reader: finding out which worker is lost may take a moment.
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
        # Calls that callbacks begin must be in the table before this one leaves it.
        return [*callbacks, lambda: self._agent.outstanding.end(self)]

    def _lose(self, reason: str) -> None:
        error = self._agent.lost(self._peer, self.operation, reason)
        run_all(self.end(None, error))

    def _time_out(self) -> None:
        error = self._agent.timed_out(self._peer, self.operation, self.deadline)
        run_all(self.end(None, error))
