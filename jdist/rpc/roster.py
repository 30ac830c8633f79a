"""Who has joined a group, and what those are told who wait for it to be complete."""

from typing import Any

from jdist.rpc.frame import ERROR, REPLY, Frame
from jdist.rpc.member import Member
from jdist.rpc.worker_info import WorkerInfo

Answers = list[tuple[Member, Frame]]


class Roster:
    """The members of one group; whoever has it locks it.

    Args:
      world_size: How many make it complete.

    Attributes:
      complete: Whether all have joined.
      failure: Why it will never be complete, if so.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._members: dict[str, Member] = {}
        self._told = 0
        self.complete = False
        self.failure: str | None = None

    @staticmethod
    def info(name: str, meta: dict[str, Any]) -> WorkerInfo:
        """Who asks to join; the name is the one that its channel proved.

        Raises:
          ValueError: The rank is impossible.
        """
        return WorkerInfo(name, int(meta["rank"]))

    def add(self, member: Member, world_size: int) -> Answers:
        """Somebody wants to join; who is to be answered now, and what."""
        if self.failure is not None:
            return self._refuse([member], self.failure)
        conflict = self._conflict(member, world_size)
        if conflict is not None and self.complete:
            return self._refuse([member], conflict)
        if conflict is not None:
            return self.fail(conflict, member)
        self._members[member.info.name] = member
        if len(self._members) < self._world_size:
            return []
        self.complete = True
        ordered = sorted(self._members.values(), key=lambda one: one.info.id)
        rows = [[one.info.name, one.info.id, one.address] for one in ordered]
        return [(one, self._answer(one, REPLY, {"members": rows})) for one in ordered]

    def fail(
        self, failure: str, other: Member | None = None, timeout: bool = False
    ) -> Answers:
        """The group will never be complete: tells all who wait, and `other`."""
        self.failure = failure
        waiting = [*self._members.values(), *([] if other is None else [other])]
        self._members.clear()
        return self._refuse(waiting, failure, timeout)

    def remove(self, member: Member) -> bool:
        """Somebody has gone; whether it belonged to the complete group.

        Whoever goes before that is forgotten, so that it may try again.
        """
        if self._members.get(member.info.name) is not member:
            return False
        if not self.complete:
            del self._members[member.info.name]
        return self.complete

    def expire(self, now: float) -> Answers:
        """Once anybody's patience is over, tells all who has not come.

        Who gives up will not be there when the others come, so the group fails.
        """
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
        return self.fail(text, timeout=True)

    def until(self) -> float | None:
        """The moment when `expire` has something to do."""
        if self.complete:
            return None
        moments = (member.until for member in self._members.values())
        return min((at for at in moments if at is not None), default=None)

    def has(self, member: Member) -> bool:
        """Whether it belongs to the complete group, now or before it left."""
        return self.complete and self._members.get(member.info.name) is member

    def find(self, name: str) -> Member:
        """The member of this name."""
        return self._members[name]

    def present(self) -> list[Member]:
        """Those who belong to the complete group and have not gone."""
        if not self.complete:
            return []
        return [member for member in self._members.values() if member.gone is None]

    def gone(self, name: str) -> str | None:
        """Why that worker is not there, if it is not."""
        member = self._members.get(name)
        return "no such worker" if member is None else member.gone

    def is_ending(self, info: WorkerInfo) -> bool:
        """Whether who had this name, or this rank, has left the complete group.

        A process that ends one group and begins the next may bear another name in it.
        """
        return self.complete and any(
            member.left and (member.info.name == info.name or member.info.id == info.id)
            for member in self._members.values()
        )

    def all_told(self) -> bool:
        """Whether as many were refused as were expected."""
        return self._told >= self._world_size

    def _conflict(self, member: Member, world_size: int) -> str | None:
        name, rank = member.info.name, member.info.id
        same = self._members.get(name)
        if same is not None:
            return (
                f"RPC worker name {name} is not unique. Workers {same.info.id} and "
                f"{rank} share the same name."
            )
        for other in self._members.values():
            if other.info.id == rank:
                return (
                    f"Rank {rank} is not unique: {other.info.name} and {name} have it."
                )
        if world_size != self._world_size:
            return (
                f"{name} was told a world_size of {world_size}, the coordinator "
                f"{self._world_size}."
            )
        if rank >= self._world_size:
            return f"{name} has rank {rank} in a group of {self._world_size}."
        return None

    def _refuse(
        self, members: list[Member], text: str, timeout: bool = False
    ) -> Answers:
        self._told += len(members)
        meta = {"error": text, "timeout": timeout}
        return [(member, self._answer(member, ERROR, meta)) for member in members]

    @staticmethod
    def _answer(member: Member, kind: str, meta: dict[str, Any]) -> Frame:
        return Frame(kind, member.number, meta, None, [])
