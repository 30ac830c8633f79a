"""Signs of life, for peers whose connection stays open although they are stuck.

A process that dies closes its connections, which is noticed at once. One that is
stopped, or cut off by the network, is only silent. So every worker sends a heartbeat at
a steady pace, and one that is silent for too long counts as lost.
"""

import threading
import time
from collections.abc import Callable

from jdist.rpc.base.options import RpcOptions
from jdist.rpc.base.timer import Timer

MEMORY = 10
"""Number of heartbeat timeouts for which a stop of this process explains losses."""


class Pace:
    """Calls a function at a steady pace, on threads of the timer's pool.

    Args:
      timer: The timer of the worker, or of the coordinator.
      interval: Seconds.
      step: Called as `step(now, held_up)`. When this process was itself held up
        (stopped, swapped out), silence of others proves nothing: they may have spoken
        meanwhile. So silence is to be measured until `now`, the moment at which it was
        not: it may be stopped in the midst of the step.
      memory: Seconds for which it is remembered that this process was held up: as long
        as a loss may be noticed that is its consequence.
    """

    def __init__(
        self,
        timer: Timer,
        interval: float,
        step: Callable[[float, bool], None],
        memory: float,
    ) -> None:
        self._timer = timer
        self._interval = interval
        self._memory = memory
        self._step = step
        self._due = time.monotonic() + interval
        self._held_up = (0.0, 0.0)  # seconds, and the moment at which that ended
        self._stepping = threading.RLock()  # a step may end the pace itself
        self._ended = False
        timer.later(interval, self._run)

    def close(self) -> None:
        """Ends the pace, after waiting for a step that is running."""
        with self._stepping:
            self._ended = True

    def held_up(self) -> float:
        """The longest recent stop of this process, in seconds."""
        now = time.monotonic()
        late = now - self._due  # read first: `_run` notes it, then moves `_due`
        return max(late, self._remembered(now))

    def _remembered(self, now: float) -> float:
        seconds, ended = self._held_up
        return seconds if now - ended < self._memory else 0.0

    def _run(self) -> None:
        with self._stepping:
            if self._ended:
                return
            now = time.monotonic()
            # Before the step, which may close connections: what follows from that asks
            # `held_up` for the cause.
            self._note(now)
            try:
                self._step(now, now - self._due > self._interval)
            finally:
                # It may have been stopped in the step, before the others were told.
                self._note(time.monotonic())
                self._due = now + self._interval
                self._timer.later(self._due - time.monotonic(), self._run)

    def _note(self, now: float) -> None:
        if now - self._due > self._remembered(now):
            self._held_up = (now - self._due, now)


def silent_for(seconds: float) -> str:
    """Return the reason given for the loss of a silent worker."""
    return f"no sign of life for {seconds:.1f} s (frozen, or cut off)"


def held_up_for(pace: Pace, options: RpcOptions) -> str | None:
    """Return why the others consider this worker lost; None if they do not."""
    seconds = pace.held_up()
    # A heartbeat may have been up to an interval old when the stop began.
    if seconds + options.heartbeat_interval <= options.heartbeat_timeout:
        return None
    return (
        f"this worker itself gave no sign of life for {seconds:.1f} s (frozen, or "
        "stopped), and the others have taken it for lost"
    )
