"""A lock with a deadline that an interrupt cannot leave taken.

Python may raise KeyboardInterrupt between any two steps of the main thread: after a
lock was acquired and before the `try` whose `finally` would release it, or at the first
step of that `finally`. `with lock:` has no such gap, but no deadline either. This lock
therefore notes its owner in the step that acquires it, its release may be repeated, and
`releasing` repeats it when an interrupt kept the first one from happening.

`with` a `threading.Condition` has the gap too, and so have `threading.Event` and
`threading.Semaphore`: they are written in Python, and an interrupt leaves the lock
inside them taken. State that the main thread shares with others is therefore guarded by
`with lock:` of a plain lock, with conditions made of that lock, and awaited by locks
and queues.
"""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class InterruptSafeLock:
    """A lock that knows its owner; not reentrant."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        # It notes its owner in the step that acquires it, and is never acquired twice.
        self._lock = threading.RLock()

    @property
    def held(self) -> bool:
        """Whether this thread holds it."""
        return self._lock._is_owned()  # type: ignore[attr-defined]

    def try_acquire(self) -> bool:
        """Acquires the lock if no thread holds it, not even this; returns whether."""
        return not self.held and self._lock.acquire(blocking=False)

    def acquire(self, deadline: float | None, busy: str) -> None:
        """Acquires the lock by a moment of `time.monotonic()`; None waits for ever.

        Raises:
          TimeoutError: Another thread held it for too long. The text is `busy`.
          RuntimeError: This very thread holds it: a signal handler, or a finalizer,
            called the function that it interrupted.
        """
        lock = self._lock
        if lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(f"{busy}: this one, which was interrupted meanwhile")
        if lock.acquire(blocking=False):
            return
        if deadline is None:
            lock.acquire()
        elif not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError(busy)

    def release(self) -> None:
        """Releases the lock if this thread holds it; idempotent."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.release()

    def releasing(self, action: Callable[[], T]) -> T:
        """Calls `action`, which acquires the lock, and always releases it."""
        if self.held:
            return action()  # it is refused, and the lock is its caller's to release
        try:
            try:
                return action()
            finally:
                self.release()
        except BaseException:
            self.release()  # an interrupt may have come before the first release
            raise

    @staticmethod
    def releasing_all(
        locks: "Sequence[InterruptSafeLock]", action: Callable[[], T]
    ) -> T:
        """Calls `action`, which acquires several locks, and always releases them."""
        # A lock that this thread held before is its caller's to release.
        for lock in locks:
            action = functools.partial(lock.releasing, action)
        return action()
