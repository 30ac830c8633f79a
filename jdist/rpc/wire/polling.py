"""Adaptive polling: a thread spins for a fraction of a millisecond before it sleeps.

To wake a sleeping thread costs more than the rest of a small call: on a virtual machine
20 to 40 us until the processor has left its idle state, and all that follows runs with
cold caches. So a thread that waits for a message on a busy connection first polls for
it. That must cost next to nothing where it does not pay:

- An idle or slow connection is not polled. Each time that polling was in vain, twice as
  many prompt messages must come until it is tried again (exponential backoff). The same
  holds where the peer needs this very core, or where processes compete for cores: a
  thread that polls there loses its core, and that counts as in vain.
- One thread of a process polls at a time; the others sleep. After each look it yields
  its core: in a process with a single core, another thread may be about to do what the
  message depends on.
"""

import os
import time
from collections.abc import Callable

from jdist.rpc.base.interrupt_safe_lock import InterruptSafeLock

__all__ = ["Polling"]

_PROMPT = 2
"""A message for which a thread slept counts as prompt up to this multiple of the limit:
it and its peer would have been faster without sleeping."""

_MOST_DOUBT = 12

_turn = InterruptSafeLock()

_give_way = getattr(os, "sched_yield", lambda: None)  # Windows has none.


class Polling:
    """Whether to poll one connection; used by one thread at a time.

    Args:
      seconds: How long to look for a message before sleeping.
    """

    __slots__ = ("_doubt", "_needed", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._doubt = 0
        self._needed = 1  # Prompt messages until it is tried.

    @property
    def worthwhile(self) -> bool:
        """Whether messages have come so soon of late that looking for one pays."""
        return self._needed == 0

    def slept(self, seconds: float) -> None:
        """A message came after this time, and no thread had polled for it."""
        if seconds > _PROMPT * self._seconds:
            self._needed = 1 << self._doubt
        elif self._needed:
            self._needed -= 1

    def poll(self, look: Callable[[], int | None]) -> int | None:
        """Calls `look` until it returns a value; returns that, or None after too long.

        None also while another thread of this process is polling.
        """
        return _turn.releasing(lambda: self._poll(look))

    def _poll(self, look: Callable[[], int | None]) -> int | None:
        if not _turn.try_acquire():
            return None
        now = time.monotonic()
        until = now + self._seconds
        found = None
        while found is None and now < until:
            found = look()
            if found is None:
                _give_way()
            now = time.monotonic()
        if now < until:
            self._doubt = max(0, self._doubt - 1)
        else:
            self._doubt = min(self._doubt + 1, _MOST_DOUBT)
            self._needed = 1 << self._doubt
        return found
