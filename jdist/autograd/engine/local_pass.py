"""One worker's part of a backward pass.

A part is driven by what comes: gradients, answers, an error, the end of the context.
Each is a step, and steps run one after another on whichever thread brings them; no
thread ever waits for another worker, but the one that called `backward`. After a step
the functions that are ready run; when none is left, gradients for other workers go out,
one request to each, or on the answer that the other worker is waiting for.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jdist._tree import is_none
from jdist.autograd.context.gradients import accumulate, gradient_of
from jdist.autograd.context.ids import maker
from jdist.autograd.engine.events import (
    ACCUMULATED,
    COUNTED,
    ENDED,
    POSTED,
    RAN,
    RECEIVED,
    Event,
    note,
    recording,
)
from jdist.autograd.engine.failure import PassFailure, UnusedSend
from jdist.autograd.engine.mailbox import StepQueue
from jdist.autograd.engine.messages import (
    GradientAnswer,
    GradientRequest,
    MessageGradient,
    PassTerms,
    StarvingSend,
)
from jdist.autograd.engine.replicated import is_replicated
from jdist.autograd.engine.sweep import Cotangent, Sweep
from jdist.autograd.engine.termination_detector import (
    TerminationDetector,
    UnansweredRequest,
)
from jdist.autograd.engine.unused import explain
from jdist.autograd.errors import AutogradError, no_context
from jdist.autograd.graph.node import Edge, LeafNode, Node, RecvNode, SendNode
from jdist.rpc.base.current import Scope
from jdist.rpc.base.deadline import NEVER, Deadline
from jdist.rpc.base.errors import WorkerLost
from jdist.rpc.base.future import Future, complete
from jdist.rpc.base.worker_info import WorkerInfo

if TYPE_CHECKING:
    from jdist.autograd.context.context import Context
    from jdist.autograd.engine.engine import Engine
    from jdist.autograd.graph.variable import Variable


class Root(NamedTuple):
    """Where a pass begins.

    Attributes:
      edge: Of the value.
      cotangent: What it begins with.
    """

    edge: Edge
    cotangent: Any


class LocalPass:
    """One worker's part of a pass, from its first message to its end.

    Args:
      engine: The worker's.
      context: In which the pass is.
      terms: What the pass is.
      marks: In SMART mode, the ids of the messages that take part, of all workers.
      deadline: When to give up.
      roots: On the worker where the pass begins, with what; else None.

    Attributes:
      terms: As given.
      deadline: As given.
      done: On the worker where the pass began: completed at its end.
      withheld: Gradients of replicated variables, which do not count before they are
        reduced; None where nothing will do that.
    """

    def __init__(
        self,
        engine: "Engine",
        context: "Context",
        terms: PassTerms,
        marks: Sequence[int] | None,
        deadline: Deadline,
        roots: Sequence[Root] | None = None,
    ) -> None:
        self.terms = terms
        self.deadline = deadline
        self.done: Future[None] = Future()
        self.withheld: dict[Variable, Any] | None = None
        self._engine = engine
        self._context = context
        self._marks = marks
        self._roots = roots
        self._me = engine.name
        limit = deadline if deadline.firm else NEVER
        self._mailbox = StepQueue(Scope(engine.agent, limit))
        self._engagement = TerminationDetector(self._me, root=roots is not None)
        self._sweep: Sweep | None = None
        self._awaited: dict[int, SendNode] = {}
        self._outbox: dict[int, list[MessageGradient]] = {}
        self._staged: dict[Variable, Any] = {}
        self._told: set[int] = set()
        self._failure: PassFailure | None = None
        self._committed = False
        self._driver: int | None = None
        self._inline: tuple[int, GradientRequest] | None = None

    # --- what comes, from any thread ---

    def begin(self) -> None:
        """Starts the pass, on the worker where it begins; `done` has its end."""
        self.step(self._begin)

    def drive(self) -> None:
        """As `begin`, and lends the calling thread for requests until it has none.

        A thread that waits for the end anyway sends a request and reads the answer
        without handing anything over to another thread.
        """
        self._driver = threading.get_ident()
        self.step(self._begin)
        while self._inline is not None:
            (peer, request), self._inline = self._inline, None
            self.step(self._engine.ask(self, peer, request))
        self._driver = None

    def receive(self, request: GradientRequest, held: UnansweredRequest) -> None:
        """A request with gradients came."""

        def take() -> None:
            self._told.add(held.peer)
            self._engagement.asked(held)
            self._begin()
            self._feed(request.gradients)

        def refuse(failure: PassFailure) -> None:
            held.answer.set_result(GradientAnswer((), {}, failure).pack())

        self.step(take, refuse)

    def answered(self, peer: int, answer: GradientAnswer) -> None:
        """The answer to a request; called within a step."""
        self._told.add(peer)
        if answer.failure is not None:
            self._end(answer.failure)
            return
        self._feed(answer.gradients)
        self._engagement.heard(answer.reports)
        self._engagement.outstanding -= 1

    def unanswered(self, peer: int, error: Exception) -> None:
        """A request failed; called within a step."""
        self._end(PassFailure(self._engine.name_of(peer), error))

    def fail(self, failure: PassFailure) -> None:
        """Ends the pass, on all workers."""
        self.step(lambda: self._end(failure))

    def lost(self, worker: WorkerInfo, reason: str) -> None:
        """A worker is lost; ends the pass if it still needs that one."""

        def check() -> None:
            if any(
                node.number == worker.incarnation for node in self._awaited.values()
            ):
                what = f"a backward pass of context {self._context.id}"
                self._end(PassFailure(self._me, WorkerLost(worker.name, what, reason)))

        self.step(check)

    def released(self, reason: str) -> None:
        """The context has ended."""
        self.fail(PassFailure(self._me, no_context(self._context.id, reason)))

    def waits_for(self) -> str:
        """The send functions here whose gradients have not come, for people."""
        return ", ".join(node.name for node in list(self._awaited.values()))

    def step(
        self,
        step: Callable[[], None],
        otherwise: Callable[[PassFailure], None] = lambda failure: None,
    ) -> None:
        """Has `step()` run when no other step does; `otherwise` if the pass failed."""

        def take() -> None:
            if self._failure is None:
                self._take(step)
            else:
                otherwise(self._failure)

        self._mailbox.put(take)

    # --- steps ---

    def _take(self, step: Callable[[], None]) -> None:
        try:
            step()
            if self._failure is None and self._sweep is not None:
                self._run_all(self._sweep)
        except Exception as error:  # noqa: BLE001 - it ends the pass everywhere
            self._end(PassFailure(self._me, error))
        except BaseException as interrupt:
            told = AutogradError(f"The backward pass was interrupted: {interrupt!r}.")
            self._end(PassFailure(self._me, told))
            raise

    def _begin(self) -> None:
        """Counts the dependencies, once."""
        if self._sweep is not None:
            return
        sends = self._context.send_functions()
        if self.terms.smart:
            mine = self._engine.number
            marked = [mark for mark in self._marks or () if maker(mark) == mine]
            sends = {mark: self._send_function(sends, mark) for mark in marked}
        roots = self._roots or ()
        starts = [root.edge.node for root in roots]
        self._awaited = sends
        self._sweep = sweep = Sweep([*starts, *sends.values()])
        if recording():
            counts = [(node.name, count) for node, count in sweep.counts.items()]
            note(Event(self._me, COUNTED, counts=tuple(counts)))
        for position, root in enumerate(roots):
            node, index = root.edge
            sweep.add(node, index, ((), position, root.cotangent))
            sweep.arrive(node)

    def _feed(self, gradients: Sequence[MessageGradient]) -> None:
        """Gradients came for send functions of this worker."""
        assert self._sweep is not None
        for message_id, cotangents in gradients:
            node = self._send_function(self._awaited, message_id)
            del self._awaited[message_id]
            if len(cotangents) != node.outputs:
                raise AutogradError(
                    f"{node.name} (message {message_id}) has {node.outputs} values, "
                    f"and cotangents for {len(cotangents)} came."
                )
            if recording():
                note(Event(self._me, RECEIVED, node.name, message_id, node.worker))
            for index, value in enumerate(cotangents):
                self._sweep.add(node, index, ((), 0, value))
            self._sweep.arrive(node)

    def _send_function(self, sends: dict[int, SendNode], message_id: int) -> SendNode:
        found = sends.get(message_id)
        if found is None:
            raise AutogradError(
                "Could not find send function for autograd message id: "
                f"{message_id} in context {self._context.id} on {self._me!r}. Its "
                "value was recorded in another context, or its call has failed. A "
                "value of an earlier context, such as a hidden state, goes on without "
                "its history as `autograd.detach(value)`."
            )
        return found

    # --- the functions that are ready ---

    def _run_all(self, sweep: Sweep) -> None:
        waiting = self._mailbox.waiting
        while not waiting:
            ready = sweep.next()
            if ready is None:
                self._rest(sweep)
                return
            self._run(sweep, *ready)

    def _run(self, sweep: Sweep, node: Node, cotangents: list[Cotangent]) -> None:
        if isinstance(node, LeafNode):
            self._stage(node, cotangents)
        elif isinstance(node, RecvNode):
            gradient = MessageGradient(node.message_id, cotangents)
            self._outbox.setdefault(node.number, []).append(gradient)
        else:
            nothing = (None,) * len(node.inputs)
            absent = all(map(is_none, cotangents))
            sweep.pass_on(node, nothing if absent else node.pull(cotangents))
            if not self.terms.retain_graph:
                node.release()
            if recording():
                known = (node.message_id, node.worker) if type(node) is SendNode else ()
                note(Event(self._me, RAN, node.name, *known))

    def _stage(self, node: LeafNode, cotangents: list[Cotangent]) -> None:
        if not all(map(is_none, cotangents)):
            gradient = gradient_of(node.variable, cotangents)
            if is_replicated(self._engine.agent, node.variable):
                self._withhold(node.variable, gradient)
            else:
                self._staged[node.variable] = gradient
            if recording():
                note(Event(self._me, ACCUMULATED, node.name))

    def _withhold(self, variable: "Variable", gradient: Any) -> None:
        if self.withheld is None:
            raise AutogradError(
                "A replicated variable was reached by a backward pass that does not "
                f"begin by `autograd.backward` on {self._me!r}: its trainers would not "
                "know which of their passes it belongs to. Call `backward` on each "
                "trainer, in a context of its own."
            )
        self.withheld[variable] = gradient

    # --- when none is ready ---

    def _rest(self, sweep: Sweep) -> None:
        for peer in list(self._outbox):
            if not self._engagement.holds(peer):
                self._post(peer, self._outbox.pop(peer))
        if not sweep.left and not self._committed:
            self._commit()
        for held in self._engagement.take_others():
            self._answer(held)
        if self._engagement.outstanding:
            return
        starving = [
            StarvingSend(message_id, node.worker, node.name)
            for message_id, node in self._awaited.items()
        ]
        self._engagement.waits_for(tuple(starving))
        engager = self._engagement.disengage()
        if engager is not None:
            self._answer(engager)
            if self._committed:
                self._leave()
        elif self._roots is not None:
            self._quiet()

    def _commit(self) -> None:
        """All functions here have run: the gradients count from now on."""
        if self._staged:
            # Where the device fails, it does so before anybody is told of an end.
            jax.block_until_ready(list(self._staged.values()))
            accumulate(self._context, self._staged)
            self._staged = {}
        self._committed = True

    def _post(self, peer: int, gradients: list[MessageGradient]) -> None:
        # Until it has answered once: a later request may overtake the first one.
        marks = None if peer in self._told else self._marks
        self._engagement.outstanding += 1
        self._make_ready(peer, gradients)
        request = GradientRequest(self.terms, marks, gradients)
        if self._driver == threading.get_ident() and self._inline is None:
            self._inline = (peer, request)
        else:
            self._engine.post(self, peer, request)

    def _answer(self, held: UnansweredRequest) -> None:
        gradients = self._outbox.pop(held.peer, [])
        self._make_ready(held.peer, gradients)
        answer = GradientAnswer(gradients, self._engagement.news())
        # What it sets off on this thread would run within this step: rpc sends it.
        held.answer.set_result(answer.pack())

    def _make_ready(self, peer: int, gradients: list[MessageGradient]) -> None:
        """Waits for the device: what fails there fails here, not at the receiver."""
        for gradient in gradients:
            for cotangent in gradient.cotangents:
                if cotangent is not None:
                    cotangent.block_until_ready()
        if recording():
            worker = self._engine.name_of(peer)
            for gradient in gradients:
                name = f"receive from {worker}"
                note(Event(self._me, POSTED, name, gradient.message_id, worker))

    # --- the end ---

    def _quiet(self) -> None:
        """Nobody has anything to do: the pass is over, or will never be."""
        starving = self._engagement.starving()
        if starving:
            worker = next(iter(starving))
            recvs = self._context.recv_functions()
            unreached = [r for r in recvs.values() if r not in self._counts()]
            told = explain(starving, unreached, self.terms.smart)
            self._end(PassFailure(worker, UnusedSend(worker, told)))
            return
        self._leave()
        self.done.set_result(None)

    def _counts(self) -> dict[Node, int]:
        return {} if self._sweep is None else self._sweep.counts

    def _leave(self) -> None:
        if self._engine.forget(self._context, self) and recording():
            note(Event(self._me, ENDED))

    def _end(self, failure: PassFailure) -> None:
        """The pass has failed: everybody is told, and nothing of it is kept."""
        if self._failure is not None or self.done.done():
            return
        self._failure = failure
        self._sweep, self._inline = None, None
        self._staged, self._outbox, self._awaited = {}, {}, {}
        answer = GradientAnswer((), {}, failure).pack()
        waiting = [*self._engagement.take_others(), self._engagement.disengage()]
        for held in waiting:
            if held is not None:
                held.answer.set_result(answer)
        self._leave()
        self._engine.tell_failed(self._context, self.terms, failure)
        for callback in complete(self.done, None, failure.exception()) or ():
            callback()
