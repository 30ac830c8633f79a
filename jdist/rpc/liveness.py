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
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + self._interval
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            now = time.monotonic()
            self._step(now - due > self._interval)
            due = now + self._interval


def silent_for(seconds: float) -> str:
    """Why somebody counts as lost."""
    return f"no sign of life for {seconds:.1f} s (frozen, or cut off)"
