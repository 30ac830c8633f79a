"""Serving one incoming channel.

The thread that reads a request runs it. On a shared channel others may come meanwhile:
when the call takes long another thread reads those (see `relief`), and as long as calls
take long, each is run after the reading was passed on, so that they run side by side.
"""

import functools
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.future import call_when_done
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.execution import Execution
from jdist.rpc.wire.channel import Channel, ChannelClosed
from jdist.rpc.wire.frame import CANCEL, Frame
from jdist.rpc.wire.relief import PERIOD, Reading

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
        self._reading = Reading(agent.relief, self._pass_on)
        self._slow = False
        self._running: dict[int, Execution] = {}
        # Answers that bring references, until these have arrived.
        self._bringing: weakref.WeakValueDictionary[int, Execution]
        self._bringing = weakref.WeakValueDictionary()

    def read(self) -> None:
        """Serves requests until the channel closes, or another thread takes over."""
        while self._read_one():
            pass

    def _read_one(self) -> bool:
        """Serves one request; whether this thread shall wait for the next one.

        A function of its own, so that nothing of a request is kept while waiting.
        """
        try:
            frame = self._channel.receive()
        except (ChannelClosed, ProtocolError) as error:
            self._end(str(error))
            return False
        if frame.kind == CANCEL:
            self._cancel(frame.id)
            return True
        execution = self._agent.callee.execution_of(self._caller, frame)
        self._agent.callee.begin(execution)
        self._running[frame.id] = execution
        if not frame.shared:
            self._serve(execution, frame)
            return True
        if not self._agent.callee.needs_place(frame):
            return self._serve_aside(execution, frame)
        pool = self._agent.pool
        # Without a place the call waits for one, and this thread reads on: the next
        # message may be the library's own, on which those that have the places wait.
        if not pool.enter(functools.partial(self._serve, execution, frame)):
            return True
        try:
            return self._serve_aside(execution, frame)
        finally:
            pool.leave()

    def _serve_aside(self, execution: Execution, frame: Frame) -> bool:
        """Serves a request while others may come; whether this thread reads these."""
        if self._slow:
            self._reading.hand_over()
            begun = time.monotonic()
            self._serve(execution, frame)
            self._slow = time.monotonic() - begun > PERIOD
            return False
        self._reading.leave()
        self._serve(execution, frame)
        reads_on = self._reading.take()
        self._slow = not reads_on
        return reads_on

    def _pass_on(self) -> None:
        self._agent.pool.run(self.read)

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
