"""Termination detection: no call is under way on any worker, and none will begin.

A call may make calls on other workers after its caller has forgotten it, so no worker
can tell alone that all is done. Each counts the calls that have ever begun there, its
own and those it serves, and reports the count at a moment when none is under way. Two
rounds of reports in a row with equal counts prove termination; it is the principle of
Mattern's four-counter method. Let t be a moment after all reports of the first round
and before any of the second (one exists, because the second begins when the first is
complete). No worker began a call between its two reports, and none was under way there
at the first, so at t none was under way anywhere. A message in flight is entered by its
caller, so there was none either. From such a state only a program's own thread could
begin a call, and all that could wait here.

`wait_for_all` is what a graceful shutdown does on each worker. `Stalemate` lets the
coordinator find out whether a collective can still become complete.
"""

from collections.abc import Sequence, Set
from typing import Any

from jdist.rpc.base.deadline import Deadline
from jdist.rpc.base.errors import WorkerLost
from jdist.rpc.calls.agent import Agent
from jdist.rpc.group.barrier_round import SHUTDOWN
from jdist.rpc.group.membership import Answers, Member
from jdist.rpc.wire.frame import Frame

__all__ = ["Stalemate", "wait_for_all"]

_PAUSE = 0.5
"""Seconds until workers that were busy are asked again."""


def wait_for_all(agent: Agent, names: Sequence[str], deadline: Deadline) -> None:
    """Waits until all workers of `names`, this one among them, wait here and none runs.

    Raises:
      RpcTimeout: It took longer; the message says what is under way, or which workers
        have not come.
      WorkerLost: One of them was lost meanwhile.
    """
    group = agent.group

    def check() -> None:
        for name, reason in group.lost().items():
            if name in names:
                raise WorkerLost(name, "shutdown", reason)

    # A lost worker will not come, so it is useless to wait for this one's own calls.
    group.on_lost(lambda name, reason: agent.outstanding.wake())
    before = None
    while True:
        begun = agent.outstanding.when_empty(deadline, check)
        timeout = 0.0 if deadline.at is None else max(1e-3, deadline.remaining() or 0.0)
        counts = group.all_gather(begun, names, timeout, SHUTDOWN)
        if counts == before:
            return
        before = counts


class Stalemate:
    """Detects, for the coordinator, that collectives can never become complete.

    A worker that waits in a graceful shutdown takes part in a collective only if
    another worker calls a function there that does. So a collective that misses such
    workers may still become complete, unless every worker waits and no call is under
    way. The workers are asked for their counts in rounds, as described above.

    The coordinator locks it.

    Attributes:
      again: When to look again, because a worker was busy; None if there is no need.
    """

    def __init__(self) -> None:
        self.again: float | None = None
        self._round = 0
        self._waits: Set[Any] = frozenset()
        self._unheard: set[Member] = set()
        self._begun: dict[Member, int | None] = {}
        self._before: dict[Member, int | None] | None = None

    def look(self, members: list[Member], waits: Set[Any], now: float) -> Answers:
        """The questions to ask now.

        Args:
          members: All workers of the group.
          waits: What they all wait for; empty if there is nothing to find out.
          now: The time.
        """
        rests = self._unheard or self.again is None or now < self.again
        if waits and waits == self._waits and rests:
            return []
        self.again, self._waits, self._before = None, waits, None
        self._unheard = set()
        return self._ask(members) if waits else []

    def heard(
        self, member: Member, number: int, begun: int | None, now: float
    ) -> tuple[bool, Answers]:
        """Take in a worker's report.

        Args:
          member: The worker.
          number: Of the round of questions.
          begun: How many calls have begun there; None if one is under way.
          now: The time.

        Returns:
          Whether termination is proved, and the questions to ask next.
        """
        if number != self._round or member not in self._unheard:
            return False, []
        self._unheard.discard(member)
        self._begun[member] = begun
        if self._unheard:
            return False, []
        if None in self._begun.values():
            self.again = now + _PAUSE
            return False, []
        if self._begun == self._before:
            return True, []
        self._before = self._begun
        return False, self._ask(list(self._begun))

    def _ask(self, members: list[Member]) -> Answers:
        self._round += 1
        self._unheard, self._begun = set(members), {}
        meta = {"round": self._round}
        return [(member, Frame("group.quiet", 0, meta, None, [])) for member in members]
