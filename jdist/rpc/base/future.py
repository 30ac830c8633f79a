"""Futures, and waiting for one or several of them.

A future is one lock until a thread waits for it. `complete` returns the callbacks
instead of running them, so that a thread with other duties can pass those on first.
"""

import contextvars
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from jdist._errors import check_function, check_type, listed
from jdist.rpc.base import current
from jdist.rpc.base.current import exceeded, resolve
from jdist.rpc.base.errors import RpcError, RpcTimeout

T = TypeVar("T")
U = TypeVar("U")
_log = logging.getLogger("jdist.rpc")


class Future(Generic[T]):
    """The result of an asynchronous call, or one that you complete yourself.

    Callbacks run in the context in which they were added: as the same worker and under
    the same deadline. Their order is unspecified. A future cannot be sent to another
    worker; send its value.

    Source: `torch.futures.Future`. Unlike there, an exception keeps its type through
    `then`, and `wait` may have a timeout.

    Example:
      >>> future = Future()
      >>> child = future.then(lambda done: done.value() + 1)
      >>> future.set_result(2)
      >>> child.wait()
      3
    """

    __slots__ = (
        "__weakref__", "_callbacks", "_cancelled", "_done", "_error", "_home",
        "_lock", "_traceback", "_value", "_waiters",
    )  # fmt: skip

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._cancelled = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._traceback: Any = None
        self._waiters: list[Callable[[], object]] = []
        self._callbacks: list[Callable[[], None]] = []
        # Callbacks that are added outside of any call still run as this worker.
        self._home = current.scope.get()

    def done(self) -> bool:
        """Whether a value or an exception is there."""
        return self._done

    def wait(self, timeout: float = -1) -> T:
        """Waits for the future and returns its value.

        Args:
          timeout: Seconds, 0 for no limit. By default that of the call that this is
            the result of; for a future of your own no limit. In a function called by
            rpc, that call's deadline ends the wait in any case.

        Raises:
          RpcTimeout: It took longer. The future itself is not affected.
          Exception: Whatever the future was completed with.
        """
        if not self._done:
            # No default of its own: the call that it is the result of has a timeout.
            limit = resolve(timeout, 0, current.deadline())
            if not await_done(self, limit.at):
                raise RpcTimeout(f"{exceeded(limit)} while waiting for a future.")
        return self.value()

    def value(self) -> T:
        """The value of a completed future.

        Raises:
          RpcError: It is not completed.
          Exception: It was completed with this exception.
        """
        if self._error is not None:
            # The traceback of where it arose, not of every place that asked.
            raise self._error.with_traceback(self._traceback)
        if not self._done:
            raise RpcError("The future has no value yet. Call wait() first.")
        return self._value  # type: ignore[return-value]

    def then(self, callback: "Callable[[Future[T]], U]") -> "Future[U]":
        """Returns a future of `callback(self)`, called once this one is completed.

        Raises:
          TypeError: `callback` cannot be called.
        """
        _check_callback("Future.then(callback)", callback)
        child: Future[U] = Future()

        def run() -> None:
            try:
                result = callback(self)
            except BaseException as error:
                child.set_exception(error)
                if _is_interrupt(error):
                    raise
            else:
                child.set_result(result)

        self._when_done(run)
        return child

    def add_done_callback(self, callback: "Callable[[Future[T]], object]") -> None:
        """Calls `callback(self)` on completion; at once if already completed.

        An exception of the callback is logged and not raised. `then` keeps it.

        Raises:
          TypeError: `callback` cannot be called.
        """
        _check_callback("Future.add_done_callback(callback)", callback)

        def run() -> None:
            try:
                callback(self)
            except BaseException as error:
                if _is_interrupt(error):
                    raise
                _log.exception("A callback of a future raised an exception.")

        self._when_done(run)

    def set_result(self, value: T) -> None:
        """Completes the future with a value and runs the callbacks.

        Raises:
          RpcError: It is completed already.
        """
        self._set(value, None)

    def set_exception(self, error: BaseException) -> None:
        """Completes the future with an exception, which `wait` will raise.

        Raises:
          TypeError: `error` is not an exception.
          RpcError: The future is completed already.
        """
        check_type(
            "Future.set_exception(error)", error, BaseException, "must be an exception"
        )
        self._set(None, error)

    def _set(self, value: T | None, error: BaseException | None) -> None:
        callbacks = complete(self, value, error)
        if callbacks is None:
            if self._cancelled:
                return  # its call was cancelled: the result has no reader
            raise RpcError("Future can only be marked completed once.")
        run_all(callbacks)

    def _when_done(self, run: Callable[[], None]) -> None:
        # The context of this call, not of the completing thread: the callback acts as
        # the same worker and under the same deadline as the code that added it.
        context = contextvars.copy_context()
        if self._home is not None and current.scope.get() is None:
            context.run(current.scope.set, self._home)
        call_when_done(self, lambda: context.run(run))


# Functions, not methods: `dir(future)` shows users what is theirs.
def complete(
    future: Future[T],
    value: T | None,
    error: BaseException | None,
    cancelled: bool = False,
) -> list[Callable[[], None]] | None:
    """Completes `future` and returns the callbacks that the caller must run.

    Returns None if it was completed before. Waiting threads are woken at once. After
    `cancelled`, later results are dropped silently.
    """
    with future._lock:
        if future._done:
            return None
        future._cancelled = cancelled
        future._value = value
        if error is not None:
            future._error, future._traceback = error, error.__traceback__
        future._done = True
        waiters, future._waiters = future._waiters, []
        callbacks, future._callbacks = future._callbacks, []
    # Waiting threads first: callbacks may take their time.
    for wake in waiters:
        wake()
    return callbacks


def error_of(future: Future[Any]) -> BaseException | None:
    """Returns the exception of a completed future, or None."""
    # Without raising it: each raise adds the frames that it passes through, and keeps
    # their variables alive.
    return future._error


def cancel(future: Future[Any], error: BaseException) -> None:
    """Completes an uncompleted `future` with `error`; a later result is dropped."""
    run_all(complete(future, None, error, cancelled=True) or [])


def run_all(callbacks: list[Callable[[], None]]) -> None:
    """Runs all callbacks, also if some of them raise."""
    for number, callback in enumerate(callbacks, 1):
        try:
            callback()
        except BaseException:
            run_all(callbacks[number:])
            raise


def watch(future: Future[Any], wake: Callable[[], object]) -> bool:
    """Registers `wake` for completion; returns True, uncalled, if already completed.

    Unlike a callback, `wake` runs on whichever thread completes the future, in no
    particular context: it must not block.
    """
    with future._lock:
        if future._done:
            return True
        future._waiters.append(wake)
    return False


def unwatch(future: Future[Any], wake: Callable[[], object]) -> None:
    """Cancels a `watch`."""
    with future._lock:
        if wake in future._waiters:
            future._waiters.remove(wake)


def await_done(future: Future[Any], until: float | None) -> bool:
    """Blocks until completed; returns False if `until` passes first."""
    current.check_may_wait()
    # Not an event: those are written in Python, and an interrupt breaks them.
    waiter = threading.Lock()
    waiter.acquire()
    if watch(future, waiter.release):
        return True
    seconds = -1.0 if until is None else max(0.0, until - time.monotonic())
    if waiter.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
        return True
    # It may have been completed between the timeout and this.
    unwatch(future, waiter.release)
    return future._done


def call_when_done(future: Future[Any], callback: Callable[[], None]) -> None:
    """Runs `callback` on completion, outside of any context; it may block."""
    with future._lock:
        if not future._done:
            future._callbacks.append(callback)
            return
    callback()


def wait_all(futures: Iterable[Future[T]], timeout: float = -1) -> list[T]:
    """Waits for all futures and returns their values in order.

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
    over: Future[None] = Future()  # all of them are complete, or one has failed
    numbers = itertools.count(1)  # its `next` is one step: no lock is needed

    def one_done(future: Future[T]) -> None:
        # To wake this thread for each of them would cost more than the answers.
        if next(numbers) == len(waited) or error_of(future) is not None:
            complete(over, None, None)

    for future in waited:
        if watch(future, ring := functools.partial(one_done, future)):
            ring()
    if waited and not (over.done() or await_done(over, limit.at)):
        left = sum(not future.done() for future in waited)
        remaining = f"{left} of {len(waited)} futures are not complete"
        raise RpcTimeout(f"{exceeded(limit)} in wait_all: {remaining}.")
    for failed in [one for one in waited if error_of(one) is not None]:
        failed.value()
    return [future.value() for future in waited]


def collect_all(futures: Iterable[Future[T]]) -> Future[list[Future[T]]]:
    """Returns a future that completes once all of `futures` have.

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
    # Its `next` is one step: callbacks run on whichever threads complete the futures.
    numbers = itertools.count(1)

    def one_done() -> None:
        if next(numbers) == len(collected):
            result.set_result(list(collected))

    for future in collected:
        call_when_done(future, one_done)
    if not collected:
        result.set_result([])
    return result


def _is_interrupt(error: BaseException) -> bool:
    """Whether an error is a Ctrl-C, which must also end the program."""
    # Python raises it on the main thread alone; anywhere else a callback raised it.
    on_main = threading.current_thread() is threading.main_thread()
    return isinstance(error, KeyboardInterrupt) and on_main


def _check_callback(call: str, callback: object) -> None:
    rule = "must be a function of one future (incompatible function arguments)"
    check_function(call, callback, rule)


def _futures(call: str, futures: Iterable[Future[T]]) -> Sequence[Future[T]]:
    return listed(call, futures, Future, "must be futures only")
