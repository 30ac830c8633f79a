"""The end of contexts, on all workers that took part.

Each worker forgets the context and tells those it exchanged messages with, who do the
same, and answers when they have. Messages are delivered reliably, as long as their
receivers belong to the group. The workers hold a context on behalf of its maker, and
let it go when the maker is gone. A worker that learned of a context from one that is
gone asks the maker to be told of the end instead.
"""

import contextvars
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from jdist.autograd.contexts.context import Container, Context
from jdist.rpc import Future, ProtocolError, WorkerInfo, collect_all
from jdist.rpc.extension import (
    Agent,
    ReliableDelivery,
    call_when_done,
    incarnation_of,
)

T = TypeVar("T")
_RELEASE = "autograd.release"
_HOLD = "autograd.hold"
_RELEASED = "It was released."


class Releases:
    """Ends contexts of one worker, here and on all others that took part.

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

    def release(self, context_id: int) -> Future[None]:
        """Ends a context; done when all workers that took part have ended it."""
        return self._end(context_id, _RELEASED)

    def leave(self, context_id: int) -> None:
        """Ends a context here at once, and soon on all workers that took part."""
        for worker in self._end_here(context_id, _RELEASED):
            # A message for each end would cost as much as a call, and nothing waits.
            self.delivery.send(worker, _RELEASE, context_id, gather=True)

    def _end(
        self, context_id: int, reason: str, told_by: int | None = None
    ) -> Future[None]:
        """Ends a context here, and at once on all workers but the one that told."""
        workers = self._end_here(context_id, reason, told_by)
        return _all_of([self._ask(one, _RELEASE, context_id) for one in workers])

    def _end_here(
        self, context_id: int, reason: str, told_by: int | None = None
    ) -> list[int]:
        """Incarnations of the workers to be told, in the order of their names."""
        known = self._container.end(context_id, reason)
        tell = known - {told_by, self._agent.info.incarnation}
        peers = [self._agent.directory.of_incarnation(one) for one in tell]
        infos = sorted(peer.info for peer in peers if peer is not None)
        return [incarnation_of(info) for info in infos]

    def _ask(self, to: int, kind: str, context_id: int) -> Future[Any]:
        """Delivers a message; its answer, or None where there will be none."""
        answer: Future[Any] = _quietly(Future)
        unreachable = functools.partial(answer.set_result, None)
        self.delivery.send(to, kind, context_id, answer.set_result, unreachable)
        return answer

    # --- messages of other workers ---

    def _on_release(
        self, caller: WorkerInfo, ids: Sequence[int]
    ) -> tuple[Future[Sequence[None]], Callable[[], None]]:
        told: Future[Sequence[None]] = _quietly(Future)

        def end() -> None:
            # The caller knows, and is not told back.
            reason, by = f"{caller.name!r} released it.", incarnation_of(caller)
            ended = _all_of([self._end(one, reason, by) for one in ids])
            call_when_done(ended, lambda: told.set_result([None] * len(ids)))

        return told, end

    def _on_hold(
        self, caller: WorkerInfo, ids: Sequence[int]
    ) -> tuple[list[bool], Callable[[], None]]:
        """Whether each of these contexts is over; the caller is told of other ends."""
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
        # Nothing is delivered to it any more, nor waited for.
        self.delivery.forget(incarnation_of(worker))
        self.seek_end(orphans)

    def seek_end(self, orphans: Iterable[Context]) -> None:
        """Asks the makers of contexts for their end, which a lost worker would tell."""
        for context in orphans:
            if context.origin != self._container.ids.worker:
                # The maker lives and ends it for all; from now on it counts this worker
                # among them.
                asked = self._ask(context.origin, _HOLD, context.id)
                end = functools.partial(self._end_if_over, context.id, asked)
                call_when_done(asked, end)

    def _end_if_over(self, context_id: int, asked: Future[Any]) -> None:
        if asked.value() is True:
            self._end(context_id, _RELEASED)

    def _on_close(self) -> None:
        for context in self._container.contexts():
            self._container.end(context.id, "RPC was shut down on this worker.")
        self.delivery.close()


def _id(named: object) -> int:
    """The id of a context that another worker has named."""
    if type(named) is int and 0 <= named < 1 << 64:
        return named
    raise ProtocolError("Contexts are named by their ids.")


def _all_of(futures: list[Future[Any]]) -> Future[None]:
    """A future that is done when all of them are."""
    return _quietly(lambda: collect_all(futures).then(lambda done: None))


def _quietly(make: Callable[[], T]) -> T:
    """Calls `make()` outside of any call: its deadline must not stop the end."""
    return contextvars.Context().run(make)
