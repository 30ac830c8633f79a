"""Who belongs to a group, and who may join it; of both kinds of groups."""

import abc
import dataclasses
from typing import Any, NamedTuple

from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.group.member import Member
from jdist.rpc.group.peer_record import PeerRecord
from jdist.rpc.wire.frame import ERROR, Frame

Answers = list[tuple[Member, Frame]]

_MIXED = (
    "RPC group mixes statically and dynamically initialized members which is not "
    "supported: {name} was given {theirs}, the coordinator {ours}."
)


class Doubt(NamedTuple):
    """Somebody has a name or rank that is taken, by one who may be dead by now."""

    newcomer: Member
    rival: Member
    world_size: int
    probe: int


class Roster(abc.ABC):
    """The members of one group; whoever has it locks it.

    A name or a rank is not unique when its owner answers a probe. One who died a moment
    ago is still in the books: his successor must not be refused for that.

    Args:
      world_size: How many make the group; 0 for an elastic one.

    Attributes:
      elastic: Whether workers come and go one by one.
      failure: Why nobody can join any more, if so.
    """

    def __init__(self, world_size: int) -> None:
        self.elastic = not world_size
        self.failure: str | None = None
        self._world_size = world_size
        self._members: dict[str, Member] = {}
        self._doubts: list[Doubt] = []
        self._probes = 0

    @staticmethod
    def info(meta: dict[str, Any]) -> WorkerInfo:
        """Who asks to join.

        Raises:
          ValueError: The name or the rank is impossible.
        """
        return WorkerInfo(meta["name"], int(meta["rank"]))

    # --- coming ---

    @abc.abstractmethod
    def add(self, member: Member, world_size: int) -> Answers:
        """Somebody wants to join; who is to be told what now."""

    @abc.abstractmethod
    def not_unique(self, doubt: Doubt) -> Answers:
        """A newcomer's name or rank is taken indeed."""

    @abc.abstractmethod
    def fail(self, failure: str) -> Answers:
        """Nobody can join any more: tells all who wait."""

    def refused(self, stranger: str) -> Answers:
        """A stranger could not prove the key; only of interest while some are missing.

        It does not end the wait: anyone who reaches the port could end every group so.
        """
        return []

    @abc.abstractmethod
    def expire(self, now: float) -> Answers:
        """Tells those whose patience is over."""

    def until(self) -> float | None:
        """The moment when `expire` has something to do."""
        moments = [member.until for member in self._joining()]
        return min((at for at in moments if at is not None), default=None)

    @abc.abstractmethod
    def is_ending(self, info: WorkerInfo) -> bool:
        """Whether this newcomer means the next group at this place, not this one."""

    def knows(self, member: Member, newcomer: int) -> Answers:
        """A member knows the newcomer of this number; only asked in elastic groups."""
        return []

    def close(self) -> list[Member]:
        """Lets nobody in any more; who was waiting for that."""
        return []

    def all_told(self) -> bool:
        """After a failure: whether as many were refused as were expected."""
        return True

    def lives(self, member: Member, probe: int) -> Answers:
        """It has answered the probe of this number."""
        decided = [d for d in self._doubts if d.rival is member and d.probe <= probe]
        self._doubts = [doubt for doubt in self._doubts if doubt not in decided]
        return [answer for doubt in decided for answer in self.not_unique(doubt)]

    # --- going ---

    def remove(self, member: Member) -> bool:
        """Somebody has gone; whether everybody else knew it as a member."""
        self._doubts = [one for one in self._doubts if one.newcomer is not member]
        return self._forget(member)

    def advance(self) -> Answers:
        """Lets in whom somebody who has gone had kept out."""
        settled = [doubt for doubt in self._doubts if doubt.rival.gone is not None]
        self._doubts = [doubt for doubt in self._doubts if doubt.rival.gone is None]
        return [
            answer
            for doubt in settled
            for answer in self.add(doubt.newcomer, doubt.world_size)
        ]

    # --- asking ---

    @abc.abstractmethod
    def has(self, member: Member) -> bool:
        """Whether it was let in, and no other of its name since."""

    @abc.abstractmethod
    def present(self) -> list[Member]:
        """Those who belong to the group now, in the order of their ranks."""

    @abc.abstractmethod
    def gone(self, name: str) -> str | None:
        """Why there is no use in waiting for the worker of this name, if so."""

    def is_present(self, name: str) -> bool:
        """Whether a worker of this name belongs to the group now."""
        return any(member.info.name == name for member in self.present())

    def find(self, name: str) -> Member:
        """The member of this name."""
        return self._members[name]

    # --- inside ---

    @abc.abstractmethod
    def _forget(self, member: Member) -> bool:
        """See `remove`."""

    @abc.abstractmethod
    def _joining(self) -> list[Member]:
        """Those who wait to be let in."""

    def _doubt(self, newcomer: Member, rival: Member, world_size: int) -> Answers:
        answers = self._probe([rival])
        self._doubts.append(Doubt(newcomer, rival, world_size, self._probes))
        return answers

    def _probe(self, members: list[Member]) -> Answers:
        """Asks them whether they live. Only the answers to this very probe say so."""
        self._probes += 1
        meta = {"probe": self._probes}
        return [(one, Frame("group.probe", 0, meta, None, [])) for one in members]

    def _misfit(self, member: Member, world_size: int) -> str | None:
        """Why somebody with another idea of the group cannot belong to it."""
        name, ours = member.info.name, self._world_size
        if bool(world_size) != bool(ours):
            sizes = [
                f"a world_size of {n}" if n else "none" for n in (world_size, ours)
            ]
            return _MIXED.format(name=name, theirs=sizes[0], ours=sizes[1])
        if world_size != ours:
            return (
                f"{name} was told a world_size of {world_size}, the coordinator {ours}."
            )
        if ours and member.info.id >= ours:
            return f"{name} has rank {member.info.id} in a group of {ours}."
        return None


def rival_of(newcomer: Member, members: list[Member]) -> Member | None:
    """Who of them has its name or its rank."""
    for other in members:
        info = newcomer.info
        if other.info.name == info.name or other.info.id == info.id:
            return other
    return None


def clash(newcomer: WorkerInfo, rival: WorkerInfo) -> str:
    """What two have in common that only one may have."""
    if newcomer.name == rival.name:
        return (
            f"RPC worker name {newcomer.name} is not unique. Workers {rival.id} and "
            f"{newcomer.id} share the same name."
        )
    return (
        f"Rank {newcomer.id} is not unique: {rival.name} and {newcomer.name} have it."
    )


def number(member: Member, value: int) -> None:
    """Gives somebody who is let in the number by which all will know it."""
    member.info = dataclasses.replace(member.info, incarnation=value)


def record_row(member: Member) -> list[Any]:
    """What others are told of it."""
    return PeerRecord(member.info, member.channel.peer, member.address).row()


def refuse(members: list[Member], text: str, timeout: bool = False) -> Answers:
    """Tells them that they are not let in."""
    meta = {"error": text, "timeout": timeout}
    return [(member, Frame(ERROR, member.number, meta, None, [])) for member in members]
