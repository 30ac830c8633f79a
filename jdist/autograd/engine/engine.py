"""The engine of one worker: its backward passes and their messages."""

import contextlib
import contextvars
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from jdist._lru_cache import LRUCache
from jdist.autograd.contexts.context import Container, Context, maker
from jdist.autograd.engine.local_pass import LocalPass, Root
from jdist.autograd.engine.messages import (
    END,
    GRADIENTS,
    REACH,
    GradientRequest,
    PassFailure,
    PassTerms,
    unpack_end,
    unpack_reach,
    unpack_reached,
)
from jdist.autograd.engine.termination_detector import UnansweredRequest
from jdist.autograd.recording.errors import BackwardError
from jdist.autograd.recording.node import Node, reached_from
from jdist.rpc import Future, ProtocolError, RpcError, WorkerInfo
from jdist.rpc.extension import Deadline, Reply, current, incarnation_of

STATE = "jdist.autograd.engine"
"""The key under which a worker keeps its engine."""

# Ended passes are remembered, to answer messages that the end has overtaken.
_MOST_ENDED = 1024


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
        self._agent.register(REACH, self._on_reach)

    # --- passes ---

    def begin(
        self,
        context: Context,
        roots: Sequence[Root],
        marks: Sequence[int] | None,
        retain_graph: bool,
        deadline: Deadline,
    ) -> LocalPass:
        """Starts a pass here; `marks` as for `LocalPass`, None in FAST mode."""
        pass_id = self._container.ids.backward_pass()
        terms = PassTerms(context.id, pass_id, marks is not None, retain_graph)
        made = LocalPass(self, context, terms, marks, deadline, roots)
        return self._enter(context, made)

    def mark(
        self, context_id: int, starts: Iterable[Node], timeout: float
    ) -> list[int]:
        """Finds the ids of all send functions, on any worker, that these nodes reach.

        Args:
          context_id: Of the context.
          starts: Nodes of this worker.
          timeout: Of each question, in seconds.

        Raises:
          RpcTimeout, WorkerLost: A worker that had to be asked did not answer.
          ContextNotFound: One has released the context.
        """
        # Messages carry along the send functions below each node, on any worker. Only
        # where there are too many their workers are asked, from message to message.
        known, beyond = reached_from(starts)
        asked: set[int] = set()
        while questions := beyond - asked:
            # Each once: histories of several workers may share a message.
            asked |= questions
            # The top of a message id is the worker that has its send function.
            by_worker = defaultdict(list)
            for message_id in sorted(questions):
                by_worker[maker(message_id)].append(message_id)
            answers = [
                self._agent.call_async(
                    self._container.worker(worker), REACH, (context_id, ids), timeout
                )
                for worker, ids in by_worker.items()
            ]
            for answer in answers:
                more, further = unpack_reached(answer.wait())
                known |= more
                beyond |= further
        return sorted(known)

    def counts(self) -> dict[str, int]:
        """Numbers of passes and contexts, for `debug_info`."""
        return {
            "num_current_backward_passes": len(self.live()),
            "num_autograd_contexts": len(self._container.contexts()),
        }

    def live(self) -> list[LocalPass]:
        """Lists the passes under way."""
        with self._lock:
            return list(self._passes.values())

    def forget(self, local_pass: LocalPass) -> bool:
        """See `PassOwner`."""
        with self._lock:
            return self._passes.pop(local_pass.terms[:2], None) is not None

    def tell_failed(
        self, context: Context, terms: PassTerms, failure: PassFailure
    ) -> None:
        """See `PassOwner`."""
        with self._lock:
            if terms.pass_id in self._ended:
                return
            # The text alone: an exception would keep all that was on the stack.
            told = BackwardError(failure.worker, str(failure.error))
            self._ended.put(terms.pass_id, PassFailure(failure.worker, told))
        body = (terms.context_id, terms.pass_id, *failure)
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
                each.released(reason)

    def _on_gone(self, worker: WorkerInfo, reason: str) -> None:
        for each in self.live():
            each.lost(worker, reason)

    # --- messages ---

    def _on_gradients(
        self, caller: WorkerInfo, body: object, meta: dict[str, object]
    ) -> Reply | Future[Reply]:
        request = GradientRequest.unpack(body, meta)
        terms = request.terms
        context = self._container.retrieve(terms.context_id)
        found = self._passes.get(terms[:2])
        if found is None:
            limit = current.deadline()
            made = LocalPass(self, context, terms, request.marks, limit)
            found = self._enter(context, made)
        # Only now: a pass that was entered is ended by the message of its end.
        failure = self._ended.get(terms.pass_id)
        if failure is not None:
            found.fail(failure)
        unanswered = UnansweredRequest(incarnation_of(caller), Future())
        found.receive(request, unanswered)
        answer = unanswered.answer
        # Mostly it is there, and is sent by this thread without a callback.
        return answer.value() if answer.done() else answer

    def _on_end(
        self, caller: WorkerInfo, body: object, meta: dict[str, object]
    ) -> None:
        context_id, pass_id, failure = unpack_end(body)
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
            terms = PassTerms(context_id, pass_id, False, False)
            self.tell_failed(context, terms, failure)

    def _on_reach(
        self, caller: WorkerInfo, body: object, meta: Mapping[str, object]
    ) -> tuple[list[int], list[int]]:
        context_id, ids = unpack_reach(body)
        sends = self._container.retrieve(context_id).send_functions()
        # A send that has failed, say. To leave it out would end a SMART pass without
        # its gradient.
        unknown = [message_id for message_id in ids if message_id not in sends]
        if unknown:
            raise ProtocolError(
                f"Could not find send function for autograd message id: {unknown[0]}."
            )
        known, beyond = reached_from([sends[message_id] for message_id in ids])
        return list(known), list(beyond)


def install(container: Container) -> None:
    """Gives the worker with these contexts an engine."""
    container.agent.extension_state[STATE] = Engine(container)


def of(container: Container) -> Engine:
    """Return the engine of the worker with these contexts."""
    found = container.agent.extension_state[STATE]
    assert isinstance(found, Engine)
    return found
