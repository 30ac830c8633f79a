"""The answering side of a connection.

The thread that reads a pooled connection runs its calls itself: the caller waits for
one answer at a time, and a hand-off between threads costs about 45 us, more than most
calls. The thread that reads a shared connection only reads. Calls of users' functions
have a limited number of places in the pool; what the library sends, such as a backward
pass, and the calls that a called function makes have threads without limit. So no
function can keep a message from being read, nor one of the library's from being served.
"""

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.future import call_when_done
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.execution import Execution
from jdist.rpc.wire.channel import Channel, ChannelClosed
from jdist.rpc.wire.frame import CANCEL, Frame

if TYPE_CHECKING:
    from jdist.rpc.calls.agent import Agent


class Serving:
    """The answering side of a channel.

    Args:
      agent: The worker that answers.
      channel: From a caller.
      caller: Who that is.
      on_closed: Called once, when the channel has closed.
    """

    def __init__(
        self,
        agent: "Agent",
        channel: Channel,
        caller: WorkerInfo,
        on_closed: Callable[[Channel], None],
    ) -> None:
        self._agent = agent
        self._channel = channel
        self._caller = caller
        self._on_closed = on_closed
        self._running: dict[int, Execution] = {}
        # Answers that bring references, until these have arrived.
        self._bringing: weakref.WeakValueDictionary[int, Execution]
        self._bringing = weakref.WeakValueDictionary()

    def read(self) -> None:
        """Serves requests until the channel closes."""
        while self._read_one():
            pass

    def _read_one(self) -> bool:
        """Reads one request; whether the connection is still open.

        A function of its own, so that the thread keeps no request while it waits.
        """
        try:
            frame = self._channel.receive()
        except (ChannelClosed, ProtocolError) as error:
            self._end(str(error))
            return False
        if frame.kind == CANCEL:
            self._cancel(frame.id)
            return True
        callee, pool = self._agent.callee, self._agent.pool
        execution = callee.execution_of(self._caller, frame)
        callee.begin(execution)
        self._running[frame.id] = execution
        serve = functools.partial(self._serve, execution, frame)
        if not frame.shared:
            serve()
        elif callee.needs_place(frame):
            pool.run_limited(serve)
        else:
            pool.run(serve)
        return True

    def _serve(self, execution: Execution, frame: Frame) -> None:
        answer = self._agent.callee.execute(execution, frame)
        if isinstance(answer, Execution):
            future = answer.answer
            call_when_done(
                future, lambda: self._answer(execution, frame.id, future.value())
            )
        else:
            self._answer(execution, frame.id, answer)

    def _answer(self, execution: Execution, number: int, answer: Frame) -> None:
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
                self._channel.send(self._agent.callee.failure(answer.id, error))
        except ChannelClosed as error:
            execution.cancel(f"{self._caller.name!r} gave up the call: {error}")

    def _cancel(self, number: int) -> None:
        execution = self._running.get(number) or self._bringing.get(number)
        if execution is not None:
            execution.cancel(f"{self._caller.name!r} gave up the call")

    def _end(self, reason: str) -> None:
        self._channel.close(reason)
        for execution in [*self._running.values(), *self._bringing.values()]:
            execution.cancel(f"{self._caller.name!r} gave up the call: {reason}")
        self._on_closed(self._channel)
