"""The backward passes of one worker: where their messages come in and go out."""

import contextlib
import contextvars
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jdist.autograd.context.ids import Ids
from jdist.autograd.engine.failure import BackwardError, PassFailure
from jdist.autograd.engine.local_pass import LocalPass, Root
from jdist.autograd.engine.marking import lead_to
from jdist.autograd.engine.messages import (
    END,
    GRADIENTS,
    REACH,
    GradientAnswer,
    GradientRequest,
    PassTerms,
    unpack_end,
    unpack_reach,
)
from jdist.autograd.engine.termination_detector import UnansweredRequest
from jdist.rpc.base import current
from jdist.rpc.base.deadline import DEFAULT, Deadline
from jdist.rpc.base.errors import ProtocolError, RpcError
from jdist.rpc.base.future import Future, call_when_done
from jdist.rpc.base.worker_info import WorkerInfo, incarnation_of
from jdist.rpc.calls.outstanding_calls import Operation
from jdist.rpc.calls.request import Outgoing

if TYPE_CHECKING:
    from jdist.autograd.context.container import Container
    from jdist.autograd.context.context import Context

PART = "jdist.autograd.engine"
"""Under which an agent has its engine."""

_BACKWARD = Operation("autograd.backward")

_ENDED = 1024
"""So many ended passes are remembered, for messages that were overtaken by the end."""


class Engine:
    """All backward passes of one worker.

    Args:
      container: The worker's contexts.

    Attributes:
      agent: The worker.
      name: Its name.

    Source: `torch/csrc/distributed/autograd/engine/dist_engine.h`.
    """

    def __init__(self, container: "Container") -> None:
        self.agent = container.agent
        self.name = self.agent.info.name
        self._container = container
        self._lock = threading.Lock()
        self._ids: Ids | None = None
        self._ended: OrderedDict[int, PassFailure] = OrderedDict()
        self.agent.parts.on_gone(self._on_gone)
        self.agent.register(GRADIENTS, self._on_gradients)
        self.agent.register(END, self._on_end)
        self.agent.register(REACH, self._on_reach)

    @property
    def number(self) -> int:
        """The worker's number, which is on top of its ids."""
        return self._container.ids.worker

    # --- passes ---

    def begin(
        self,
        context: "Context",
        roots: Sequence[Root],
        marks: Sequence[int] | None,
        retain_graph: bool,
        deadline: Deadline,
    ) -> LocalPass:
        """Starts a pass here; `marks` as for `LocalPass`, None in FAST mode."""
        pass_id = self._new_id()
        terms = PassTerms(context.id, pass_id, marks is not None, retain_graph)
        return self._enter(
            context, LocalPass(self, context, terms, marks, deadline, roots)
        )

    def _new_id(self) -> int:
        """Of a pass; a counter of their own leaves the ids of messages as they are."""
        if self._ids is None:  # the worker has its number only in a group
            with self._lock:  # two would give out the same ids
                self._ids = self._ids or Ids(self.number)
        return self._ids.message()

    def counts(self) -> dict[str, int]:
        """What `rpc.debug_info` and `autograd.debug_info` say of it."""
        return {
            "num_current_backward_passes": len(self.live()),
            "num_autograd_contexts": len(self._container.contexts()),
        }

    def live(self) -> list[LocalPass]:
        """The parts of passes under way."""
        parts: list[LocalPass] = []
        for context in self._container.contexts():
            with context.lock:
                parts += context.passes.values()
        return parts

    def forget(self, context: "Context", part: LocalPass) -> bool:
        """The part is over; False if that was known."""
        with context.lock:
            return context.passes.pop(part.terms.pass_id, None) is not None

    def _enter(self, context: "Context", part: LocalPass) -> LocalPass:
        with context.lock:
            context.check()
            return context.passes.setdefault(part.terms.pass_id, part)

    def _on_gone(self, worker: WorkerInfo, reason: str) -> None:
        for part in self.live():
            part.lost(worker, reason)

    # --- messages out ---

    def ask(
        self, part: LocalPass, peer: int, request: GradientRequest
    ) -> Callable[[], None]:
        """Sends a request and waits for the answer; the step that takes it."""
        try:
            answer = self.agent.exchange(self._outgoing(part, peer, request))
        except Exception as error:  # noqa: BLE001 - the step passes it on
            failed = error  # the name in `except` ends with the block
            return lambda: part.unanswered(peer, failed)
        return lambda: part.answered(peer, answer)

    def post(self, part: LocalPass, peer: int, request: GradientRequest) -> None:
        """Sends a request; its answer will be a step."""
        future = self.agent.request(self._outgoing(part, peer, request))

        def step() -> None:
            try:
                answer = future.value()
            except Exception as error:  # noqa: BLE001 - it ends the pass
                part.unanswered(peer, error)
            else:
                part.answered(peer, answer)

        call_when_done(future, lambda: part.step(step))

    def tell_failed(
        self, context: "Context", terms: PassTerms, failure: PassFailure
    ) -> None:
        """Has all workers that may take part end the pass, if they do not know."""
        with self._lock:
            if terms.pass_id in self._ended:
                return
            # In words: an exception would keep all that was on the stack.
            told = BackwardError(failure.worker, str(failure.error))
            self._ended[terms.pass_id] = PassFailure(failure.worker, told)
            if len(self._ended) > _ENDED:
                self._ended.popitem(last=False)
        body = (terms.context_id, terms.pass_id, *failure)
        fresh = contextvars.Context()  # not under a deadline that may have passed
        for number in sorted(context.known_numbers() - {self.number}):
            worker = self._container.worker(number)
            with contextlib.suppress(RpcError):  # shut down, here or there
                fresh.run(self.agent.call_async, worker, END, body)

    def name_of(self, number: int) -> str:
        """Name of the worker of this number, for people."""
        peer = self.agent.directory.of_incarnation(number)
        return f"number {number}" if peer is None else peer.info.name

    def _outgoing(
        self, part: LocalPass, peer: int, request: GradientRequest
    ) -> Outgoing:
        body, meta = request.pack()
        to = self._container.worker(peer)
        firm, unlimited = part.deadline.firm, part.deadline.at is None
        seconds = 0.0 if firm or unlimited else DEFAULT
        found = self.agent.outgoing(to, GRADIENTS, body, seconds, meta, _BACKWARD)
        limit = part.deadline if firm else found.deadline
        return found._replace(deadline=limit, receive=GradientAnswer.unpack)

    # --- messages in ---

    def _on_gradients(self, caller: WorkerInfo, body: Any, meta: dict[str, Any]) -> Any:
        request = GradientRequest.unpack(body, meta)
        terms = request.terms
        context = self._container.retrieve(terms.context_id)
        with context.lock:
            part = context.passes.get(terms.pass_id)
        if part is None:
            limit = current.deadline()
            part = LocalPass(self, context, terms, request.marks, limit)
            part = self._enter(context, part)
        # Only now: once entered, it is ended by whoever ends the pass.
        failure = self._ended.get(terms.pass_id)
        if failure is not None:
            part.fail(failure)
        held = UnansweredRequest(incarnation_of(caller), Future())
        part.receive(request, held)
        return held.answer.value() if held.answer.done() else held.answer

    def _on_end(self, caller: WorkerInfo, body: Any, meta: dict[str, Any]) -> None:
        context_id, pass_id, failure = unpack_end(body)
        context = self._container.find(context_id)
        with self._lock:
            known = pass_id in self._ended
        if context is None or known:
            return
        with context.lock:
            part = context.passes.get(pass_id)
        if part is not None:
            part.fail(failure)
        else:
            terms = PassTerms(context_id, pass_id, False, False)
            self.tell_failed(context, terms, failure)

    def _on_reach(self, caller: WorkerInfo, body: Any, meta: dict[str, Any]) -> Any:
        context_id, ids = unpack_reach(body)
        sends = self._container.retrieve(context_id).send_functions()
        unknown = [number for number in ids if number not in sends]
        if unknown:
            raise ProtocolError(
                f"Could not find send function for autograd message id: {unknown[0]}."
            )
        return tuple(map(list, lead_to([sends[number] for number in ids])))


def install(container: "Container") -> None:
    """Lets the worker with these contexts take part in backward passes."""
    container.agent.parts[PART] = Engine(container)


def of(container: "Container") -> Engine:
    """The engine of the worker with these contexts."""
    found = container.agent.parts[PART]
    assert isinstance(found, Engine)
    return found
