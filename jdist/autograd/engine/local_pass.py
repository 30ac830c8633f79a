"""One worker's share of a backward pass.

A `LocalPass` is driven by events: gradients, answers, an error, the end of the context.
Each event is a step, and steps run one after another on whichever thread brings them;
only the thread that called `backward` ever waits for another worker. After a step the
nodes that are ready run; when none is left, gradients for other workers go out, one
request to each, or on the answer to a request of that worker.
"""

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax

from jdist._tree import PyTree
from jdist.autograd.contexts.context import Context, maker
from jdist.autograd.engine import events
from jdist.autograd.engine.events import Event, note
from jdist.autograd.engine.messages import (
    GRADIENTS,
    GradientAnswer,
    GradientRequest,
    MessageGradient,
    PassFailure,
    PassTerms,
    StarvingSend,
)
from jdist.autograd.engine.sweep import Sweep
from jdist.autograd.engine.termination_detector import (
    TerminationDetector,
    UnansweredRequest,
    explain,
)
from jdist.autograd.recording.errors import AutogradError, UnusedSend, no_context
from jdist.autograd.recording.node import Cotangent, Edge, Node, RecvNode, SendNode
from jdist.autograd.recording.variable import LeafNode, Variable
from jdist.rpc import Future, WorkerInfo, WorkerLost
from jdist.rpc.extension import (
    DEFAULT,
    NEVER,
    Deadline,
    InterruptSafeLock,
    Operation,
    Outgoing,
    Scope,
    call_when_done,
    complete,
    current,
)

Step = Callable[[], object]

_BACKWARD = Operation("autograd.backward")


class StepQueue:
    """A serial executor without a thread of its own.

    A thread that brings a step runs it, or leaves it to the thread that is running
    another one. State that only steps use therefore needs no lock.

    Args:
      scope: The worker as which the steps run, and their deadline.

    Example:
      >>> queue, done = StepQueue(None), []
      >>> queue.put(lambda: (queue.put(lambda: done.append(2)), done.append(1)))
      True
      >>> done
      [1, 2]

    Attributes:
      waiting: The steps besides the one that runs.
    """

    def __init__(self, scope: Scope | None) -> None:
        self.waiting: deque[Step] = deque()
        self._running = InterruptSafeLock()
        self._context = contextvars.Context()
        self._context.run(current.scope.set, scope)

    def put(self, step: Step) -> bool:
        """Runs a step now, or leaves it to the thread that is running another.

        Args:
          step: Must not raise an `Exception`. An interrupt while it runs, such as
            Ctrl-C, is raised to the caller; the remaining steps run with the next one.

        Returns:
          Whether this thread ran it.
        """
        # Appended before the lock is tried: the thread that holds it looks again before
        # it goes.
        self.waiting.append(step)
        ran = False
        # Again: a step may be left just before the other thread releases the lock.
        while self.waiting:
            if not self._running.releasing(self._work_if_free):
                break
            ran = True
        return ran

    def _work_if_free(self) -> bool:
        # Another thread works, and looks for waiting steps again after its release.
        if not self._running.try_acquire():
            return False
        # In a context of its own: a step must not run under the deadline of the thread
        # that brings it.
        self._context.run(self._work)
        return True

    def _work(self) -> None:
        while self.waiting:
            self.waiting.popleft()()


class Root(NamedTuple):
    """A root of a pass.

    Attributes:
      edge: Of the value.
      cotangent: The value's cotangent.
    """

    edge: Edge
    cotangent: jax.Array


class PassOwner(Protocol):
    """The owner of a local pass: the part of the engine that the pass uses."""

    def forget(self, local_pass: "LocalPass") -> bool:
        """Removes a pass that is over; False if it was removed before."""

    def tell_failed(
        self, context: Context, terms: PassTerms, failure: PassFailure
    ) -> None:
        """Ends a failed pass on all workers that may take part."""


class LocalPass:
    """One worker's share of a pass, from its first message to its end.

    Args:
      owner: The worker's engine.
      context: The context of the pass.
      terms: The pass, as messages describe it.
      marks: In SMART mode, the ids of the messages that take part, of all workers.
      deadline: When to give up.
      roots: On the worker where the pass begins, its roots; else None.

    Attributes:
      terms: As given.
      deadline: As given.
      done: On the worker where the pass began: completed at its end.
      withheld: Gradients of replicated variables, which do not count before they are
        reduced; None where the pass began without a reduction.
    """

    def __init__(
        self,
        owner: PassOwner,
        context: Context,
        terms: PassTerms,
        marks: Sequence[int] | None,
        deadline: Deadline,
        roots: Sequence[Root] | None = None,
    ) -> None:
        self.terms = terms
        self.deadline = deadline
        self.done: Future[None] = Future()
        self.withheld: dict[Variable, PyTree] | None = None
        self._owner = owner
        self._context = context
        self._container = context.container
        self._agent = context.container.agent
        self._me = self._agent.info.name
        self._marks = marks
        self._roots = roots
        # A default timeout limits the pass as a whole, and not each of its steps.
        limit = deadline if deadline.firm else NEVER
        self._steps = StepQueue(Scope(self._agent, limit))
        self._detector = TerminationDetector(self._me, root=roots is not None)
        self._sweep: Sweep | None = None
        # Send functions whose gradients have not come, and gradients to be sent.
        self._awaited: dict[int, SendNode] = {}
        self._outbox: dict[int, list[MessageGradient]] = {}
        # Gradients of variables here, which count once all nodes here have run.
        self._staged: dict[Variable, PyTree] = {}
        self._committed = False
        # Incarnations of the workers that certainly know the marks.
        self._told: set[int] = set()
        self._failure: PassFailure | None = None
        # The thread that called `backward`, and the request that it will send next.
        self._driver: int | None = None
        self._inline: tuple[int, GradientRequest] | None = None

    # --- events, from any thread ---

    def begin(self) -> None:
        """Starts the pass on the worker where it begins; see `done`."""
        self._put(self._begin)

    def drive(self) -> None:
        """As `begin`, but sends requests on the calling thread while it has any."""
        # Other threads bring steps too, and must not send the driver's request.
        self._driver = threading.get_ident()
        self._put(self._begin)
        # This thread waits for the end anyway: it sends the request and reads the
        # answer itself, without a hand-off to another thread.
        while self._inline is not None:
            (peer, request), self._inline = self._inline, None
            self._put(self._ask(peer, request))
        self._driver = None

    def receive(self, request: GradientRequest, unanswered: UnansweredRequest) -> None:
        """Handles a request with gradients."""

        def take() -> None:
            self._told.add(unanswered.peer)
            self._detector.asked(unanswered)
            self._begin()
            self._feed(request.gradients)

        def refuse(failure: PassFailure) -> None:
            unanswered.answer.set_result(GradientAnswer((), {}, failure).pack())

        self._put(take, refuse)

    def fail(self, failure: PassFailure) -> None:
        """Fails the pass on all workers."""
        self._put(lambda: self._end(failure))

    def lost(self, worker: WorkerInfo, reason: str) -> None:
        """Fails the pass if it still needs a worker that is lost."""

        def check() -> None:
            awaited = self._awaited.values()
            if any(node.incarnation == worker.incarnation for node in awaited):
                what = f"a backward pass of context {self._context.id}"
                error = WorkerLost(worker.name, what, reason)
                self._end(PassFailure(self._me, error))

        self._put(check)

    def released(self, reason: str) -> None:
        """Fails the pass because its context has ended."""
        self.fail(PassFailure(self._me, no_context(self._context.id, reason)))

    def waits_for(self) -> str:
        """Names the send functions here whose gradients have not come."""
        return ", ".join(node.name for node in list(self._awaited.values()))

    def _put(
        self,
        step: Step,
        otherwise: Callable[[PassFailure], None] = lambda failure: None,
    ) -> None:
        """Queues `step()`, or `otherwise` if the pass has failed."""

        def take() -> None:
            if self._failure is None:
                self._take(step)
            else:
                otherwise(self._failure)

        self._steps.put(take)

    # --- requests to other workers ---

    def _ask(self, peer: int, request: GradientRequest) -> Step:
        """Sends a request and waits for the answer; returns the step that takes it."""
        try:
            answer = self._agent.exchange(self._outgoing(peer, request))
        except Exception as error:  # noqa: BLE001 - the step passes it on
            failed = error  # the name in `except` ends with the block
            return lambda: self._unanswered(peer, failed)
        return lambda: self._answered(peer, answer)

    def _send(self, peer: int, request: GradientRequest) -> None:
        """Sends a request; its answer will be a step."""
        future = self._agent.request(self._outgoing(peer, request))

        def step() -> None:
            try:
                answer = future.value()
            except Exception as error:  # noqa: BLE001 - it ends the pass
                self._unanswered(peer, error)
            else:
                self._answered(peer, answer)

        call_when_done(future, lambda: self._put(step))

    def _outgoing(self, peer: int, request: GradientRequest) -> Outgoing:
        body, meta = request.pack(self._container.takes_numpy(peer))
        to = self._container.worker(peer)
        firm, unlimited = self.deadline.firm, self.deadline.at is None
        seconds = 0.0 if firm or unlimited else DEFAULT
        found = self._agent.outgoing(to, GRADIENTS, body, seconds, meta, _BACKWARD)
        limit = self.deadline if firm else found.deadline
        return found._replace(deadline=limit, receive=GradientAnswer.unpack)

    # --- steps ---

    def _take(self, step: Step) -> None:
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
            # Unmarked send functions take no part: nothing is waited for at them.
            mine = self._container.ids.worker
            marked = [mark for mark in self._marks or () if maker(mark) == mine]
            sends = {mark: self._send_function(sends, mark) for mark in marked}
        roots = self._roots or ()
        # Roots and marked sends are the only places to which cotangents come from
        # outside.
        starts = [root.edge.node for root in roots]
        self._awaited = sends
        self._sweep = sweep = Sweep([*starts, *sends.values()])
        if events.recordings:
            counts = [(node.name, count) for node, count in sweep.counts.items()]
            note(Event(self._me, events.COUNTED, counts=tuple(counts)))
        for position, root in enumerate(roots):
            node, index = root.edge
            sweep.add(node, index, ((), position, root.cotangent))
            sweep.arrive(node)

    def _answered(self, peer: int, answer: GradientAnswer) -> None:
        """Takes the answer to a request."""
        self._told.add(peer)
        if answer.failure is not None:
            self._end(answer.failure)
            return
        self._feed(answer.gradients)
        self._detector.heard(answer.reports)
        self._detector.outstanding -= 1

    def _unanswered(self, peer: int, error: Exception) -> None:
        """Ends the pass because a request failed."""
        self._end(PassFailure(self._name_of(peer), error))

    def _feed(self, gradients: Sequence[MessageGradient]) -> None:
        """Passes received gradients to the send functions of their messages."""
        assert self._sweep is not None
        for message_id, cotangents in gradients:
            node = self._send_function(self._awaited, message_id)
            # A second gradient for one message is an error, and not a second summand.
            del self._awaited[message_id]
            if len(cotangents) != node.outputs:
                raise AutogradError(
                    f"{node.name} (message {message_id}) has {node.outputs} values, "
                    f"and cotangents for {len(cotangents)} came."
                )
            if events.recordings:
                known = (node.name, message_id, node.worker)
                note(Event(self._me, events.RECEIVED, *known))
            for index, value in enumerate(cotangents):
                if value is not None:
                    received = self._container.received(value)
                    self._sweep.add(node, index, ((), 0, received))
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

    # --- the nodes that are ready ---

    def _run_all(self, sweep: Sweep) -> None:
        waiting = self._steps.waiting
        # A step that waits may bring gradients, which then leave in the same message.
        while not waiting:
            ready = sweep.next()
            if ready is None:
                self._rest(sweep)
                return
            self._run(sweep, *ready)

    def _run(
        self, sweep: Sweep, node: Node, cotangents: list[Cotangent] | None
    ) -> None:
        if isinstance(node, LeafNode):
            if cotangents is not None:
                self._stage(node, cotangents)
        elif isinstance(node, RecvNode):
            absent: list[Cotangent] = [None] * node.outputs
            gradient = MessageGradient(node.message_id, cotangents or absent)
            # By incarnation: a successor of the same name has no such send function.
            self._outbox.setdefault(node.incarnation, []).append(gradient)
        else:
            # A node without any cotangent is not run, but its inputs count the arrival.
            sweep.pass_on(node, None if cotangents is None else node.pull(cotangents))
            if not self.terms.retain_graph:
                node.release()
            if events.recordings:
                known = (node.message_id, node.worker) if type(node) is SendNode else ()
                note(Event(self._me, events.RAN, node.name, *known))

    def _stage(self, node: LeafNode, cotangents: list[Cotangent]) -> None:
        variable = node.variable
        gradient = variable.gradient(cotangents)
        if variable not in self._container.replicated:
            self._staged[variable] = gradient
        elif self.withheld is not None:
            self.withheld[variable] = gradient
        else:
            raise AutogradError(
                "A replicated variable was reached by a backward pass that does not "
                f"begin by `autograd.backward` on {self._me!r}: its trainers would not "
                "know which of their passes it belongs to. Call `backward` on each "
                "trainer, in a context of its own."
            )
        if events.recordings:
            note(Event(self._me, events.ACCUMULATED, node.name))

    # --- when none is ready ---

    def _rest(self, sweep: Sweep) -> None:
        for peer in list(self._outbox):
            # To a worker that waits for an answer they go along with the answer.
            if not self._detector.holds(peer):
                self._request(peer, self._outbox.pop(peer))
        # Before the answer goes out: gradients are read as soon as the pass is over.
        if not sweep.left and not self._committed:
            self._commit()
        for unanswered in self._detector.take_others():
            self._answer(unanswered)
        if self._detector.outstanding:
            return
        starving = [
            StarvingSend(message_id, node.worker, node.name)
            for message_id, node in self._awaited.items()
        ]
        self._detector.waits_for(tuple(starving))
        engager = self._detector.disengage()
        if engager is not None:
            self._answer(engager)
            if self._committed:
                self._leave()
        elif self._roots is not None:
            self._quiet()

    def _commit(self) -> None:
        """Adds the gradients here to the context's, once all nodes here have run."""
        if self._staged:
            # A device that fails must do so before other workers see the end.
            for gradient in self._staged.values():
                if isinstance(gradient, jax.Array):  # the common case needs no tree
                    gradient.block_until_ready()
                else:
                    jax.block_until_ready(gradient)
            self._context.accumulate(self._staged)
            self._staged = {}
        self._committed = True

    def _request(self, peer: int, gradients: list[MessageGradient]) -> None:
        # The marks go along until that worker has answered once: a later request may
        # overtake the first one.
        marks = None if peer in self._told else self._marks
        # Counted before it is sent: the answer may come within the call that sends it.
        self._detector.outstanding += 1
        self._make_ready(peer, gradients)
        request = GradientRequest(self.terms, marks, gradients)
        if self._driver == threading.get_ident() and self._inline is None:
            # One request at a time is the driver's own; further ones go by other
            # threads.
            self._inline = (peer, request)
        else:
            self._send(peer, request)

    def _answer(self, unanswered: UnansweredRequest) -> None:
        gradients = self._outbox.pop(unanswered.peer, [])
        self._make_ready(unanswered.peer, gradients)
        answer = GradientAnswer(gradients, self._detector.news())
        # Its callbacks run within this step: rpc sends the answer.
        unanswered.answer.set_result(answer.pack())

    def _make_ready(self, peer: int, gradients: list[MessageGradient]) -> None:
        """Waits until the gradients are computed on their device."""
        for gradient in gradients:
            for cotangent in gradient.cotangents:
                if isinstance(cotangent, jax.Array):
                    # Before it is sent: what fails on a device here must not appear as
                    # the receiver's.
                    cotangent.block_until_ready()
        if events.recordings:
            worker = self._name_of(peer)
            for gradient in gradients:
                known = (f"receive from {worker}", gradient.message_id, worker)
                note(Event(self._me, events.POSTED, *known))

    def _name_of(self, incarnation: int) -> str:
        peer = self._agent.directory.of_incarnation(incarnation)
        return f"number {incarnation}" if peer is None else peer.info.name

    # --- the end ---

    def _quiet(self) -> None:
        """Ends the pass: no worker has work, and no message is under way."""
        starving = self._detector.starving()
        if starving:
            # Quiet, and yet a send function waits: its gradient will never come.
            worker = next(iter(starving))
            # For the message alone: which receptions the roots have nothing to do with.
            reached = {} if self._sweep is None else self._sweep.counts
            recvs = self._context.recv_functions().values()
            unreached = [recv for recv in recvs if recv not in reached]
            told = explain(starving, unreached, self.terms.smart)
            self._end(PassFailure(worker, UnusedSend(worker, told)))
            return
        self._leave()
        self.done.set_result(None)

    def _leave(self) -> None:
        if self._owner.forget(self) and events.recordings:
            note(Event(self._me, events.ENDED))

    def _end(self, failure: PassFailure) -> None:
        """Ends a failed pass: tells all workers and drops its state."""
        # Once: the end of a pass may be found on several ways.
        if self._failure is not None or self.done.done():
            return
        # First, because the calls below may bring further steps, which then do nothing.
        self._failure = failure
        self._sweep, self._inline = None, None
        self._staged, self._outbox, self._awaited = {}, {}, {}
        answer = GradientAnswer((), {}, failure).pack()
        waiting = [*self._detector.take_others(), self._detector.disengage()]
        for unanswered in waiting:
            if unanswered is not None:
                unanswered.answer.set_result(answer)
        self._leave()
        self._owner.tell_failed(self._context, self.terms, failure)
        for callback in complete(self.done, None, failure.exception()) or ():
            callback()
