"""A call being executed on this worker for another one."""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from jdist.rpc.base.current import Cancellable
from jdist.rpc.base.deadline import Deadline
from jdist.rpc.base.errors import RpcTimeout
from jdist.rpc.base.future import Future, cancel, run_all
from jdist.rpc.base.interceptor import Operation
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.wire.frame import Frame


class Execution:
    """The life of one call on its callee, and what must end when it is cancelled.

    Python cannot stop a running function. What can be stopped is: a call that has not
    begun, the future of an async_execution function, and the calls that the function
    makes itself.
    """

    __slots__ = (
        "__weakref__", "_futures", "_lock", "_nested", "_pool", "_undelivered",
        "answer", "caller", "cancelled", "deadline", "operation", "since", "ticket",
    )  # fmt: skip

    answer: Future[Frame]
    """Once deferred: the answer to be sent."""

    ticket: Any
    """By which the caller may take it back; None if it will not."""

    def __init__(
        self,
        caller: WorkerInfo,
        kind: str,
        deadline: Deadline,
        ticket: Any,
        pool: ThreadPool,
    ) -> None:
        self.caller = caller
        self.ticket = ticket
        self.operation = Operation(kind)
        self.deadline = deadline
        self.since = time.monotonic()
        self.cancelled: str | None = None
        self._pool = pool
        self._lock = threading.Lock()
        self._futures: list[Future[Any]] = []
        self._nested: set[Cancellable] | None = None
        self._undelivered: Callable[[], None] | None = None

    @property
    def peer(self) -> str:
        """Name of the caller."""
        return self.caller.name

    @property
    def deferred(self) -> bool:
        """Whether it goes on without a thread, as a future."""
        return bool(self._futures)

    def defer(self, future: Future[Any]) -> None:
        """The result will be that of `future`, or made of it; then of the last one."""
        with self._lock:
            self._futures.append(future)
            reason = self.cancelled
        if reason is not None:
            _time_out(future, reason)

    @property
    def brings_references(self) -> bool:
        """Whether its answer does."""
        return self._undelivered is not None

    def bring(self, undelivered: Callable[[], None]) -> None:
        """The answer brings references; called if nobody awaits it any more."""
        with self._lock:
            self._undelivered = undelivered
            cancelled = self.cancelled
        if cancelled is not None:
            undelivered()

    def begin(self, nested: Cancellable) -> None:
        """The function began to wait for `nested`."""
        with self._lock:
            if self._nested is None:
                self._nested = set()
            self._nested.add(nested)
            reason = self.cancelled
        if reason is not None:
            nested.give_up(reason)

    def end(self, nested: Cancellable) -> None:
        """It does no longer."""
        with self._lock:
            if self._nested is not None:
                self._nested.discard(nested)

    def cancel(self, reason: str) -> None:
        """The caller has no use for the result any more.

        Does not wait: callbacks of the futures that end are users' functions, and run
        on the pool.
        """
        with self._lock:
            if self.cancelled is not None:
                return
            self.cancelled = reason
            undelivered = self._undelivered
            ends: list[Callable[[], None]]
            ends = [functools.partial(_time_out, one, reason) for one in self._futures]
            ends += [functools.partial(c.give_up, reason) for c in self._nested or ()]
        if undelivered is not None:
            ends.append(undelivered)
        if ends:
            self._pool.run(lambda: run_all(ends))


def _time_out(future: Future[Any], reason: str) -> None:
    cancel(future, RpcTimeout(reason))
