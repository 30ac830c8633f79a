"""Signs of life, for peers whose connection stays open although they are stuck.

A process that dies closes its connections, which is noticed at once. One that is
stopped, or cut off by the network, does not: it is only silent. So every worker says at
a steady pace that it lives, and who is silent for long counts as lost.
"""

import threading
import time
from collections.abc import Callable


class Pace:
    """A thread that does something at a steady pace.

    Args:
      name: What the thread is called.
      interval: Seconds.
      step: Called as `step(held_up)`. When this process was itself held up (stopped,
        swapped out), silence of others proves nothing: they may have spoken meanwhile.
    """

    def __init__(
        self, name: str, interval: float, step: Callable[[bool], None]
    ) -> None:
        self._interval = interval
        self._step = step
        self._due = time.monotonic() + interval
        self._longest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def held_up(self) -> float:
        """The longest time that this process was held up so far, in seconds."""
        return max(self._longest, time.monotonic() - self._due)

    def _run(self) -> None:
        while not self._ended.wait(max(0.0, self._due - time.monotonic())):
            now = time.monotonic()
            self._longest = max(self._longest, now - self._due)
            self._step(now - self._due > self._interval)
            self._due = now + self._interval


def silent_for(seconds: float) -> str:
    """Why somebody counts as lost."""
    return f"no sign of life for {seconds:.1f} s (frozen, or cut off)"
