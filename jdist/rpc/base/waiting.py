"""Waiting for several futures."""

import contextlib
import contextvars
import functools
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from jdist._errors import requirement
from jdist.rpc.base import current
from jdist.rpc.base.deadline import exceeded, resolve
from jdist.rpc.base.errors import RpcTimeout
from jdist.rpc.base.future import Future, call_when_done, watch

T = TypeVar("T")

_collected: contextvars.ContextVar[list[Future[Any]] | None] = contextvars.ContextVar(
    "jdist.rpc.collected", default=None
)


def wait_all(futures: Iterable[Future[T]], timeout: float = -1) -> list[T]:
    """The values of all futures, in order.

    Args:
      futures: The futures to wait for.
      timeout: Seconds for all of them together; by default each has its own.

    Raises:
      RpcTimeout: It took longer.
      Exception: That of the first future that failed, without waiting for the others.

    Source: `torch.futures.wait_all`.

    Example:
      >>> one, two = Future(), Future()
      >>> one.set_result(1)
      >>> two.set_result(2)
      >>> wait_all([one, two])
      [1, 2]
    """
    waited = _futures("wait_all(futures)", futures)
    limit = resolve(timeout, 0, current.deadline())
    # Not a semaphore: an interrupt of this wait would leave its inner lock taken, and
    # block the thread that completes a future (see `turn`).
    progress: queue.SimpleQueue[None] = queue.SimpleQueue()
    for future in waited:
        if watch(future, ring := functools.partial(progress.put, None)):
            ring()
    left = set(range(len(waited)))
    while left:
        try:
            progress.get(timeout=limit.remaining())
        except queue.Empty:
            remaining = f"{len(left)} of {len(waited)} futures are not complete"
            raise RpcTimeout(f"{exceeded(limit)} in wait_all: {remaining}.") from None
        for index in [i for i in left if waited[i].done()]:
            waited[index].value()
            left.remove(index)
    return [future.value() for future in waited]


def collect_all(futures: Iterable[Future[T]]) -> Future[list[Future[T]]]:
    """A future of all of `futures`, completed once each has a value or an exception.

    Source: `torch.futures.collect_all`.

    Example:
      >>> one = Future()
      >>> both = collect_all([one, one])
      >>> one.set_result(1)
      >>> [future.value() for future in both.wait()]
      [1, 1]
    """
    collected = _futures("collect_all(futures)", futures)
    result: Future[list[Future[T]]] = Future()
    left = len(collected)
    lock = threading.Lock()

    def one_done() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            result.set_result(list(collected))

    for future in collected:
        call_when_done(future, one_done)
    if not collected:
        result.set_result([])
    return result


@contextlib.contextmanager
def wait_all_calls() -> Iterator[list[Future[Any]]]:
    """Waits, at the end of the block, for every `rpc_async` that it made.

    Yields:
      The list of their futures, which grows with each call.

    Raises:
      Exception: That of the first call that failed.

    Source: `torch.distributed.rpc._wait_all`.

    Example:
      >>> from jdist import rpc
      >>> with rpc.local_cluster(["a", "b"]), rpc.wait_all_calls() as futures:
      ...     _ = rpc.rpc_async("b", divmod, args=(7, 2))
      >>> futures[0].value()
      (3, 1)
    """
    futures: list[Future[Any]] = []
    token = _collected.set(futures)
    try:
        yield futures
    finally:
        _collected.reset(token)
    wait_all(futures)


def collect(future: Future[Any]) -> None:
    """Adds `future` to the innermost `wait_all_calls` of this thread, if any."""
    futures = _collected.get()
    if futures is not None:
        futures.append(future)


def _futures(call: str, futures: Iterable[Future[T]]) -> Sequence[Future[T]]:
    listed = list(futures)
    for future in listed:
        if not isinstance(future, Future):
            raise TypeError(requirement(call, "must be futures only", future))
    return listed
