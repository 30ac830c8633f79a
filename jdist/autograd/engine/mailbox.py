"""Steps that run one after another, on whichever thread brings one.

Nobody waits for a turn: who finds the mailbox busy leaves the step there, and the
thread that is busy takes it next. So what the steps touch needs no other lock.
"""

import contextvars
from collections import deque
from collections.abc import Callable

from jdist.rpc.extension import InterruptSafeLock, Scope, current


class StepQueue:
    """The steps of one part of a pass.

    Args:
      scope: As which worker they run, and under which deadline.

    Example:
      >>> mailbox, done = Mailbox(None), []
      >>> mailbox.put(lambda: (mailbox.put(lambda: done.append(2)), done.append(1)))
      True
      >>> done
      [1, 2]

    Attributes:
      waiting: The steps besides the one that runs.
    """

    def __init__(self, scope: Scope | None) -> None:
        self.waiting: deque[Callable[[], object]] = deque()
        self._turn = InterruptSafeLock()
        self._context = contextvars.Context()
        self._context.run(current.scope.set, scope)

    def put(self, step: Callable[[], object]) -> bool:
        """Runs a step now, or leaves it to the thread that is busy with another.

        Args:
          step: Must not raise an `Exception`. What interrupts the thread while it runs,
            such as Ctrl-C, goes on to the caller; the steps that are left run with the
            next one.

        Returns:
          Whether this thread ran it.
        """
        self.waiting.append(step)
        ran = False
        # Again, if one was left just before the turn ended.
        while self.waiting:
            if not self._turn.releasing(self._work_if_free):
                break
            ran = True
        return ran

    def _work_if_free(self) -> bool:
        if not self._turn.try_acquire():
            return False
        self._context.run(self._work)
        return True

    def _work(self) -> None:
        while self.waiting:
            self.waiting.popleft()()
