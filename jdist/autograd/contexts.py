"""Contexts: distributed computations, with their ids, gradients and end.

A `Context` is one worker's share of a distributed computation, a `Container` holds all
contexts of a worker, `Ids` gives them their ids, `Releases` ends them on all workers
that took part, and a `Recording` says which of them a thread of control is in.
"""

import contextvars
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeGuard, TypeVar

import numpy as np

from jdist._compat import placed
from jdist._errors import requirement, type_error
from jdist._lru_cache import LRUCache
from jdist._tree import PyTree, add_trees, type_name
from jdist.autograd.recording.errors import AutogradError, ContextNotFound, no_context
from jdist.autograd.recording.node import (
    LIGHT,
    Numbers,
    RecvNode,
    SendNode,
    numbers,
    numbers_in,
    plus,
)
from jdist.autograd.recording.variable import Variable
from jdist.rpc import Future, ProtocolError, RpcError, WorkerInfo, collect_all
from jdist.rpc.extension import (
    Agent,
    IdCounter,
    ReliableDelivery,
    current,
    futures,
    incarnation_of,
)

STATE = "jdist.autograd"
"""The key under which a worker keeps its container."""

T = TypeVar("T")
_RELEASE = "autograd.release"
_HOLD = "autograd.hold"
_RELEASED = "It was released."
# Ended contexts are remembered, to refuse messages that the end has overtaken.
_MOST_ENDED = 4096


class Ids:
    """Ids of contexts, messages and passes: the worker on top, a counter below.

    Of their 64 bits 16 are the worker's, so no communication is needed. From one
    calling thread they repeat from run to run.

    Args:
      worker: Its incarnation, 0 to 65535: in a fixed group its rank.
      first: The first counter of contexts. Messages begin at 1: 0 stands for no
        message.

    Attributes:
      worker: See above.
      context, message, backward_pass: Functions that make an id for a context, for a
        request or a reply, or for a backward pass, and raise OverflowError once all
        2**48 are used up.

    Source: `torch/csrc/distributed/autograd/context/container.h`.

    Example:
      >>> ids = Ids(worker=3)
      >>> ids.context() >> 48, ids.message() - (3 << 48)
      (3, 1)
    """

    def __init__(self, worker: int, first: int = 0) -> None:
        self.worker = worker
        self.context = IdCounter(worker, first).packed
        self.message = IdCounter(worker, max(first, 1)).packed
        # A counter of its own, so that passes do not change the ids of messages.
        self.backward_pass = IdCounter(worker, 1).packed


def maker(packed: int) -> int:
    """Return the incarnation of the worker that made an id.

    Example:
      >>> maker((2 << 48) + 5)
      2
    """
    return packed >> 48


class Context:
    """One worker's share of a context, which all workers know by the same id.

    Made by `autograd.context` on the first worker, and by the first message of the
    context on every other one. `lock` guards all attributes but the constant ones.

    Args:
      context_id: Its id.
      container: The worker's container.

    Attributes:
      id: The context's id; its top 16 bits are the incarnation of the worker that made
        it.
      sends: Send functions by message id.
      recvs: Receive functions by message id.
      known: The workers with which this one exchanged messages in it: names by
        incarnations, because a lost worker's successor may bear its name.
      gradients: The sums of what backward passes found for this worker's variables.
      ended: The reason why it has ended, or None.
      lock: A reentrant lock.

    Source: `torch/csrc/distributed/autograd/context/context.h`.
    """

    def __init__(self, context_id: int, container: "Container") -> None:
        self.id = context_id
        self.container = container
        self.lock = threading.RLock()
        self.sends: dict[int, SendNode] = {}
        self.recvs: dict[int, RecvNode] = {}
        self.known: dict[int, str] = {}
        self.gradients: dict[Variable, PyTree] = {}
        self.ended: str | None = None

    @property
    def origin(self) -> int:
        """Incarnation of the worker that made it."""
        return maker(self.id)

    def send_functions(self) -> dict[int, SendNode]:
        """Copies the send functions by message id."""
        with self.lock:
            return dict(self.sends)

    def recv_functions(self) -> dict[int, RecvNode]:
        """Copies the receive functions by message id."""
        with self.lock:
            return dict(self.recvs)

    def known_workers(self) -> set[str]:
        """Names of the workers with which this one exchanged messages in it."""
        with self.lock:
            return set(self.known.values())

    def known_incarnations(self) -> set[int]:
        """Incarnations of the workers with which this one exchanged messages in it."""
        with self.lock:
            return set(self.known)

    def release(self) -> Future[None]:
        """Ends the context now, on all workers that took part.

        Returns:
          A future, done when all of them have forgotten it or are gone.

        Raises:
          ContextNotFound: It was released.

        Source: `torch.distributed.autograd._release_context`.
        """
        self.check()
        return self.container.releases.end([self.id])

    def check(self) -> None:
        """Raises if the context has ended.

        Raises:
          ContextNotFound: It was released.
        """
        if self.ended is not None:
            raise no_context(self.id, self.ended)

    def meet(self, worker: WorkerInfo) -> bool:
        """Records a worker that exchanges messages here, to tell it of the end.

        Returns:
          Whether it is a new one.

        Raises:
          ContextNotFound: It was released.
        """
        incarnation = incarnation_of(worker)
        with self.lock:
            self.check()
            new = incarnation not in self.known
            self.known[incarnation] = worker.name
        return new

    def accumulate(self, gradients: Mapping[Variable, PyTree]) -> None:
        """Adds the gradients of one backward pass.

        Raises:
          ContextNotFound: It was released.
        """
        with self.lock:
            self.check()
            for variable, gradient in gradients.items():
                known = self.gradients.get(variable)
                if known is not None:
                    # A leaf that only one pass has reached is None in the other.
                    gradient = add_trees(known, gradient, plus)
                self.gradients[variable] = gradient

    def end(self, reason: str) -> set[int]:
        """Ends the context and its passes; returns the incarnations to be told."""
        with self.lock:
            if self.ended is not None:
                return set()
            # Marked under the lock: later messages are refused by `check`.
            self.ended = reason
            known = set(self.known)
        # Outside of the lock: a pass that ends runs the callbacks of others.
        self.container.on_end(self, reason)
        with self.lock:
            # Nodes refer to histories, and these to arrays: memory goes now, not with
            # the context.
            for kept in (self.sends, self.recvs, self.gradients):
                kept.clear()
        return known


class Container:
    """All contexts of one worker.

    Args:
      agent: The worker.

    Attributes:
      agent: The worker.
      releases: Ends contexts on other workers.
      on_end: `on_end(context, reason)` ends the backward passes of a context that has
        ended; set by the engine.
      replicated: The variables of which other trainers have replicas.

    Source: `torch/csrc/distributed/autograd/context/container.h`.
    """

    on_end: Callable[[Context, str], None]

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.replicated: set[Variable] = set()
        self._lock = threading.Lock()
        self._contexts: dict[int, Context] = {}
        self._ended: LRUCache[int, bool] = LRUCache(_MOST_ENDED)
        self.releases = Releases(self)

    # Once it was made it is looked up as any attribute: without a call.
    @functools.cached_property
    def ids(self) -> Ids:
        """The maker of ids, once the worker is in a group."""
        made = Ids(incarnation_of(self.agent.info))
        with self._lock:  # one for all threads: two would give out the same ids
            return vars(self).setdefault("ids", made)

    def worker(self, incarnation: int) -> WorkerInfo:
        """Finds the worker of an incarnation.

        Raises:
          ContextNotFound: It was gone before this worker joined.
        """
        peer = self.agent.directory.of_incarnation(incarnation)
        if peer is None:
            raise ContextNotFound(
                f"Could not find the worker of number {incarnation}: it was gone "
                f"before {self.agent.info.name!r} joined."
            )
        return peer.info

    def is_gone(self, incarnation: int | None) -> bool:
        """Whether the worker of this incarnation has left or was lost."""
        if incarnation is None:
            return True
        peer = self.agent.directory.of_incarnation(incarnation)
        return peer is None or peer.departed is not None

    def takes_numpy(self, incarnation: int) -> bool:
        """Whether small arrays go to that worker as NumPy arrays: see `node.light`."""
        peer = self.agent.directory.of_incarnation(incarnation)
        # A device map says where JAX's arrays arrive.
        return peer is not None and not self.agent.device_maps.in_force

    def received(self, array: Numbers) -> Numbers:
        """Places a received array on this worker's own device, if it has one."""
        device = self.agent.device
        # 64-bit types stay what they are, also where they are switched off.
        if not isinstance(array, np.ndarray) or (
            device is None and array.dtype in LIGHT
        ):
            return array
        return placed(array, device)

    def new(self) -> Context:
        """Makes a new context.

        Raises:
          OverflowError: There are no ids left.
        """
        context = Context(self.ids.context(), self)
        with self._lock:
            self._contexts[context.id] = context
        return context

    def find(self, context_id: int) -> Context | None:
        """Finds a context by id; None if this worker does not have it."""
        return self._contexts.get(context_id)

    def retrieve(self, context_id: int) -> Context:
        """Returns the context of an id.

        Raises:
          TypeError: `context_id` is no id.
          ContextNotFound: This worker does not have it, or not any more.
        """
        if type(context_id) is not int:
            rule = "must be the id that autograd.context gives"
            raise type_error("autograd(context_id)", rule, context_id)
        found = self._contexts.get(context_id)
        if found is None:
            raise no_context(context_id)
        return found

    def get_or_create(self, context_id: int) -> Context:
        """Finds or makes the context of a message that has arrived.

        Raises:
          ContextNotFound: It has ended, or the worker that made it has: the message
            was overtaken by that.
        """
        with self._lock:
            found = self._contexts.get(context_id)
            if found is None:
                # Looked at under the lock: the end of a context may be under way.
                if context_id in self._ended:
                    raise no_context(context_id, "It was released.")
                if self.is_gone(maker(context_id)):
                    raise no_context(context_id, "The worker that made it is gone.")
                found = self._contexts[context_id] = Context(context_id, self)
        return found

    def contexts(self) -> list[Context]:
        """Lists all contexts, oldest first."""
        with self._lock:
            return list(self._contexts.values())

    def end(self, context_id: int, reason: str) -> set[int]:
        """Ends and removes a context; returns the incarnations to be told."""
        with self._lock:
            found = self._contexts.pop(context_id, None)
            # Also a context that was never here: its first message may come after its
            # end.
            self._ended.put(context_id, True)
        return set() if found is None else found.end(reason)


def of(agent: Agent) -> Container:
    """Return the container of a worker.

    Raises:
      RpcError: `jdist.autograd` was not installed on it.
    """
    found = agent.extension_state.get(STATE)
    if not isinstance(found, Container):
        raise RpcError(f"{agent.info.name!r} has no autograd: import jdist.autograd.")
    return found


def here() -> Container:
    """Return the container of the current worker.

    Raises:
      RpcError: RPC has not been initialized.
    """
    agent = current.worker()
    assert isinstance(agent, Agent)
    return of(agent)


class Recording:
    """A context manager that records this thread of control into a context.

    Args:
      context: The context.
      message_id: Id of the request that is executed; 0 where the context was made.

    Attributes:
      context: The argument of the same name.
      outer, numbering: What there was before: not tokens, which an interrupt could
        lose.
    """

    __slots__ = ("_message_id", "context", "numbering", "outer")

    def __init__(self, context: Context, message_id: int = 0) -> None:
        self.context = context
        self._message_id = message_id
        self.outer, self.numbering = _recording.get(), numbers.get()

    def __enter__(self) -> None:
        _recording.set(self)
        numbers.set(numbers_in(self._message_id))

    def __exit__(self, *details: object) -> None:
        _recording.set(self.outer)
        numbers.set(self.numbering)


# A context variable, because a call and its callbacks may change threads.
_recording: ContextVar[Recording | None] = ContextVar(
    "jdist.autograd.recording", default=None
)


def recorded_into(container: Container) -> Context | None:
    """Return the context into which this thread of control records as that worker."""
    found = _recording.get()
    # A thread may act as one worker while it is within a context of another.
    if found is None or found.context.container is not container:
        return None
    return found.context


class Releases:
    """Ends contexts of one worker, here and on all others that took part.

    Each worker forgets the context and tells those it exchanged messages with, who do
    the same, and answers when they have. Messages are delivered reliably, as long as
    their receivers belong to the group. The workers hold a context on behalf of its
    maker, and let it go when the maker is gone. A worker that learned of a context from
    one that is gone asks the maker to be told of the end instead.

    Args:
      container: The worker's container.

    Attributes:
      delivery: Delivers the messages.
    """

    def __init__(self, container: Container) -> None:
        self._container = container
        self._agent: Agent = container.agent
        self.delivery = ReliableDelivery(self._agent)
        self.delivery.handle(_RELEASE, _id, self._on_release)
        self.delivery.handle(_HOLD, _id, self._on_hold)
        self._agent.extension_state.on_gone(self._on_gone)
        self._agent.extension_state.on_close(self._on_close)

    def leave(self, context_id: int) -> None:
        """Ends a context here at once and soon on all workers that took part."""
        # A message for each end would cost as much as a call, and nothing waits: they
        # are gathered for a moment.
        for worker in self._end_here(context_id, _RELEASED):
            self.delivery.send(worker, _RELEASE, context_id, gather=True)

    def end(
        self,
        ids: Iterable[int],
        reason: str = _RELEASED,
        told_by: int | None = None,
    ) -> Future[None]:
        """Ends contexts on all workers that took part, but the one that told of it.

        Returns:
          A future, done when they all have forgotten them or are gone.
        """
        asked = [
            self._ask(worker, _RELEASE, one)
            for one in ids
            for worker in self._end_here(one, reason, told_by)
        ]
        return _quietly(lambda: collect_all(asked).then(lambda done: None))

    def _end_here(
        self, context_id: int, reason: str, told_by: int | None = None
    ) -> list[int]:
        """Ends a context here; returns the incarnations to be told, sorted by name."""
        known = self._container.end(context_id, reason)
        tell = known - {told_by, self._agent.info.incarnation}
        found: list[tuple[WorkerInfo, int]] = []
        for incarnation in tell:
            peer = self._agent.directory.of_incarnation(incarnation)
            if peer is not None:
                found.append((peer.info, incarnation))
        if len(found) > 1:
            found.sort()
        return [incarnation for _, incarnation in found]

    def _ask(self, to: int, kind: str, context_id: int) -> Future[Any]:
        """Delivers a message; the future has its answer, or None without one."""
        answer: Future[Any] = _quietly(Future)
        unreachable = functools.partial(answer.set_result, None)
        self.delivery.send(to, kind, context_id, answer.set_result, unreachable)
        return answer

    # --- messages of other workers ---

    def _on_release(
        self, caller: WorkerInfo, ids: Sequence[int]
    ) -> tuple[Future[Sequence[None]], Callable[[], None]]:
        # Answered once all workers beyond have ended: `release` waits for that.
        told: Future[Sequence[None]] = _quietly(Future)

        def end() -> None:
            # The caller knows, and is not told back.
            reason, by = f"{caller.name!r} released it.", incarnation_of(caller)
            ended = self.end(ids, reason, by)
            futures.call_when_done(ended, lambda: told.set_result([None] * len(ids)))

        return told, end

    def _on_hold(
        self, caller: WorkerInfo, ids: Sequence[int]
    ) -> tuple[list[bool], Callable[[], None]]:
        """Answers whether each context is over; the caller is told of later ends."""
        return [self._is_over(caller, one) for one in ids], lambda: None

    def _is_over(self, caller: WorkerInfo, context_id: int) -> bool:
        context = self._container.find(context_id)
        if context is None:
            return True
        try:
            context.meet(caller)
        except RuntimeError:  # it has ended meanwhile
            return True
        return False

    # --- workers that are gone ---

    def _on_gone(self, worker: WorkerInfo, reason: str) -> None:
        why = f"{worker.name!r}, which made it, is gone: {reason}"
        orphans = []
        for context in self._container.contexts():
            if context.origin == worker.incarnation:
                self._container.end(context.id, why)
            # The lost worker may be the one that would have told this one of the end.
            elif worker.incarnation in context.known_incarnations():
                orphans.append(context)
        # Messages to it are no longer delivered, nor their answers waited for.
        self.delivery.forget(incarnation_of(worker))
        self.seek_end(orphans)

    def seek_end(self, orphans: Iterable[Context]) -> None:
        """Asks the makers of contexts for their end, which a lost worker would tell."""
        for context in orphans:
            if context.origin != self._container.ids.worker:
                # The maker lives and ends it for all; this message adds this worker to
                # those that it tells.
                asked = self._ask(context.origin, _HOLD, context.id)
                end = functools.partial(self._end_if_over, context.id, asked)
                futures.call_when_done(asked, end)

    def _end_if_over(self, context_id: int, asked: Future[Any]) -> None:
        if asked.value() is True:
            self.end([context_id])

    def _on_close(self) -> None:
        for context in self._container.contexts():
            self._container.end(context.id, "RPC was shut down on this worker.")
        self.delivery.close()


def are_ids(values: object) -> TypeGuard[list[int]]:
    """Whether what another worker has sent is a list of ids."""
    # Exact types: `isinstance` would take True for an id.
    return type(values) is list and all(
        type(value) is int and 0 <= value < 1 << 64 for value in values
    )


def _id(named: object) -> int:
    """Check the id of a context that another worker has sent."""
    if not are_ids([named]):
        raise ProtocolError("Contexts are named by their ids.")
    assert isinstance(named, int)
    return named


def _quietly(make: Callable[[], T]) -> T:
    """Call `make()` outside of any call."""
    # A call's deadline must not stop the end of a context.
    return contextvars.Context().run(make)


# --- the public functions ---


def context() -> AbstractContextManager[int]:
    """Records the calls made within the block, also on other workers.

    Shortly after its end all workers that took part drop their records; the end by
    `retrieve_context(context_id).release()` can be waited for.

    Returns:
      A context manager, which enters with the id of the context: 64 bits, of which the
      top 16 are the rank of this worker.

    Raises (on entering):
      AutogradError: This thread of control is within a context already.
      RpcError: RPC has not been initialized.

    Source: `torch.distributed.autograd.context`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import autograd, rpc
      >>> with rpc.local_cluster(["worker0", "worker1"]):
      ...     w = autograd.variable(3.0)
      ...     with autograd.context() as context_id:
      ...         y = rpc.rpc_sync("worker1", jnp.square, args=(w,))
      ...     y
      Recorded(float32[] of receive from worker1)
    """
    return _Within()


class _Within(AbstractContextManager[int]):
    """See `context`; a class, because a generator takes four times as long."""

    __slots__ = ("_recording",)

    _recording: Recording

    def __enter__(self) -> int:
        container = here()
        # By the worker: several workers of one process may be each within a context.
        outer = recorded_into(container)
        if outer is not None:
            raise AutogradError(
                "Already have an autograd context id for this thread: "
                f"{outer.id}. Contexts cannot be nested; leave this one first."
            )
        self._recording = made = Recording(container.new())
        try:
            made.__enter__()
        except BaseException:  # an interrupt: it was not entered
            self.__exit__()
            raise
        return made.context.id

    def __exit__(self, *details: object) -> None:
        # Written out: an interrupt may come before the first line of a function.
        entered = self._recording
        try:
            _recording.set(entered.outer)
            numbers.set(entered.numbering)
        finally:
            entered.context.container.releases.leave(entered.context.id)


def current_context() -> Context:
    """Returns the context of this thread of control.

    Raises:
      AutogradError: This thread of control is within no context.
      RpcError: RPC has not been initialized.

    Source: `torch.distributed.autograd._current_context`.
    """
    found = recorded_into(here())
    if found is None:
        raise AutogradError(
            "Current thread doesn't have a valid autograd context. Work within "
            "`with autograd.context() as context_id:`."
        )
    return found


def retrieve_context(context_id: int) -> Context:
    """Returns this worker's share of a context.

    Raises:
      TypeError: `context_id` is no id.
      ContextNotFound: This worker does not have it, or not any more.
      RpcError: RPC has not been initialized.

    Source: `torch.distributed.autograd._retrieve_context`.
    """
    return here().retrieve(context_id)


def get_gradients(context_id: int) -> Mapping[Variable, PyTree]:
    """Returns the gradients of this worker's variables, summed over backward passes.

    A gradient is a tree like its variable's value, with None for leaves that no pass
    reached. A variable that no pass reached is not in the mapping. Later passes do not
    change the mapping.

    Args:
      context_id: Id of the context.

    Raises:
      ContextNotFound: There is no such context on this worker.
      TypeError: On a look-up: something else than a variable, such as its array.
      KeyError: On a look-up: a variable that no pass reached.

    Source: `torch.distributed.autograd.get_gradients`.
    """
    context = here().retrieve(context_id)
    with context.lock:
        # A copy: a later pass must not change what was handed out.
        return MappingProxyType(_Gradients(context.gradients))


class _Gradients(dict[Variable, PyTree]):
    """Gradients by variable, which say how they are looked up."""

    def __getitem__(self, variable: object) -> PyTree:
        call = "get_gradients(context_id)[...]"
        if not isinstance(variable, Variable):
            remedy = "Keep what `autograd.variable(array)` returns: gradients are its."
            rule, got = "must be looked up by a Variable", type_name(variable)
            raise type_error(call, rule, got, remedy)
        if variable not in self:
            rule, got = "has those that a backward pass reached", repr(variable)
            raise KeyError(requirement(call, rule, got))
        return super().__getitem__(variable)
