"""A lock with a deadline that an interrupt cannot leave taken.

Python may raise KeyboardInterrupt between any two steps of the main thread: after a
lock was acquired and before the `try` whose `finally` would release it, or at the first
step of that `finally`. `with lock:` has no such gap, but no deadline either. So here
the lock notes its owner as it is acquired, giving it back may be repeated, and `hold`
does so when an interrupt kept the first time from happening.

`with` a `threading.Condition` has the gap too, and so have `threading.Event` and
`threading.Semaphore`: they are written in Python, and an interrupt leaves the lock
inside them taken. So what the main thread shares with others is guarded by `with lock:`
of a plain lock, with conditions made of that lock, and awaited by locks and queues.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class InterruptSafeLock:
    """Lets one thread at a time do something, and knows which one."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        # Notes its owner in one step with being acquired. It is never acquired twice.
        self._lock = threading.RLock()

    @property
    def mine(self) -> bool:
        """Whether this thread has it."""
        return self._lock._is_owned()  # type: ignore[attr-defined]

    def try_take(self) -> bool:
        """Takes it if no thread has it, this one included; whether it did."""
        return not self.mine and self._lock.acquire(blocking=False)

    def take(self, deadline: float | None, busy: str) -> None:
        """Waits for it until a moment of `time.monotonic()`; None waits for ever.

        Raises:
          TimeoutError: Another thread had it for too long. The text is `busy`.
          RuntimeError: This very thread has it: a signal handler, or a finalizer,
            called the function that it interrupted.
        """
        if self.mine:
            raise RuntimeError(f"{busy}: this one, which was interrupted meanwhile")
        if self._lock.acquire(blocking=False):
            return
        if deadline is None:
            self._lock.acquire()
        elif not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError(busy)

    def give(self) -> None:
        """Gives it back if this thread has it; any number of times."""
        if self.mine:
            self._lock.release()

    def hold(self, action: Callable[[], T]) -> T:
        """Calls `action`, which takes the turn, and gives it back in any case."""
        if self.mine:
            return action()  # it is refused, and the turn is its caller's to give back
        try:
            try:
                return action()
            finally:
                self.give()
        except BaseException:
            self.give()  # the interrupt may have come before the first one
            raise


def hold_all(turns: Sequence[InterruptSafeLock], action: Callable[[], T]) -> T:
    """As `InterruptSafeLock.hold`, of an action that takes several turns, each once."""
    others = [turn for turn in turns if not turn.mine]  # those are their caller's

    def give() -> None:
        for turn in others:
            turn.give()

    try:
        try:
            return action()
        finally:
            give()
    except BaseException:
        give()  # as above
        raise
