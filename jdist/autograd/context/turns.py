"""Doing something while no other thread does, within the deadline of the call."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from jdist.rpc import RpcTimeout
from jdist.rpc.extension import InterruptSafeLock, current, exceeded, releasing_all

T = TypeVar("T")


def in_turn(
    turns: Sequence[InterruptSafeLock], busy: str, action: Callable[[], T]
) -> T:
    """Calls `action` while this thread has all these turns; given back in any case.

    Args:
      turns: In the order in which to take them: the same wherever several are taken.
      busy: What is said, after the deadline, where another thread has one.
      action: What to call.

    Raises:
      RpcTimeout: The deadline of the call came first.
      RuntimeError: This very thread has one: it was interrupted meanwhile.
    """
    limit = current.deadline()

    def act() -> T:
        for turn in turns:
            try:
                turn.acquire(limit.at, busy)
            except TimeoutError as error:
                raise RpcTimeout(f"{exceeded(limit)} {busy}.") from error
        return action()

    return releasing_all(turns, act)
