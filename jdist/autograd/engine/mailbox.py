"""Steps that run one after another, on whichever thread brings one.

Nobody waits for a turn: who finds the mailbox busy leaves the step there, and the
thread that is busy takes it next. So what the steps touch needs no other lock.
"""

import contextvars
import threading
from collections import deque
from collections.abc import Callable

from jdist.rpc import current
from jdist.rpc.current import Scope


class Mailbox:
    """The steps of one part of a pass.

    Args:
      scope: As which worker they run, and under which deadline.

    Example:
      >>> mailbox, done = Mailbox(None), []
      >>> mailbox.put(lambda: (mailbox.put(lambda: done.append(2)), done.append(1)))
      True
      >>> done
      [1, 2]
    """

    def __init__(self, scope: Scope | None) -> None:
        self._steps: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._busy = False
        self._context = contextvars.Context()
        self._context.run(current.scope.set, scope)

    @property
    def waiting(self) -> bool:
        """Whether there are steps besides the one that runs."""
        return bool(self._steps)

    def put(self, step: Callable[[], object]) -> bool:
        """Runs a step now, or leaves it to the thread that is busy with another.

        Args:
          step: Must not raise an `Exception`. What interrupts the thread while it runs,
            such as Ctrl-C, goes on to the caller; the steps that are left run with the
            next one.

        Returns:
          Whether this thread ran it.
        """
        with self._lock:
            self._steps.append(step)
            if self._busy:
                return False
            self._busy = True
        # A copy: the thread that was busy before may not quite have left the last one.
        self._context.copy().run(self._work)
        return True

    def _work(self) -> None:
        try:
            while (step := self._next()) is not None:
                step()
        except BaseException:
            self._busy = False
            raise

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            if self._steps:
                return self._steps.popleft()
            self._busy = False
            return None
