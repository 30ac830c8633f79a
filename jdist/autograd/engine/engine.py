"""The engine of one worker: its backward passes, their steps and their messages.

A `LocalPass` is one worker's share of a pass and is driven by events: gradients,
answers, an error, the end of the context. Each event is a step, and steps run one after
another on whichever thread brings them; only the thread that called `backward` ever
waits for another worker. After a step the nodes that are ready run (`Sweep`); when none
is left, gradients for other workers go out, one request to each, or on the answer to a
request of that worker. The `Engine` has the passes by their ids and takes the messages.
"""

import contextlib
import contextvars
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
from msgspec.structs import replace

from jdist._lru_cache import LRUCache
from jdist._tree import PyTree
from jdist.autograd.contexts import Container, Context, maker
from jdist.autograd.engine.messages import (
    END,
    GRADIENTS,
    TERMS,
    GradientAnswer,
    MessageGradient,
    PassFailure,
    PassTerms,
    pack_gradients,
    unpack_gradients,
)
from jdist.autograd.engine.termination_detector import (
    TerminationDetector,
    UnansweredRequest,
    explain,
)
from jdist.autograd.recording.errors import (
    AutogradError,
    BackwardError,
    UnusedSend,
    no_context,
)
from jdist.autograd.recording.node import (
    Cotangent,
    Edge,
    Node,
    Numbers,
    Reach,
    RecvNode,
    SendNode,
    ids_in,
    plus,
)
from jdist.autograd.recording.variable import LeafNode, Variable
from jdist.rpc import Future, RpcError, WorkerInfo, WorkerLost
from jdist.rpc.extension import (
    InterruptSafeLock,
    Reply,
    current,
    futures,
    incarnation_of,
    unpacked,
)

T = TypeVar("T")

STATE = "jdist.autograd.engine"
"""The key under which a worker keeps its engine."""

# Ended passes are remembered, to answer messages that the end has overtaken.
_MOST_ENDED = 1024

_BACKWARD = current.Operation("autograd.backward")

Step = Callable[[], object]


class StepQueue:
    """A serial executor without a thread of its own.

    A thread that brings a step runs it, or leaves it to the thread that is running
    another one. State that only steps use therefore needs no lock.

    Args:
      scope: The worker as which the steps run, and their deadline.

    Example:
      >>> queue, done = StepQueue(None), []
      >>> queue.put(lambda: (queue.put(lambda: done.append(2)), done.append(1)))
      >>> done
      [1, 2]

    Attributes:
      waiting: The queued steps, without the one that runs.
    """

    __slots__ = ("_context", "_running", "waiting")

    def __init__(self, scope: current.Scope | None) -> None:
        self.waiting: deque[Step] = deque()
        self._running = InterruptSafeLock()
        self._context = contextvars.Context()
        self._context.run(current.scope.set, scope)

    def put(self, step: Step) -> None:
        """Runs a step now, or leaves it to the thread that is running another.

        Args:
          step: Must not raise an `Exception`. An interrupt while it runs, such as
            Ctrl-C, is raised to the caller; the remaining steps run with the next one.
        """
        waiting, running = self.waiting, self._running
        # Appended before the lock is tried: the thread that holds it looks again before
        # it goes.
        waiting.append(step)
        if running.held:  # by this thread, which is within a step
            return
        try:
            # Again: a step may be left just before another thread releases the lock.
            while waiting:
                try:
                    if not running.try_acquire():
                        break
                    # In a context of its own: a step must not run under the deadline of
                    # the thread that brings it.
                    self._context.run(self._work)
                finally:
                    running.release()
        except BaseException:
            running.release()  # an interrupt may have come before the first release
            raise

    def _work(self) -> None:
        waiting = self.waiting
        while waiting:
            waiting.popleft()()


# --- the reverse sweep over one worker's part of the graph, without any messages ---

Summand = tuple[tuple[int, ...], int, Numbers]
"""A summand of a cotangent: its place in the sum, which has two parts, and the array.

First comes the order of the node that it comes from, empty for a root; then the
position of the argument there that this is the cotangent of, or that of the root.
"""


def dependencies(starts: Iterable[Node]) -> dict[Node, int]:
    """Count the arrivals at each node that is reached from `starts`.

    Args:
      starts: The nodes to which cotangents come from outside; once for each.
    """
    arrivals = list(starts)
    counts: dict[Node, int] = {}
    while arrivals:
        node = arrivals.pop()
        known = counts.get(node, 0)
        counts[node] = known + 1
        if not known and node.inputs:
            # Only at the first arrival: a node passes on once, however often it is
            # reached.
            arrivals += [edge[0] for edge in node.inputs if edge is not None]
    return counts


class Sweep:
    """The nodes of one pass on one worker, with the cotangents that have arrived.

    A node runs once, when every cotangent that can arrive at it has arrived: from the
    nodes that used its outputs, from the roots of the pass, and, for a send function,
    from another worker. Their number is counted beforehand. A cotangent may be absent,
    None; a node that gets none at all is not run, and passes on absent cotangents.

    Args:
      starts: As for `dependencies`.

    Attributes:
      left: Number of nodes that have not run.
    """

    __slots__ = ("_expected", "_ready", "_summands", "left")

    def __init__(self, starts: Iterable[Node]) -> None:
        # The number of arrivals at each node that are missing.
        self._expected = dependencies(starts)
        self.left = len(self._expected)
        self._summands: dict[tuple[Node, int], list[Summand]] = {}
        self._ready: deque[Node] = deque()

    def add(self, node: Node, index: int, summand: Summand) -> None:
        """Adds a summand of the cotangent of output `index`."""
        self._summands.setdefault((node, index), []).append(summand)

    def arrive(self, node: Node) -> None:
        """Counts an arrival at a node, whether or not it brought a cotangent."""
        missing = self._expected[node] = self._expected[node] - 1
        if not missing:
            self._ready.append(node)

    def next(self) -> tuple[Node, list[Cotangent] | None] | None:
        """Takes a ready node with the cotangents of its outputs; None if none is ready.

        The cotangents are None if none has arrived.
        """
        if not self._ready:
            return None
        node = self._ready.popleft()
        self.left -= 1
        found: list[Cotangent] | None = None
        for index in range(node.outputs):
            summands = self._summands.pop((node, index), None)
            if summands is not None:
                found = found or [None] * node.outputs
                # Most values are used once, and one summand needs no order.
                found[index] = summands[0][2] if len(summands) == 1 else total(summands)
        return node, found

    def pass_on(self, node: Node, cotangents: Sequence[Cotangent] | None) -> None:
        """Passes on the cotangents of a node's inputs; None if it was not run."""
        order, summands, expected = node.order, self._summands, self._expected
        values = (None,) * len(node.inputs) if cotangents is None else cotangents
        pairs = zip(node.inputs, values, strict=True)
        for position, (edge, value) in enumerate(pairs):
            if edge is not None:
                # As `add` and `arrive`, with the edge itself as the key: a call of each
                # would take longer than all the rest.
                if value is not None:
                    summands.setdefault(edge, []).append((order, position, value))
                to = edge[0]
                missing = expected[to] = expected[to] - 1
                if not missing:
                    self._ready.append(to)


def total(summands: Sequence[Summand]) -> Numbers:
    """Sum in an order that does not depend on arrival.

    Example:
      >>> later, earlier = ((7, 1), 0, 2.0), ((0, 3), 1, 0.5)
      >>> print(total([later, earlier]))
      2.5
    """
    # By place alone: where two are equal, tuples would be compared by their arrays.
    ordered = sorted(summands, key=lambda summand: summand[:2])
    return functools.reduce(plus, [summand[2] for summand in ordered])


# --- one worker's share of a pass ---


class Root(NamedTuple):
    """A root of a pass.

    Attributes:
      edge: The edge of the value.
      cotangent: The value's cotangent.
    """

    edge: Edge
    cotangent: jax.Array


class LocalPass:
    """One worker's share of a pass, from its first message to its end.

    Args:
      engine: The worker's engine.
      context: The context of the pass.
      terms: The pass, as messages describe it.
      deadline: When to give up.
      roots: On the worker where the pass begins, its roots; else None.

    Attributes:
      terms: The argument of the same name.
      deadline: The argument of the same name.
      outcome: Completed at the end, on the worker where the pass began, or where it
        failed.
      withheld: Gradients of replicated variables, which do not count before they are
        reduced; None where the pass began without a reduction.
    """

    def __init__(
        self,
        engine: "Engine",
        context: Context,
        terms: PassTerms,
        deadline: current.Deadline,
        roots: Sequence[Root] | None = None,
    ) -> None:
        self.terms = terms
        self.deadline = deadline
        self.outcome: Future[None] = Future()
        self.withheld: dict[Variable, PyTree] | None = None
        self._engine = engine
        self._context = context
        self._container = context.container
        self._agent = context.container.agent
        self._me = self._agent.info.name
        self._roots = roots
        # A default timeout limits the pass as a whole, and not each of its steps.
        limit = deadline if deadline.firm else current.NEVER
        self._steps = StepQueue(current.Scope(self._agent, limit))
        self._detector = TerminationDetector(self._me, root=roots is not None)
        self._sweep: Sweep | None = None
        # Send functions whose gradients have not come, and gradients to be sent.
        self._awaited: dict[int, SendNode] = {}
        self._outbox: dict[int, list[MessageGradient]] = {}
        # Gradients of variables here, which count once all nodes here have run.
        self._staged: dict[Variable, PyTree] = {}
        self._committed = False
        self._failure: PassFailure | None = None
        # The thread that called `backward`, and the request that it will send next.
        self._driver: int | None = None
        self._inline: tuple[int, list[MessageGradient]] | None = None

    # --- events, from any thread ---

    def drive(self) -> None:
        """Starts the pass where it begins; sends requests while this thread has any."""
        # Other threads bring steps too, and must not send the driver's request.
        self._driver = threading.get_ident()
        self._put(self._begin)
        # This thread waits for the end anyway: it sends the request and reads the
        # answer itself, without a hand-off to another thread.
        while self._inline is not None:
            (peer, gradients), self._inline = self._inline, None
            self._conclude(peer, partial(self._exchange, peer, gradients))
        self._driver = None

    def receive(
        self, gradients: Sequence[MessageGradient], unanswered: UnansweredRequest
    ) -> None:
        """Handles a request with gradients."""
        self._put(partial(self._received, gradients, unanswered), unanswered)

    def fail(self, failure: PassFailure) -> None:
        """Fails the pass on all workers."""
        self._put(partial(self._end, failure))

    def lost(self, worker: WorkerInfo, reason: str) -> None:
        """Fails the pass if it still needs a worker that is lost."""

        def check() -> None:
            awaited = self._awaited.values()
            if any(node.incarnation == worker.incarnation for node in awaited):
                what = f"a backward pass of context {self._context.id}"
                error = WorkerLost(worker.name, what, reason)
                self._end(PassFailure(self._me, error))

        self._put(check)

    def waits_for(self) -> str:
        """Names the send functions here whose gradients have not come."""
        return ", ".join(node.name for node in list(self._awaited.values()))

    def _put(self, step: Step, unanswered: UnansweredRequest | None = None) -> None:
        """Queues `step()`; if the pass has failed, that is the answer to a request."""
        self._steps.put(partial(self._take, step, unanswered))

    # --- requests to other workers ---

    def _exchange(self, peer: int, gradients: Sequence[MessageGradient]) -> Any:
        return self._ask(self._agent.exchange, peer, gradients)

    def _send(self, peer: int, gradients: Sequence[MessageGradient]) -> None:
        """Sends a request; its answer will be a step."""
        future = self._ask(self._agent.request, peer, gradients)
        futures.call_when_done(future, partial(self._conclude, peer, future.value))

    def _conclude(self, peer: int, exchanged: Callable[[], GradientAnswer]) -> None:
        """Takes the answer to a request, or its error, as a step."""
        try:
            step = partial(self._answered, exchanged())
        except Exception as error:  # noqa: BLE001 - the step passes it on
            step = partial(self._end, PassFailure(self._name_of(peer), error))
        self._put(step)

    def _ask(
        self, way: Callable[[Any], T], peer: int, gradients: Sequence[MessageGradient]
    ) -> T:
        """Sends a request by a method of the agent; returns what that returns."""
        to, limit = self._container.worker(peer), self.deadline
        body = pack_gradients(gradients, self._container.takes_numpy(peer))
        seconds = 0.0 if limit.at is None else current.DEFAULT
        meta = {TERMS: self.terms}
        sent = self._agent.outgoing(to, GRADIENTS, body, seconds, meta, _BACKWARD)
        limit = limit if limit.firm else sent.deadline
        return way(replace(sent, deadline=limit, receive=GradientAnswer.unpack))

    # --- steps ---

    def _take(self, step: Step, unanswered: UnansweredRequest | None) -> None:
        if self._failure is not None:
            if unanswered is not None:
                failed = GradientAnswer((), {}, self._failure)
                unanswered.answer.set_result(failed.pack())
            return
        try:
            step()
            if self._sweep is not None and not self.outcome.done():
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
        context = self._context
        if self.terms.marks is None:
            sends = context.send_functions()
        else:
            # Unmarked send functions take no part: nothing is waited for at them.
            mine = self._container.ids.worker
            sends = {
                mark: context.sends.get(mark) or self._no_send(mark)
                for mark in ids_in(self.terms.marks)
                if maker(mark) == mine
            }
        roots = self._roots or ()
        # Roots and marked sends are the only places to which cotangents come from
        # outside.
        starts: list[Node] = [root.edge.node for root in roots]
        starts += sends.values()
        self._awaited = sends
        self._sweep = sweep = Sweep(starts)
        for position, ((node, index), cotangent) in enumerate(roots):
            sweep.add(node, index, ((), position, cotangent))
            sweep.arrive(node)

    def _received(
        self, gradients: Sequence[MessageGradient], unanswered: UnansweredRequest
    ) -> None:
        """Takes a request with gradients."""
        self._detector.asked(unanswered)
        self._begin()
        self._feed(gradients)

    def _answered(self, answer: GradientAnswer) -> None:
        """Takes the answer to a request."""
        if answer.failure is not None:
            self._end(answer.failure)
            return
        self._feed(answer.gradients)
        self._detector.heard(answer.news)
        self._detector.outstanding -= 1

    def _feed(self, gradients: Sequence[MessageGradient]) -> None:
        """Passes received gradients to the send functions of their messages."""
        sweep = self._sweep
        assert sweep is not None
        for gradient in gradients:
            message_id, cotangents = gradient.message_id, gradient.cotangents
            node = self._awaited.get(message_id) or self._no_send(message_id)
            # A second gradient for one message is an error, and not a second summand.
            del self._awaited[message_id]
            if len(cotangents) != node.outputs:
                raise AutogradError(
                    f"{node.name} (message {message_id}) has {node.outputs} values, "
                    f"and cotangents for {len(cotangents)} came."
                )
            for index, value in enumerate(cotangents):
                if value is not None:
                    received = self._container.received(value)
                    sweep.add(node, index, ((), 0, received))
            sweep.arrive(node)

    def _no_send(self, message_id: int) -> NoReturn:
        raise AutogradError(
            "Could not find send function for autograd message id: "
            f"{message_id} in context {self._context.id} on {self._me!r}. Its "
            "value was recorded in another context, or its call has failed. A "
            "value of an earlier context, such as a hidden state, goes on without "
            "its history as `autograd.detach(value)`."
        )

    # --- the nodes that are ready ---

    def _run_all(self, sweep: Sweep) -> None:
        waiting = self._steps.waiting
        # A step that waits may bring gradients, which then leave in the same message.
        while not waiting:
            ready = sweep.next()
            if ready is None:
                self._rest(sweep)
                return
            node, cotangents = ready
            if isinstance(node, LeafNode):
                if cotangents is not None:
                    self._stage(node, cotangents)
            elif isinstance(node, RecvNode):
                absent: list[Cotangent] = [None] * node.outputs
                gradient = MessageGradient(node.message_id, cotangents or absent)
                # By incarnation: a successor of the same name has no such function.
                self._outbox.setdefault(node.incarnation, []).append(gradient)
            else:
                self._run(sweep, node, cotangents)

    def _run(
        self, sweep: Sweep, node: Node, cotangents: list[Cotangent] | None
    ) -> None:
        # A node without any cotangent is not run, but its inputs count the arrival.
        sweep.pass_on(node, None if cotangents is None else node.pull(cotangents))
        if not self.terms.retain_graph:
            node.release()

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

    # --- when none is ready ---

    def _rest(self, sweep: Sweep) -> None:
        detector = self._detector
        for peer in list(self._outbox):
            # To a worker that waits for an answer they go along with the answer.
            if not detector.holds(peer):
                self._request(peer, self._outbox.pop(peer))
        # Before the answer goes out: gradients are read as soon as the pass is over.
        if not sweep.left and not self._committed:
            self._commit()
        for unanswered in detector.others and detector.take_others():
            self._answer(unanswered)
        if detector.outstanding:
            return
        detector.waits_for(self._awaited)
        engager = detector.disengage()
        if engager is not None:
            self._answer(engager)
            if self._committed:
                self._engine.forget(self)
        elif self._roots is not None:
            self._quiet()

    def _commit(self) -> None:
        """Adds the gradients here to the context's, once all nodes here have run."""
        if self._staged:
            # A device that fails must do so before other workers see the end.
            _wait_for(self._staged.values())
            self._context.accumulate(self._staged)
            self._staged = {}
        self._committed = True

    def _request(self, peer: int, gradients: list[MessageGradient]) -> None:
        # Counted before it is sent: the answer may come within the call that sends it.
        self._detector.outstanding += 1
        # What fails on a device here must not appear as the receiver's.
        _wait_for(x for gradient in gradients for x in gradient.cotangents)
        if self._driver == threading.get_ident() and self._inline is None:
            # One request at a time is the driver's own; further ones go by other
            # threads.
            self._inline = (peer, gradients)
        else:
            self._send(peer, gradients)

    def _answer(self, unanswered: UnansweredRequest) -> None:
        gradients = self._outbox.pop(unanswered.peer, [])
        _wait_for(x for gradient in gradients for x in gradient.cotangents)
        answer = GradientAnswer(gradients, self._detector.take_news())
        # Callbacks of the future run within this step: rpc sends the answer.
        unanswered.answer.set_result(answer.pack())

    def _name_of(self, incarnation: int) -> str:
        peer = self._agent.directory.of_incarnation(incarnation)
        return f"number {incarnation}" if peer is None else peer.info.name

    # --- the end ---

    def _quiet(self) -> None:
        """Ends the pass: no worker has work, and no message is under way."""
        starving = self._detector.starving()
        if starving:
            # Quiet, and yet a send function waits: its gradient will never come.
            worker = next(iter(starving.values())).worker
            told = explain(starving, smart=self.terms.marks is not None)
            self._end(PassFailure(worker, UnusedSend(worker, told)))
            return
        self._engine.forget(self)
        self.outcome.set_result(None)

    def _end(self, failure: PassFailure) -> None:
        """Ends a failed pass: tells all workers and drops its state."""
        # Once: the end of a pass may be found on several ways.
        if self._failure is not None or self.outcome.done():
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
        self._engine.forget(self)
        self._engine.tell_failed(self._context, self.terms.pass_id, failure)
        futures.cancel(self.outcome, failure.exception())


def _wait_for(values: Iterable[PyTree]) -> None:
    """Waits until values are computed on their device."""
    for value in values:
        if isinstance(value, jax.Array):  # the common case needs no tree
            value.block_until_ready()
        else:
            jax.block_until_ready(value)


# --- all passes of a worker ---


class Engine:
    """All backward passes of one worker.

    Args:
      container: The worker's contexts.

    Source: `torch/csrc/distributed/autograd/engine/dist_engine.h`.
    """

    def __init__(self, container: Container) -> None:
        self._agent = container.agent
        self._container = container
        self._lock = threading.Lock()
        # By context and pass. Entries are added under the context's lock, too.
        self._passes: dict[tuple[int, int], LocalPass] = {}
        self._ended: LRUCache[int, PassFailure] = LRUCache(_MOST_ENDED)
        container.on_end = self._on_context_end
        self._agent.extension_state.on_gone(self._on_gone)
        self._agent.register(GRADIENTS, self._on_gradients)
        self._agent.register(END, self._on_end)

    # --- passes ---

    def begin(
        self,
        context: Context,
        roots: Sequence[Root],
        marks: Reach | None,
        retain_graph: bool,
        deadline: current.Deadline,
    ) -> LocalPass:
        """Enters a pass that begins here; see `LocalPass` and `PassTerms`."""
        pass_id = self._container.ids.backward_pass()
        terms = PassTerms(context.id, pass_id, retain_graph, marks)
        made = LocalPass(self, context, terms, deadline, roots)
        return self._enter(context, made)

    def counts(self) -> dict[str, int]:
        """Counts of passes and contexts, for `rpc.debug_info`."""
        return {
            "num_current_backward_passes": len(self.live()),
            "num_autograd_contexts": len(self._container.contexts()),
        }

    def live(self) -> list[LocalPass]:
        """Lists the passes under way."""
        with self._lock:
            return list(self._passes.values())

    def forget(self, local_pass: LocalPass) -> None:
        """Removes a pass that is over."""
        with self._lock:
            self._passes.pop(local_pass.terms[:2], None)

    def tell_failed(self, context: Context, pass_id: int, failure: PassFailure) -> None:
        """Ends a failed pass on all workers that may take part."""
        with self._lock:
            if pass_id in self._ended:
                return
            # The text alone: an exception would keep all that was on the stack.
            told = BackwardError(failure.worker, str(failure.error))
            self._ended.put(pass_id, PassFailure(failure.worker, told))
        body = (context.id, pass_id, *failure)
        fresh = contextvars.Context()  # not under a deadline that may have passed
        # From neighbour to neighbour: each tells those that it knows, and each only
        # once.
        others = context.known_incarnations() - {self._container.ids.worker}
        for incarnation in sorted(others):
            worker = self._container.worker(incarnation)
            with contextlib.suppress(RpcError):  # shut down, here or there
                fresh.run(self._agent.call_async, worker, END, body)

    def _enter(self, context: Context, made: LocalPass) -> LocalPass:
        """Enters a pass, or returns the one that was entered meanwhile."""
        with context.lock:  # so that the end of the context comes before or after
            context.check()
            with self._lock:
                # Two first messages of a pass may come on two threads.
                return self._passes.setdefault(made.terms[:2], made)

    def _on_context_end(self, context: Context, reason: str) -> None:
        # Usually there is no pass: a context ends long after its last one.
        for each in self.live() if self._passes else ():
            if each.terms.context_id == context.id:
                error = no_context(context.id, reason)
                each.fail(PassFailure(self._agent.info.name, error))

    def _on_gone(self, worker: WorkerInfo, reason: str) -> None:
        for each in self.live():
            each.lost(worker, reason)

    # --- messages ---

    def _on_gradients(
        self, caller: WorkerInfo, body: object, meta: dict[str, object]
    ) -> Reply | Future[Reply]:
        terms = unpacked(meta.get(TERMS), PassTerms, "No request with gradients")
        gradients = unpack_gradients(body)
        context = self._container.retrieve(terms.context_id)
        found = self._passes.get(terms[:2])
        if found is None:
            limit = current.deadline()
            made = LocalPass(self, context, terms, limit)
            found = self._enter(context, made)
        # Only now: a pass that was entered is ended by the message of its end.
        failure = self._ended.get(terms.pass_id)
        if failure is not None:
            found.fail(failure)
        answer: Future[Reply] = Future()
        found.receive(gradients, UnansweredRequest(incarnation_of(caller), answer))
        # Mostly it is there, and is sent by this thread without a callback.
        return answer.value() if answer.done() else answer

    def _on_end(
        self, caller: WorkerInfo, body: object, meta: dict[str, object]
    ) -> None:
        rule = "The end of a pass has a context, a pass and a failure"
        kind = tuple[int, int, str, Exception]
        context_id, pass_id, *told = unpacked(body, kind, rule)
        failure = PassFailure(*told)
        context = self._container.find(context_id)
        with self._lock:
            # A pass that was ended here has told this worker's neighbours already.
            known = pass_id in self._ended
            found = self._passes.get((context_id, pass_id))
        if context is None or known:
            return
        if found is not None:
            found.fail(failure)
        else:
            # The end came before the first gradient: the workers beyond must know, too.
            self.tell_failed(context, pass_id, failure)


def install(container: Container) -> None:
    """Gives the worker with these contexts an engine."""
    container.agent.extension_state[STATE] = Engine(container)


def of(container: Container) -> Engine:
    """Return the engine of the worker with these contexts."""
    found: Engine = container.agent.extension_state[STATE]
    return found
