"""The callee's side of calls: executing, answering and cancelling requests.

The thread that reads a pooled connection runs its calls itself: the caller waits for
one answer at a time, and a hand-off between threads costs about 45 us, more than most
calls. The thread that reads a shared connection runs nothing but handlers registered as
inline, which never wait. Calls of users' functions have a limited number of places in
the pool; what the library sends, such as a backward pass, and the calls that a called
function makes have threads without limit. So no function can keep a message from being
read, nor one of the library's from being served.
"""

import contextvars
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from jdist._compat import called_outside_mesh
from jdist._errors import value_error
from jdist.rpc.base import current, device_maps
from jdist.rpc.base.current import Cancellable, Meta, Operation, Scope
from jdist.rpc.base.errors import ProtocolError, RemoteError, RpcTimeout
from jdist.rpc.base.future import Future, call_when_done, cancel, collect_all, run_all
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.outstanding_calls import AFTER, CallingWorker, CallUnderWay
from jdist.rpc.codec.codec import MessageContext
from jdist.rpc.codec.codes import names_code
from jdist.rpc.wire.channel import Channel, ChannelClosed, Reader
from jdist.rpc.wire.frame import CANCEL, ERROR, REPLY, Frame


class Execution(CallUnderWay):
    """One call being executed, with the waits that end when it is cancelled.

    Python cannot stop a running function. Cancellation ends a call that has not begun,
    the future of an async_execution function, and the calls that the function makes.

    Args:
      caller: The worker that asked for it.
      frame: The request.
      pool: Runs what a cancellation ends.
    """

    __slots__ = (
        "_ends", "_followers", "_lock", "_pool", "answer", "brings_references",
        "cancelled", "deferred", "ticket",
    )  # fmt: skip

    answer: Future[Frame]
    """Once deferred: the answer to be sent."""

    ticket: Any
    """The ticket by which the caller may cancel it out of band; None if it will not."""

    deferred: bool
    """Whether it continues without a thread, as a future."""

    brings_references: bool
    """Whether its answer brings references."""

    def __init__(self, caller: WorkerInfo, frame: Frame, pool: ThreadPool) -> None:
        until = current.from_meta(frame.meta)
        super().__init__(caller, Operation(frame.kind), until)
        self.ticket = frame.meta.get("ticket")
        self.cancelled: str | None = None
        self._pool = pool
        self._lock = threading.Lock()
        self._followers: list[Callable[[], None]] | None = []
        # What a cancellation ends, and how.
        self._ends: dict[Any, Callable[[str], None]] = {}
        self.deferred = self.brings_references = False

    def follow(self, serve: Callable[[], None]) -> bool:
        """Appends `serve` to its thread's tasks; False if that thread has finished."""
        with self._lock:
            if self._followers is None:
                return False
            self._followers.append(serve)
            return True

    def followed(self) -> list[Callable[[], None]]:
        """Takes all of its thread's tasks; none can be added afterwards."""
        with self._lock:
            followers, self._followers = self._followers, None
        return list(followers or ())

    def defer(self, future: Future[Any]) -> None:
        """Records that the result comes from `future`."""
        self.deferred = True
        self._end_with_it(future, functools.partial(_time_out, future))

    def bring(self, undelivered: Callable[[], None]) -> None:
        """Registers a callback for an answer with references that is given up."""
        self.brings_references = True
        self._end_with_it(undelivered, lambda reason: undelivered())

    def begin(self, nested: Cancellable) -> None:
        """Records that the function waits for `nested`, which is given up with it."""
        self._end_with_it(nested, nested.give_up)

    def end(self, nested: Cancellable) -> None:
        """Records that the function no longer waits for `nested`."""
        with self._lock:
            self._ends.pop(nested, None)

    def cancel(self, reason: str) -> None:
        """Cancels the call: ends its futures and nested calls.

        Returns at once: the callbacks of futures are users' functions and run on the
        pool.
        """
        with self._lock:
            if self.cancelled is not None:
                return
            self.cancelled = reason
            ends = list(self._ends.values())
        for end in ends:
            # Separately: a callback that waits must not keep a nested call alive.
            self._pool.run(functools.partial(end, reason))

    def _end_with_it(self, what: Any, end: Callable[[str], None]) -> None:
        with self._lock:
            self._ends[what] = end
            # A cancellation that came before has not seen this one.
            reason = self.cancelled
        if reason is not None:
            end(reason)


def _time_out(future: Future[Any], reason: str) -> None:
    cancel(future, RpcTimeout(reason))


TAKE_BACK = "take back"
"""Kind of the request that cancels another one, the one with the ticket in its body."""

NEEDS = "needs"
"""The entry of a request's metadata with `module:function` of the package that reads
it."""

NESTED = "nested"
"""The entry of a request's metadata which says that a called function makes it."""

_MOST_EARLY = 1024

Handler = Callable[[WorkerInfo, Any, Meta], Any]
"""`handler(caller, body, meta)`: a value, a `Reply`, or a Future of either."""


class Reply(msgspec.Struct, frozen=True):
    """A handler's answer when it has metadata too."""

    value: Any
    meta: Meta


class Callee:
    """The request handlers of one worker.

    Args:
      agent: The worker.
    """

    def __init__(self, agent: CallingWorker) -> None:
        self.agent = agent
        self._handlers: dict[str, Handler] = {TAKE_BACK: self._take_back}
        self._limited: set[str] = set()
        self._inline: set[str] = set()
        # By the caller's incarnation: a successor of its name counts its tickets anew.
        self._taken_back: deque[tuple[int | None, int]] = deque(maxlen=_MOST_EARLY)

    def register(
        self, kind: str, handler: Handler, limited: bool = False, inline: bool = False
    ) -> None:
        """Registers `handler` for requests of this kind; see `Agent.register`.

        Raises:
          ValueError: The kind has a handler, or `limited` and `inline` are both given.
        """
        if kind in self._handlers:
            raise ValueError(f"Requests of kind {kind!r} have a handler already.")
        if limited and inline:
            rule = "must not run users' functions, which may wait"
            raise value_error("Agent.register(inline=...)", rule, kind)
        self._handlers[kind] = handler
        if limited:
            self._limited.add(kind)
        if inline:
            self._inline.add(kind)

    def needs_place(self, frame: Frame) -> bool:
        """Whether a request needs one of the limited places for users' functions."""
        # A call that a called function makes needs none: that function may have a place
        # and give it back only when this call is over. So a function with a place never
        # waits for another place, whatever the workers call on each other.
        return frame.kind in self._limited and frame.meta.get(NESTED) is not True

    def runs_inline(self, frame: Frame) -> bool:
        """Whether the thread that reads a shared connection executes this request."""
        # Otherwise a peer could make the reader import a module.
        return (
            frame.kind in self._inline
            and NEEDS not in frame.meta
            and not names_code(frame.tree)
        )

    def begin(self, execution: Execution) -> None:
        """Records an incoming request as outstanding."""
        caller, ticket = execution.worker, execution.ticket
        # First: it must be in the table when a cancellation looks for it.
        self.agent.outstanding.serve(execution)
        if ticket is not None and (caller.incarnation, ticket) in self._taken_back:
            execution.cancel(_taken_back_by(caller))

    def _take_back(self, caller: WorkerInfo, ticket: Any, meta: Meta) -> None:
        if type(ticket) is not int:
            raise ProtocolError(f"A ticket is a number, not {ticket!r}.")
        # Noted first, because the request may still be on its way on another channel.
        self._taken_back.append((caller.incarnation, ticket))
        for execution in self.agent.outstanding.served():
            same = execution.worker.incarnation == caller.incarnation
            if same and execution.ticket == ticket:
                execution.cancel(_taken_back_by(caller))

    def execute(
        self,
        execution: Execution,
        frame: Frame,
        depth: int = 0,
        reading: bool = False,
    ) -> Frame | Execution:
        """Runs a request; returns the answer, or the execution if it is deferred.

        Args:
          execution: As `begin` made it.
          frame: The request.
          depth: How many calls lie below on this thread's stack.
          reading: Whether this thread reads a shared connection.
        """
        # A context of its own, and no mesh of `jax.set_mesh`: nothing of the thread's
        # leaks into the function.
        context = contextvars.Context()
        try:
            result = context.run(self._run, execution, frame, depth, reading)
            if isinstance(result, Future):
                return self._defer(execution, frame.id, result)
            return self._success(execution, frame.id, result)
        except KeyboardInterrupt as error:
            if depth:
                raise  # the user's, while a call ran in the user's own thread
            return self.failure(frame.id, error)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            return self.failure(frame.id, error)

    def failure(self, number: int, error: BaseException) -> Frame:
        """Makes the answer for an exception."""
        agent = self.agent
        try:
            tree, leaves = agent.codec.encode(agent.describe(error))
        except BaseException as broken:  # noqa: BLE001 - an answer there must be
            plain = RemoteError(
                f"A {type(error).__name__} was raised, which cannot be sent: "
                f"{type(broken).__name__} when it was packed."
            )
            tree, leaves = agent.codec.encode(agent.describe(plain))
        return Frame(ERROR, number, {}, tree, leaves)

    @called_outside_mesh
    def _run(
        self, execution: Execution, frame: Frame, depth: int, reading: bool
    ) -> Any:
        until = execution.deadline
        current.scope.set(Scope(self.agent, until, execution, depth, reading))
        if until.at is not None and until.at <= time.monotonic():
            raise RpcTimeout(f"{current.exceeded(until)} before the call was begun.")
        if execution.cancelled is not None:
            raise RpcTimeout(f"The call was not begun: {execution.cancelled}.")
        if NEEDS in frame.meta:
            # To look the name up imports the package that registers the handler.
            self.agent.codec.functions.resolve(str(frame.meta[NEEDS]))
        handler = self._handlers.get(frame.kind)
        if handler is None:
            raise ProtocolError(
                f"Nothing here answers a request of kind {frame.kind!r}."
            )
        message = MessageContext(execution.worker, frame.meta)
        leaves = frame.leaves
        if device_maps.DEVICES in frame.meta:
            leaves = device_maps.placed(leaves, frame.meta)
        body = self.agent.codec.decode(frame.tree, leaves, message)
        if not message.unsettled:
            return handler(execution.worker, body, frame.meta)
        run = functools.partial(handler, execution.worker, body, frame.meta)
        return self._when_settled(execution, message.unsettled, run)

    def _when_settled(
        self,
        execution: Execution,
        unsettled: Sequence[Future[Any]],
        run: Callable[[], Any],
    ) -> Future[Any]:
        """Runs a call once its references may be used, without a waiting thread."""
        result: Future[Any] = Future()
        context = contextvars.copy_context()

        def begin() -> None:
            current.scope.set(Scope(self.agent, execution.deadline, execution))
            try:
                for future in unsettled:
                    future.value()
                if execution.cancelled is None:
                    _pass_on(run(), result, execution)
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                cancel(result, error)

        settled = collect_all(unsettled)
        pool = self.agent.pool
        call_when_done(settled, lambda: pool.run(lambda: context.run(begin)))
        return result

    def _success(self, execution: Execution, number: int, result: Any) -> Frame:
        reply = result if type(result) is Reply else Reply(result, {})
        message = MessageContext(execution.worker, reply.meta, execution.operation)
        tree, leaves = self.agent.encode(reply.value, message, answer=True)
        if message.forks:
            self.agent.references.answer(execution, message)
        return Frame(REPLY, number, reply.meta, tree, leaves)

    def _defer(
        self, execution: Execution, number: int, result: Future[Any]
    ) -> Execution:
        answer: Future[Frame] = Future()
        execution.answer = answer

        def finish() -> None:
            try:
                frame = self._success(execution, number, result.value())
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                frame = self.failure(number, error)
            answer.set_result(frame)

        # First: it may have been cancelled meanwhile, which completes the result.
        execution.defer(result)
        call_when_done(result, finish)
        return execution


def _pass_on(value: Any, result: Future[Any], execution: Execution) -> None:
    """Completes `result` with a value, or with a future's value once completed."""
    if not isinstance(value, Future):
        result.set_result(value)
        return
    execution.defer(value)

    def done() -> None:
        try:
            result.set_result(value.value())
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            cancel(result, error)

    call_when_done(value, done)


def _taken_back_by(caller: WorkerInfo) -> str:
    return f"{caller.name!r} gave up the call"


class ServedConnection:
    """The answering side of one connection.

    Args:
      callee: The callee of the worker that answers.
      channel: From a caller.
      caller: The worker at its other end.
    """

    def __init__(self, callee: Callee, channel: Channel, caller: WorkerInfo) -> None:
        self._agent = callee.agent
        self._callee = callee
        self._channel = channel
        self._caller = caller
        self._running: dict[int, Execution] = {}
        # Answers that bring references, until these have arrived.
        self._bringing: WeakValueDictionary[int, Execution] = WeakValueDictionary()

    def read(self) -> None:
        """Serves requests until the channel closes, on this thread at first."""
        self._channel.read(Reader(self._take, self._end))

    def _take(self, frame: Frame) -> None:
        """Serves one request."""
        if frame.kind == CANCEL:
            self._cancel(frame.id)
            return
        callee, pool = self._callee, self._agent.pool
        execution = Execution(self._caller, frame, pool)
        callee.begin(execution)
        after = frame.meta.get(AFTER)
        # Looked up before this one is noted: a peer could name the request itself.
        before = self._running.get(after) if type(after) is int else None
        self._running[frame.id] = execution
        if not frame.shared:
            self._serve(execution, frame)
            return
        if callee.runs_inline(frame):
            self._serve(execution, frame, reading=True)
            return
        serve = functools.partial(self._serve, execution, frame)
        if before is not None and before.follow(serve):
            pass  # no thread of its own, which could only wait for the first one
        elif callee.needs_place(frame):
            pool.run_limited(serve)
        else:
            pool.run(serve)

    def _serve(self, execution: Execution, frame: Frame, reading: bool = False) -> None:
        """Executes a request and answers it, then those that follow it.

        Args:
          execution: The execution of the request.
          frame: The request.
          reading: Whether this thread reads the connection.
        """
        try:
            answer = self._callee.execute(execution, frame, 0, reading)
            if isinstance(answer, Execution):
                future = answer.answer
                call_when_done(future, lambda: self._answer(execution, future.value()))
            else:
                self._answer(execution, answer)
        finally:
            if frame.shared:  # on no other connection can a request follow
                run_all(execution.followed())

    def _answer(self, execution: Execution, answer: Frame) -> None:
        number = answer.id
        # In this order: a cancellation finds it in one of the two at any time.
        if execution.brings_references:
            self._bringing[number] = execution
        self._running.pop(number, None)
        try:
            self._send(execution, answer)
        finally:
            self._agent.outstanding.end(execution)

    def _send(self, execution: Execution, answer: Frame) -> None:
        try:
            try:
                self._channel.send(answer)
            except (ChannelClosed, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                # It is beyond the limits, or packing it failed: an array was donated,
                # or its deferred computation raised. Nothing of it was sent.
                execution.cancel(f"its answer was not sent ({type(error).__name__})")
                self._channel.send(self._callee.failure(answer.id, error))
        except ChannelClosed as error:
            execution.cancel(f"{self._caller.name!r} gave up the call: {error}")

    def _cancel(self, number: int) -> None:
        execution = self._running.get(number) or self._bringing.get(number)
        if execution is not None:
            execution.cancel(f"{self._caller.name!r} gave up the call")

    def _end(self, reason: str) -> None:
        self._channel.close(reason)
        # Its caller waits no longer, or is gone: nothing has a use for the results.
        # `values()` of a weak dictionary is a Python loop, while other threads add.
        bringing = [each() for each in self._bringing.valuerefs()]
        for execution in [*self._running.values(), *filter(None, bringing)]:
            execution.cancel(f"{self._caller.name!r} gave up the call: {reason}")
