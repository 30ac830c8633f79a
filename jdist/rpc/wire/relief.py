"""Who reads a channel, and how it is never left unread for long.

To hand over to another thread costs more than most calls. So a thread that has read
something does itself what follows, and then reads on; and a thread that waits for an
answer reads it itself. Meanwhile nobody reads, which is right as long as it is short: a
call that turns out to take longer must not delay the next ones. Therefore all readings
that were left are looked at every millisecond, and one that was left before the last
look gets a thread of the pool.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from jdist.rpc.base.timer import Alarm

PERIOD = 0.001
"""Seconds between two looks; a reading is left alone for one to two of them."""

SHORTLY = 2
"""Looks until a reading that may have something to read is relieved."""


class Relief:
    """Looks after the readings that were left, for one worker.

    Args:
      name: What its thread is called; it starts when the first reading is left.
    """

    def __init__(self, name: str) -> None:
        self._left: dict[Reading, int] = {}
        self._alarm = Alarm(name, self._look)

    def expect(self, reading: "Reading", looks: int) -> None:
        """Has the reading relieved at so many looks from now, unless left anew."""
        self._left[reading] = looks
        self._alarm.set(time.monotonic() + PERIOD)

    def close(self) -> None:
        """Ends the thread; to be called when the channels are closed, which is read."""
        self._alarm.close()
        for reading in list(self._left):
            reading.relieve()

    def _look(self, now: float) -> float | None:
        for reading, looks in list(self._left.items()):
            if looks > 1:
                self._left[reading] = looks - 1
                continue
            self._left.pop(reading, None)
            reading.relieve()
        return now + PERIOD if self._left else None


class Reading:
    """The reading of one channel: one thread has it at a time, or none for a moment.

    Whoever makes it has it.

    Args:
      relief: Looks after it while nobody has it.
      start: Has another thread read, which then has it; `hand_over` calls it.
    """

    __slots__ = ("_had", "_relief", "_start")

    def __init__(self, relief: Relief, start: Callable[..., None]) -> None:
        self._relief = relief
        self._start = start
        self._had = threading.Lock()
        self._had.acquire()

    def take(self) -> bool:
        """Whether this thread has it from now on, because nobody had it."""
        return self._had.acquire(blocking=False)

    @property
    def free(self) -> bool:
        """Whether nobody has it."""
        return not self._had.locked()

    def leave(self, looks: int = SHORTLY) -> None:
        """This thread has it no longer; after so many looks another one will."""
        self._had.release()
        self._relief.expect(self, looks)

    def hand_over(self, *told: Any) -> None:
        """Has another thread read, calling `start(*told)`.

        Raises:
          RuntimeError: There is no thread to be had now; it is tried again later.
        """
        try:
            self._start(*told)
        except BaseException:
            self.leave()
            raise

    def relieve(self) -> None:
        """Has another thread read, if nobody does."""
        if self.take():
            self.hand_over()
