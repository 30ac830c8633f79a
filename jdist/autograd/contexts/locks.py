"""Locks that are held within the deadline of the call that is being executed."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from jdist.rpc import RpcTimeout
from jdist.rpc.extension import InterruptSafeLock, current, exceeded, releasing_all

T = TypeVar("T")


def holding(
    locks: Sequence[InterruptSafeLock], busy: str, action: Callable[[], T]
) -> T:
    """Calls `action` while this thread holds all these locks; released in any case.

    Args:
      locks: In the order in which to acquire them: the same wherever several are.
      busy: Ends the error's text if another thread holds one until the deadline.
      action: What to call.

    Raises:
      RpcTimeout: The deadline of the call came first.
      RuntimeError: This very thread holds one: it was interrupted meanwhile.
    """
    # The caller's deadline: a lock without one could hold up a worker for good.
    limit = current.deadline()

    def act() -> T:
        for lock in locks:
            try:
                lock.acquire(limit.at, busy)
            except TimeoutError as error:
                raise RpcTimeout(f"{exceeded(limit)} {busy}.") from error
        return action()

    return releasing_all(locks, act)
