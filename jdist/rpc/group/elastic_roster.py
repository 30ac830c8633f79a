"""The members of a group that workers join and leave one by one.

A newcomer is let in in two steps, so that nobody is ever called by, or told of, a
worker that he does not know:

    coordinator -> all members   coming    serve this one from now on
    all members -> coordinator   known
    coordinator -> newcomer      the answer to its request, with all members
    coordinator -> all members   came      you may call it, and speak of it

One is let in after the other. Whoever leaves, or is lost, ends its part of this.
"""

from jdist.rpc.base.worker_info import MOST_WORKERS, WorkerInfo
from jdist.rpc.group.member import Member
from jdist.rpc.group.roster import (
    Answers,
    Doubt,
    Roster,
    clash,
    number,
    record_row,
    refuse,
    rival_of,
)
from jdist.rpc.wire.frame import REPLY, Frame


class ElasticRoster(Roster):
    """Anybody may join at any time, under a name and rank that nobody has just then.

    Nobody is let in before rank 0, whose process the coordinator is in.

    Attributes:
      closing: Whether nobody is let in any more, because rank 0 is about to leave.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.closing = False
        self._waiting: list[Member] = []
        self._entering: Member | None = None
        self._unaware: set[Member] = set()
        self._numbers: set[int] = set()
        self._last = MOST_WORKERS

    def add(self, member: Member, world_size: int) -> Answers:
        """See `Roster.add`."""
        misfit = self.failure or self._misfit(member, world_size)
        if misfit is not None:
            return refuse([member], misfit)
        rival = rival_of(member, [*self.present(), *self._candidates()])
        if rival is not None:
            return self._doubt(member, rival, world_size)
        self._waiting.append(member)
        return self.advance()

    def advance(self) -> Answers:
        """See `Roster.advance`; lets in the next one."""
        answers = super().advance()
        while not self._unaware:
            if self._entering is not None:
                answers += self._enter(self._entering)
            ready = [m for m in self._waiting if m.info.id == 0 or self.is_ready]
            if not ready:
                break
            answers += self._begin(ready[0])
        return answers

    def knows(self, member: Member, newcomer: int) -> Answers:
        """See `Roster.knows`."""
        if self._entering is not None and self._entering.info.incarnation == newcomer:
            self._unaware.discard(member)
        return self.advance()

    @property
    def is_ready(self) -> bool:
        """Whether rank 0 has been let in."""
        return any(member.info.id == 0 for member in self.present())

    def not_unique(self, doubt: Doubt) -> Answers:
        """See `Roster.not_unique`: the newcomer is refused, and the group goes on."""
        return refuse([doubt.newcomer], clash(doubt.newcomer.info, doubt.rival.info))

    def fail(self, failure: str) -> Answers:
        """See `Roster.fail`."""
        self.failure = failure
        joining = self._joining()
        self._waiting.clear()
        self._doubts.clear()
        return refuse(joining, failure)

    def close(self) -> list[Member]:
        """See `Roster.close`."""
        self.closing = True
        joining = self._joining()
        self._waiting.clear()
        self._doubts.clear()
        return joining

    def expire(self, now: float) -> Answers:
        """See `Roster.expire`; the group goes on without them."""
        late = [m for m in self._joining() if m.until is not None and m.until <= now]
        unaware = ", ".join(sorted(member.info.name for member in self._unaware))
        why = f"{unaware} did not say that they know of it" if unaware else "no turn"
        answers: Answers = []
        for member in late:
            member.until = None
            if member in self._waiting:
                self._waiting.remove(member)
            text = f"{member.info.name} was not let in in time: {why}."
            answers += refuse([member], text, timeout=True)
        return answers

    def is_ending(self, info: WorkerInfo) -> bool:
        """See `Roster.is_ending`."""
        return self.closing

    def has(self, member: Member) -> bool:
        """See `Roster.has`."""
        return self._members.get(member.info.name) is member

    def present(self) -> list[Member]:
        """See `Roster.present`."""
        here = [member for member in self._members.values() if member.gone is None]
        return sorted(here, key=lambda member: member.info.id)

    def gone(self, name: str) -> str | None:
        """See `Roster.gone`: it was lost. Others come, or come back, perhaps."""
        member = self._members.get(name)
        return None if member is None else member.gone

    # --- inside ---

    def _begin(self, member: Member) -> Answers:
        self._waiting.remove(member)
        free = self._free_number(member.info.id)
        if free is None:
            text = f"This group has had {MOST_WORKERS} workers, and can have no more."
            return refuse([member], text)
        number(member, free)
        self._entering = member
        self._unaware = set(self.present())
        coming = Frame("group.coming", 0, {"member": record_row(member)}, None, [])
        return [(other, coming) for other in self.present()]

    def _enter(self, member: Member) -> Answers:
        self._entering = None
        came = Frame("group.came", 0, {"number": member.info.incarnation}, None, [])
        told: Answers = [(other, came) for other in self.present()]
        self._members[member.info.name] = member
        meta = {"members": [record_row(one) for one in self.present()]}
        member.until = None
        return [(member, Frame(REPLY, member.number, meta, None, [])), *told]

    def _free_number(self, rank: int) -> int | None:
        """The rank, or if that was somebody's, the highest that was nobody's."""
        if rank not in self._numbers:
            self._numbers.add(rank)
            return rank
        while self._last:
            self._last -= 1
            if self._last not in self._numbers:
                self._numbers.add(self._last)
                return self._last
        return None

    def _forget(self, member: Member) -> bool:
        self._unaware.discard(member)
        if member in self._waiting:
            self._waiting.remove(member)
        if member is self._entering:
            self._entering, self._unaware = None, set()
            return True  # All others were told of it.
        if not self.has(member):
            return False
        if member.left:
            del self._members[member.info.name]
        return True

    def _candidates(self) -> list[Member]:
        entering = [] if self._entering is None else [self._entering]
        return [*self._waiting, *entering]

    def _joining(self) -> list[Member]:
        return [*self._candidates(), *(doubt.newcomer for doubt in self._doubts)]
