"""Termination detection for collectives that can never be complete.

A worker that waits in a graceful shutdown takes part in a collective only if another
worker calls a function there that does. So a collective that misses such workers may
still become complete, unless every worker waits and no call is under way.

Each worker is asked whether its ledger is empty, and how many calls have ever begun
there. The same answers in two rounds in a row prove that there was a moment, between
the rounds, at which all ledgers were empty (see `termination`). All programs wait, so
no call has begun since, and none will.
"""

from collections.abc import Set
from typing import Any

from jdist.rpc.group.member import Member
from jdist.rpc.group.roster import Answers
from jdist.rpc.wire.frame import Frame

_PAUSE = 0.5
"""Seconds until workers that were busy are asked again."""


class Stalemate:
    """The questions of one coordinator, which locks it.

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
        """What to ask now.

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
        """The answer of a worker: whether nothing will ever happen, and what to ask.

        Args:
          member: The worker.
          number: Of the round of questions.
          begun: How many calls have begun there; None if one is under way.
          now: The time.
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
