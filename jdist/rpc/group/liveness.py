"""Signs of life, for peers whose connection stays open although they are stuck.

A process that dies closes its connections, which is noticed at once. One that is
stopped, or cut off by the network, does not: it is only silent. So every worker says at
a steady pace that it lives, and one that is silent for long counts as lost.
"""

import threading
import time
from collections.abc import Callable

from jdist.rpc.base.options import RpcOptions
from jdist.rpc.base.timer import Timer

__all__ = ["MEMORY", "Pace", "held_up_for", "silent_for"]

MEMORY = 10
"""A stop of this process explains losses for this many heartbeat timeouts."""


class Pace:
    """Calls a function at a steady pace, on threads of the timer's pool.

    Args:
      timer: Of the worker, or of the coordinator.
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
        self._held_up = (0.0, 0.0)  # How long, and when that ended.
        self._stepping = threading.RLock()  # a step may end the pace itself
        self._ended = False
        timer.later(interval, self._run)

    def close(self) -> None:
        """Waits for a step that is being made; there will be none after it."""
        with self._stepping:
            self._ended = True

    def held_up(self) -> float:
        """The longest time that this process was held up of late, in seconds."""
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
    """The reason for the loss of a worker that is silent."""
    return f"no sign of life for {seconds:.1f} s (frozen, or cut off)"


def held_up_for(pace: Pace, options: RpcOptions) -> str | None:
    """Why the others have taken this process's worker for lost; None if they have not.

    They have once it was silent for as long as they wait.
    """
    seconds = pace.held_up()
    if seconds + options.heartbeat_interval <= options.heartbeat_timeout:
        return None
    return (
        f"this worker itself gave no sign of life for {seconds:.1f} s (frozen, or "
        "stopped), and the others have taken it for lost"
    )
