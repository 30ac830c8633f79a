"""The membership of a group that workers join and leave one by one.

A newcomer is admitted in two steps, so that no worker is called by, or told of, a
worker that it does not know:

    coordinator -> all members   coming    serve this one from now on
    all members -> coordinator   known
    coordinator -> newcomer      the answer to its request, with all members
    coordinator -> all members   came      you may call it, and speak of it

Newcomers are admitted one after the other. A worker that leaves, or is lost, is no
longer waited for.
"""

from jdist.rpc.base.worker_info import MOST_WORKERS, WorkerInfo
from jdist.rpc.group.membership import (
    LATE,
    Answers,
    Doubt,
    Member,
    Membership,
    Refusal,
    clash,
    record_of,
    refuse,
    rival_of,
    set_incarnation,
)
from jdist.rpc.wire.frame import REPLY, Frame


class ElasticMembership(Membership):
    """A worker may join at any time, under a name and a rank that are free.

    No worker is admitted before rank 0, whose process hosts the coordinator.

    Attributes:
      closing: Whether admission has ended, because rank 0 is about to leave.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.closing = False
        self._waiting: list[Member] = []
        self._entering: Member | None = None
        self._unaware: set[Member] = set()
        self._incarnations: set[int] = set()
        self._last = MOST_WORKERS

    def add(self, member: Member, world_size: int) -> Answers:
        """See `Membership.add`."""
        misfit = self.failure or self._misfit(member, world_size)
        if misfit is not None:
            return refuse([member], misfit)
        rival = rival_of(member, [*self.present(), *self._candidates()])
        if rival is not None:
            return self._doubt(member, rival, world_size)
        self._waiting.append(member)
        return self.advance()

    def advance(self) -> Answers:
        """See `Membership.advance`; admits the next newcomer."""
        answers = super().advance()
        # One newcomer at a time, and only when all members know it: as soon as it is
        # admitted, any of them may receive a call from it or a reference that names it.
        while not self._unaware:
            if self._entering is not None:
                answers += self._enter(self._entering)
            ready = [m for m in self._waiting if m.info.id == 0 or self.is_ready]
            if not ready:
                break
            answers += self._begin(ready[0])
        return answers

    def knows(self, member: Member, newcomer: int) -> Answers:
        """See `Membership.knows`."""
        if self._entering is not None and self._entering.info.incarnation == newcomer:
            self._unaware.discard(member)
        return self.advance()

    @property
    def is_ready(self) -> bool:
        """Whether rank 0 has been admitted."""
        return any(member.info.id == 0 for member in self.present())

    def not_unique(self, doubt: Doubt) -> Answers:
        """See `Membership.not_unique`: only the newcomer is refused."""
        return refuse([doubt.newcomer], clash(doubt.newcomer.info, doubt.rival.info))

    def fail(self, failure: str) -> Answers:
        """See `Membership.fail`."""
        self.failure = Refusal(failure)
        return refuse(self._dismiss(), self.failure)

    def close(self) -> list[Member]:
        """See `Membership.close`."""
        self.closing = True
        return self._dismiss()

    def expire(self, now: float) -> Answers:
        """See `Membership.expire`; the group continues without them."""
        late = [m for m in self._joining() if m.until is not None and m.until <= now]
        unaware = ", ".join(sorted(member.info.name for member in self._unaware))
        why = f"{unaware} did not say that they know of it" if unaware else "no turn"
        answers: Answers = []
        for member in late:
            member.until = None
            if member in self._waiting:
                self._waiting.remove(member)
            text = f"{member.info.name} was not let in in time: {why}."
            answers += refuse([member], Refusal(text, LATE))
        return answers

    def is_ending(self, info: WorkerInfo) -> bool:
        """See `Membership.is_ending`."""
        return self.closing

    def has(self, member: Member) -> bool:
        """See `Membership.has`."""
        return self._members.get(member.info.name) is member

    def present(self) -> list[Member]:
        """See `Membership.present`."""
        here = [member for member in self._members.values() if member.gone is None]
        return sorted(here, key=lambda member: member.info.id)

    def gone(self, name: str) -> str | None:
        """See `Membership.gone`: only for a lost worker; others may still join."""
        member = self._members.get(name)
        return None if member is None else member.gone

    # --- inside ---

    def _dismiss(self) -> list[Member]:
        joining = self._joining()
        self._waiting.clear()
        self._doubts.clear()
        return joining

    def _begin(self, member: Member) -> Answers:
        self._waiting.remove(member)
        free = self._free_incarnation(member.info.id)
        if free is None:
            text = f"This group has had {MOST_WORKERS} workers, and can have no more."
            return refuse([member], Refusal(text))
        set_incarnation(member, free)
        self._entering = member
        self._unaware = set(self.present())
        coming = Frame("group.coming", 0, {"member": record_of(member)}, None, [])
        return [(other, coming) for other in self.present()]

    def _enter(self, member: Member) -> Answers:
        self._entering = None
        meta = {"incarnation": member.info.incarnation}
        came = Frame("group.came", 0, meta, None, [])
        told: Answers = [(other, came) for other in self.present()]
        self._members[member.info.name] = member
        members = {"members": [record_of(one) for one in self.present()]}
        member.until = None
        return [(member, Frame(REPLY, member.request, members, None, [])), *told]

    def _free_incarnation(self, rank: int) -> int | None:
        """The rank if unused as an incarnation, else the highest unused number."""
        if rank not in self._incarnations:
            self._incarnations.add(rank)
            return rank
        # From above: new ranks are taken from below, so that the two meet last.
        while self._last:
            self._last -= 1
            if self._last not in self._incarnations:
                self._incarnations.add(self._last)
                return self._last
        return None

    def _forget(self, member: Member) -> bool:
        self._unaware.discard(member)
        if member in self._waiting:
            self._waiting.remove(member)
        if member is self._entering:
            self._entering, self._unaware = None, set()
            return True  # all others know of it by `group.coming`
        if not self.has(member):
            return False
        # A lost member stays until a worker of its name joins: `gone` needs its reason.
        if member.left:
            del self._members[member.info.name]
        return True

    def _candidates(self) -> list[Member]:
        entering = [] if self._entering is None else [self._entering]
        return [*self._waiting, *entering]

    def _joining(self) -> list[Member]:
        return [*self._candidates(), *(doubt.newcomer for doubt in self._doubts)]
