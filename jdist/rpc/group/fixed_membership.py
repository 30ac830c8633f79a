"""The membership of a group whose size is known from the beginning."""

from jdist.rpc.base.worker_info import WorkerInfo
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

# Strangers choose their names, and could send many.
_MOST_STRANGERS = 8


class FixedMembership(Membership):
    """All workers join together: the last one completes the group, if all live.

    Before that a worker that goes is forgotten and may try again. Afterwards no worker
    is admitted.

    Args:
      world_size: How many make it complete.

    Attributes:
      complete: Whether all have joined.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.complete = False
        self._told = 0
        self._strangers: list[str] = []
        self._unsure: set[Member] = set()
        self._asked = 0

    def add(self, member: Member, world_size: int) -> Answers:
        """See `Membership.add`."""
        rival = rival_of(member, list(self._members.values()))
        if self.failure is not None:
            return self._refuse([member], self.failure)
        misfit = self._misfit(member, world_size)
        if misfit is not None and not self.complete:
            return self._fail(misfit, [member])
        if self.complete:
            # A misfit that comes late harms no member: only it gets the error.
            return self._refuse([member], misfit or self._full(member, rival))
        if rival is not None:
            return self._doubt(member, rival, world_size)
        # No other worker will have this rank in the life of the group.
        set_incarnation(member, member.info.id)
        self._members[member.info.name] = member
        told = [(member, _stranger(text)) for text in self._strangers]
        if len(self._members) < self._world_size:
            return told
        # All must answer a probe before the group is complete: a worker that died a
        # moment ago would be missed for ever, and its successor be refused.
        probed = self._probe([one for one in self._members.values() if one != member])
        self._unsure, self._asked = {one for one, _ in probed}, self._probes
        return told + (probed or self._complete())

    def lives(self, member: Member, probe: int) -> Answers:
        """See `Membership.lives`."""
        answers = super().lives(member, probe)
        full = len(self._members) == self._world_size
        # An answer to an earlier probe proves nothing: its worker may have died since.
        if self.complete or not full or probe < self._asked:
            return answers
        self._unsure.discard(member)
        return answers if self._unsure else answers + self._complete()

    def _complete(self) -> Answers:
        self.complete = True
        doubts, self._doubts = self._doubts, []
        present = self.present()
        meta = {"members": [record_of(one) for one in present]}
        told = [(one, Frame(REPLY, one.request, meta, None, [])) for one in present]
        return told + [answer for doubt in doubts for answer in self.not_unique(doubt)]

    def not_unique(self, doubt: Doubt) -> Answers:
        """See `Membership.not_unique`: fails the group unless it is complete."""
        refusal = clash(doubt.newcomer.info, doubt.rival.info)
        # Before that, one of the two has the place of a worker that will be missing.
        if self.complete:
            return self._refuse([doubt.newcomer], refusal)
        return self._fail(refusal, [doubt.newcomer])

    def fail(self, failure: str) -> Answers:
        """See `Membership.fail`: the group will never be complete."""
        if self.complete or self.failure:
            return []
        return self._fail(Refusal(failure), [])

    def refused(self, stranger: str) -> Answers:
        """See `Membership.refused`: reported to waiting and to later workers."""
        known = stranger in self._strangers
        if self.complete or known or len(self._strangers) == _MOST_STRANGERS:
            return []
        self._strangers.append(stranger)
        return [(member, _stranger(stranger)) for member in self._joining()]

    def expire(self, now: float) -> Answers:
        """See `Membership.expire`; fails the group."""
        # A worker that gives up will not be there when the others come.
        until = self.until()
        if until is None or until > now:
            return []
        here = [member.info for member in self._members.values()]
        present = {info.id for info in here}
        missing = [rank for rank in range(self._world_size) if rank not in present]
        text = (
            f"Not all of the {self._world_size} workers have come in time. "
            f"Missing ranks: {missing}. "
            f"Here: {', '.join(f'{info.name} ({info.id})' for info in here)}."
        )
        if not missing:
            missing = sorted(one.info.id for one in self._unsure)
            text += f" Silent: {', '.join(one.info.name for one in self._unsure)}."
        text = " ".join([text, *self._strangers])
        return self._fail(Refusal(text, LATE, tuple(missing)), [])

    def is_ending(self, info: WorkerInfo) -> bool:
        """See `Membership.is_ending`: whether one of this name or rank has left."""
        # By rank as well: a process that ends one group may have another name in the
        # next.
        return self.complete and any(
            member.left and (member.info.name == info.name or member.info.id == info.id)
            for member in self._members.values()
        )

    def has(self, member: Member) -> bool:
        """See `Membership.has`; also true after it has left."""
        return self.complete and self._members.get(member.info.name) is member

    def present(self) -> list[Member]:
        """See `Membership.present`; none before the group is complete."""
        if not self.complete:
            return []
        here = [member for member in self._members.values() if member.gone is None]
        return sorted(here, key=lambda member: member.info.id)

    def gone(self, name: str) -> str | None:
        """See `Membership.gone`."""
        member = self._members.get(name)
        return "no such worker" if member is None else member.gone

    def all_told(self) -> bool:
        """See `Membership.all_told`."""
        return self._told >= self._world_size

    def _forget(self, member: Member) -> bool:
        if self._members.get(member.info.name) is not member:
            return False
        if not self.complete:
            del self._members[member.info.name]
            self._unsure.discard(member)
        return self.complete

    def _joining(self) -> list[Member]:
        doubtful = [doubt.newcomer for doubt in self._doubts]
        return [] if self.complete else [*self._members.values(), *doubtful]

    def _full(self, member: Member, rival: Member | None) -> Refusal:
        if rival is not None and rival.gone is None:
            return clash(member.info, rival.info)
        return Refusal(
            f"{member.info.name} comes to a group of {self._world_size} workers that "
            "is complete. No worker takes the place of one that is lost there; for "
            "that, initialize all of them without a world_size."
        )

    def _fail(self, failure: Refusal, others: list[Member]) -> Answers:
        self.failure = failure
        waiting = [*self._joining(), *others]
        self._members.clear()
        self._doubts.clear()
        return self._refuse(waiting, failure)

    def _refuse(self, members: list[Member], refusal: Refusal) -> Answers:
        self._told += len(members)
        return refuse(members, refusal)


def _stranger(text: str) -> Frame:
    return Frame("group.stranger", 0, {"text": text}, None, [])
