"""Running what other workers ask for."""

import contextvars
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jdist.rpc.base import current, deadline
from jdist.rpc.base.current import Scope
from jdist.rpc.base.errors import ProtocolError, RemoteError, RpcTimeout
from jdist.rpc.base.extension_state import NEEDS
from jdist.rpc.base.future import Future, call_when_done, cancel, collect_all
from jdist.rpc.base.message_context import MessageContext
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.execution import Execution
from jdist.rpc.codec.remote_exception import describe
from jdist.rpc.wire.frame import ERROR, REPLY, Frame

if TYPE_CHECKING:
    from jdist.rpc.calls.agent import Agent

TAKE_BACK = "take back"
"""Kind of the request that cancels another one, of the ticket in its body."""

NESTED = "nested"
"""In the metadata of a request that a called function makes."""

_MOST_EARLY = 1024

Handler = Callable[[WorkerInfo, Any, dict[str, Any]], Any]
"""`handler(caller, body, meta)`: a value, a `Reply`, or a Future of either."""


class Reply(NamedTuple):
    """A handler's answer when it has metadata too."""

    value: Any
    meta: dict[str, Any]


class Callee:
    """The handlers of one worker, and how they are run.

    Args:
      agent: The worker.
    """

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self._handlers: dict[str, Handler] = {TAKE_BACK: self._take_back}
        # By the caller's number: a successor of its name counts its tickets anew.
        self._limited: set[str] = set()
        self._taken_back: deque[tuple[int | None, int]] = deque(maxlen=_MOST_EARLY)

    def register(self, kind: str, handler: Handler, limited: bool = False) -> None:
        """Has `handler` answer requests of this kind; see `Agent.register`.

        Raises:
          ValueError: The kind has a handler.
        """
        if kind in self._handlers:
            raise ValueError(f"Requests of kind {kind!r} have a handler already.")
        self._handlers[kind] = handler
        if limited:
            self._limited.add(kind)

    def needs_place(self, frame: Frame) -> bool:
        """Whether a request runs a function of the user's for a program.

        A call that a called function makes needs no place: that function may have one
        itself, and give it back only when this call is over. So who has a place never
        waits for another one, whatever the workers call on each other.
        """
        return frame.kind in self._limited and frame.meta.get(NESTED) is not True

    def execution_of(self, caller: WorkerInfo, frame: Frame) -> Execution:
        """An incoming request, which is about to `begin`."""
        until = deadline.from_meta(frame.meta)
        ticket = frame.meta.get("ticket")
        return Execution(caller, frame.kind, until, ticket, self._agent.pool)

    def begin(self, execution: Execution) -> None:
        """Enters an incoming request on the ledger."""
        caller, ticket = execution.caller, execution.ticket
        self._agent.outstanding.serve(execution)
        if ticket is not None and (caller.incarnation, ticket) in self._taken_back:
            execution.cancel(_taken_back_by(caller))

    def _take_back(self, caller: WorkerInfo, ticket: Any, meta: dict[str, Any]) -> None:
        if type(ticket) is not int:
            raise ProtocolError(f"A ticket is a number, not {ticket!r}.")
        # First noted, then looked for: on another channel it may be still to come.
        self._taken_back.append((caller.incarnation, ticket))
        for execution in self._agent.outstanding.served():
            same = execution.caller.incarnation == caller.incarnation
            if same and execution.ticket == ticket:
                execution.cancel(_taken_back_by(caller))

    def execute(
        self, execution: Execution, frame: Frame, depth: int = 0
    ) -> Frame | Execution:
        """Runs a request; the answer, or the execution once it is deferred.

        Args:
          execution: As `begin` made it.
          frame: The request.
          depth: How many calls lie below on this thread's stack.
        """
        # A context of its own: nothing of the thread's leaks into the function.
        context = contextvars.Context()
        try:
            result = context.run(self._run, execution, frame, depth)
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
        """The answer that says what was raised."""
        described = describe(error, self._agent.info.name)
        try:
            tree, leaves = self._agent.codec.encode(described)
        except BaseException as broken:  # noqa: BLE001 - an answer there must be
            plain = RemoteError(
                f"A {type(error).__name__} was raised, which cannot be sent: "
                f"{type(broken).__name__} when it was packed."
            )
            described = describe(plain, self._agent.info.name)
            tree, leaves = self._agent.codec.encode(described)
        return Frame(ERROR, number, {}, tree, leaves)

    def _run(self, execution: Execution, frame: Frame, depth: int) -> Any:
        until = execution.deadline
        current.scope.set(Scope(self._agent, until, execution, depth))
        if until.at is not None and until.at <= time.monotonic():
            raise RpcTimeout(f"{deadline.exceeded(until)} before the call was begun.")
        if execution.cancelled is not None:
            raise RpcTimeout(f"The call was not begun: {execution.cancelled}.")
        if NEEDS in frame.meta:
            # To look the name up imports the package that registers the handler.
            self._agent.codec.functions.resolve(str(frame.meta[NEEDS]))
        handler = self._handlers.get(frame.kind)
        if handler is None:
            raise ProtocolError(
                f"Nothing here answers a request of kind {frame.kind!r}."
            )
        message = MessageContext(execution.caller, frame.meta)
        body = self._agent.codec.decode(frame.tree, frame.leaves, message)
        if not message.unsettled:
            return handler(execution.caller, body, frame.meta)
        run = functools.partial(handler, execution.caller, body, frame.meta)
        return self._when_settled(execution, message.unsettled, run)

    def _when_settled(
        self,
        execution: Execution,
        unsettled: Sequence[Future[Any]],
        run: Callable[[], Any],
    ) -> Future[Any]:
        """Runs a call once its references may be used; no thread waits for that."""
        result: Future[Any] = Future()
        context = contextvars.copy_context()

        def begin() -> None:
            current.scope.set(Scope(self._agent, execution.deadline, execution))
            try:
                for future in unsettled:
                    future.value()
                if execution.cancelled is None:
                    _pass_on(run(), result, execution)
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                cancel(result, error)

        settled = collect_all(unsettled)
        pool = self._agent.pool
        call_when_done(settled, lambda: pool.run(lambda: context.run(begin)))
        return result

    def _success(self, execution: Execution, number: int, result: Any) -> Frame:
        value, meta = result if type(result) is Reply else (result, {})
        message = MessageContext(execution.caller, meta, execution.operation)
        tree, leaves = self._agent.encode(value, message)
        if message.forks:
            self._agent.references.answer(execution, message)
        return Frame(REPLY, number, meta, tree, leaves)

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

        execution.defer(result)
        call_when_done(result, finish)
        return execution


def _pass_on(value: Any, result: Future[Any], execution: Execution) -> None:
    """Completes `result` with a value, or with that of a future once it is there."""
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
