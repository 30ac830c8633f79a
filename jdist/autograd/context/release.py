"""The end of contexts, on all workers that took part.

Each worker forgets the context and tells those it exchanged messages with, who do the
same, and answers when they have. A message that does not get through is sent again, as
long as its receiver belongs to the group. Nobody has to be alive for a context to end:
the workers hold it on behalf of the one that made it, and when that one is gone, they
let it go. Whoever learned of a context from a worker that is gone now asks the one that
made it to be told of the end instead.

Nobody waits for the end of a context whose block is left, and to tell each end by
itself would cost as much as a call. So those gather for a moment, and every worker is
told of all of them in one message.
"""

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jdist.autograd.context.context import Container, Context
from jdist.rpc import (
    Future,
    ProtocolError,
    RpcError,
    RpcTimeout,
    WorkerInfo,
    WorkerLost,
    collect_all,
)
from jdist.rpc.extension import Agent, Peer, call_when_done, error_of, incarnation_of

_RELEASE = "autograd.release"
_HOLD = "autograd.hold"
_GATHERING = 0.01
"""Seconds for which the end of a context may wait for others to be told with it."""

_FIRST_PATIENCE = 1.0
_LONGEST_PATIENCE = 30.0
_FIRST_PAUSE = 0.01
_RELEASED = "It was released."
_LONGEST_PAUSE = 10.0


class _Message(NamedTuple):
    """What a worker has to be told, and what it will have answered."""

    peer: Peer | None
    kind: str
    body: Any
    answer: Future[Any]


class Releases:
    """Ends contexts, here and elsewhere, for one worker.

    Args:
      container: That of the worker.

    Attributes:
      patience: Seconds to wait for the first answer; then twice as long each time.
    """

    def __init__(self, container: Container) -> None:
        self.patience = _FIRST_PATIENCE
        self._container = container
        self._agent: Agent = container.agent
        self._lock = threading.Lock()
        self._forwarded: dict[tuple[int, int], Future[None]] = {}
        self._gathered: dict[Peer, list[int]] = {}
        self._unanswered: set[Future[Any]] = set()
        self._agent.register(_RELEASE, self._on_release)
        self._agent.register(_HOLD, self._on_hold)
        self._agent.extension_state.on_gone(self._on_gone)
        self._agent.extension_state.on_close(self._on_close)

    def release(self, context_id: int) -> Future[None]:
        """Ends a context; done when all workers that took part have ended it."""
        return self._end(context_id, _RELEASED)

    def leave(self, context_id: int) -> None:
        """Ends a context here at once, and soon on all workers that took part."""
        peers = self._end_here(context_id, _RELEASED)
        with self._lock:
            first = not self._gathered
            for peer in peers:
                self._gathered.setdefault(peer, []).append(context_id)
        if first and peers:
            self._agent.references.later(_GATHERING, self._tell_gathered)

    def _tell_gathered(self) -> None:
        with self._lock:
            gathered, self._gathered = self._gathered, {}
        for peer, contexts in gathered.items():
            self._persist(peer, _RELEASE, contexts)

    def _end(
        self, context_id: int, reason: str, told_by: int | None = None
    ) -> Future[None]:
        """Ends a context here, and at once on all workers but the one that told."""
        peers = self._end_here(context_id, reason, told_by)
        told = [self._persist(peer, _RELEASE, [context_id]) for peer in peers]
        return _all_of(told)

    def _end_here(
        self, context_id: int, reason: str, told_by: int | None = None
    ) -> list[Peer]:
        """Those that have to be told, in the order of their names."""
        known = self._container.end(context_id, reason)
        tell = known - {told_by, self._agent.info.incarnation}
        peers = [self._agent.directory.of_incarnation(number) for number in tell]
        there = [peer for peer in peers if peer is not None]
        return sorted(there, key=lambda peer: peer.info)

    # --- what others say ---

    def _on_release(self, caller: WorkerInfo, body: Any, meta: dict[str, Any]) -> Any:
        return _all_of([self._told(caller, context_id) for context_id in _ids(body)])

    def _told(self, caller: WorkerInfo, context_id: int) -> Future[None]:
        key = (incarnation_of(caller), context_id)
        with self._lock:
            # It is told again when the answer was lost: then it waits for the same.
            again = self._forwarded.get(key)
            if again is not None:
                return again
            forwarded: Future[None] = _quietly(Future)
            self._forwarded[key] = forwarded
        ended = self._end(context_id, f"{caller.name!r} released it.", key[0])

        def over() -> None:
            with self._lock:
                del self._forwarded[key]
            forwarded.set_result(None)

        call_when_done(ended, over)
        return forwarded

    def _on_hold(
        self, caller: WorkerInfo, body: Any, meta: dict[str, Any]
    ) -> list[int]:
        """Which of these contexts of ours are over; the others' end will be told."""
        over = []
        for context_id in _ids(body):
            context = self._container.find(context_id)
            if context is None:
                over.append(context_id)
                continue
            try:
                context.meet(caller)
            except RuntimeError:  # it ended this very moment
                over.append(context_id)
        return over

    # --- workers that are gone ---

    def _on_gone(self, worker: WorkerInfo, reason: str) -> None:
        why = f"{worker.name!r}, which made it, is gone: {reason}"
        orphans = []
        for context in self._container.contexts():
            if context.origin == worker.incarnation:
                self._container.end(context.id, why)
            elif worker.incarnation in context.known_incarnations():
                orphans.append(context)
        self.seek_end(orphans)

    def seek_end(self, orphans: Iterable[Context]) -> None:
        """Who would have told of the end of these is gone: asks those who made them."""
        held: dict[int, list[int]] = {}
        for context in orphans:
            held.setdefault(context.origin, []).append(context.id)
        held.pop(self._container.ids.worker, None)
        for number, contexts in held.items():
            origin = self._agent.directory.of_incarnation(number)
            asked = self._persist(origin, _HOLD, contexts)
            call_when_done(asked, functools.partial(self._let_go, asked))

    def _let_go(self, asked: Future[Any]) -> None:
        if error_of(asked) is None:
            for context_id in _ids(asked.value() or []):
                self._end(context_id, _RELEASED)

    def _on_close(self) -> None:
        for context in self._container.contexts():
            self._container.end(context.id, "RPC was shut down on this worker.")
        with self._lock:
            unanswered = list(self._unanswered)
        for future in unanswered:
            self._settle(future, None)

    # --- messages that get through ---

    def _persist(self, peer: Peer | None, kind: str, body: Any) -> Future[Any]:
        """Asks until it is answered; None when nobody is there, or this worker ends."""
        message = _Message(peer, kind, body, _quietly(Future))
        with self._lock:
            self._unanswered.add(message.answer)
        self._try(message, 0)
        return message.answer

    def _try(self, message: _Message, attempt: int) -> None:
        peer, kind, body, answer = message
        if answer.done():
            return
        if peer is None or peer.departed is not None:
            self._settle(answer, None)
            return
        patience = min(_LONGEST_PATIENCE, self.patience * 2**attempt)
        ask = functools.partial(self._agent.call_async, peer.info, kind, body, patience)
        try:
            asked = _quietly(ask)
        except RpcError:  # this worker was shut down
            self._settle(answer, None)
            return
        call_when_done(asked, lambda: self._asked(message, attempt, asked))

    def _asked(self, message: _Message, attempt: int, asked: Future[Any]) -> None:
        error = error_of(asked)
        if error is None:
            self._settle(message.answer, asked.value())
        elif self._agent.closed or not isinstance(error, WorkerLost | RpcTimeout):
            self._settle(message.answer, None)
        else:
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt)
            again = functools.partial(self._try, message, attempt + 1)
            self._agent.references.later(pause, again)

    def _settle(self, result: Future[Any], value: Any) -> None:
        with self._lock:
            if result not in self._unanswered:
                return
            self._unanswered.discard(result)
        with contextlib.suppress(RpcError):
            result.set_result(value)


def _ids(body: Any) -> list[int]:
    """Ids of contexts that another worker has named."""
    if type(body) is not list or not all(
        type(named) is int and 0 <= named < 1 << 64 for named in body
    ):
        raise ProtocolError("Contexts are named by their ids.")
    return body


def _all_of(futures: list[Future[Any]]) -> Future[None]:
    """Done when all of them are."""
    return _quietly(lambda: collect_all(futures).then(lambda done: None))


def _quietly(make: Callable[[], Any]) -> Any:
    """Calls `make()` outside of any call and its deadline: the end is told anyway."""
    return contextvars.Context().run(make)
