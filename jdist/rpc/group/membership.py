"""The coordinator's view of a group: members, newcomers and departed workers.

A name or a rank counts as taken only once its owner has answered a probe: a worker that
died a moment ago is still listed, and must not keep its successor out.
"""

import abc
import dataclasses
import threading
import time
from collections import deque
from typing import Any, NamedTuple

from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.worker_info import PeerRecord, WorkerInfo
from jdist.rpc.wire.channel import Channel, ChannelClosed
from jdist.rpc.wire.frame import ERROR, Frame

LATE = "late"
NOT_UNIQUE = "not unique"
MISFIT = "misfit"

_MIXED = (
    "RPC group mixes statically and dynamically initialized members which is not "
    "supported: {name} was given {theirs}, the coordinator {ours}."
)


class Member:
    """A worker that belongs to the group, or asks to join it.

    Frames are sent to it in order, on a thread of the pool, so that a member which does
    not read delays no other.

    Args:
      info: Its name and rank.
      address: Where other workers reach it.
      channel: Its control channel.
      pool: Lends the thread that sends.

    Attributes:
      request: Number of its request to join, which the answer bears.
      until: Time at which it stops waiting for an answer to that; None for no limit.
      heard: Time of its last sign of life.
      gone: Why it no longer belongs to the group; None while it does.
      left: Whether it has gone in order, by a shutdown.
    """

    def __init__(
        self, info: WorkerInfo, address: Any, channel: Channel, pool: ThreadPool
    ) -> None:
        self.info = info
        self.address = address
        self.channel = channel
        self.request = 0
        self.until: float | None = None
        self.heard = time.monotonic()
        self.gone: str | None = None
        self.left = False
        self._pool = pool
        self._lock = threading.Lock()
        self._outbox: deque[Frame] = deque()
        self._sending = False

    def post(self, frame: Frame) -> None:
        """Sends a frame after those posted before; returns at once."""
        with self._lock:
            # One sender at a time, or frames could overtake each other.
            self._outbox.append(frame)
            if self._sending:
                return
            self._sending = True
        # Limited only so that few threads send what is posted to many members at once.
        self._pool.run_limited(self._send)

    def _send(self) -> None:
        while True:
            with self._lock:
                if not self._outbox:
                    self._sending = False
                    return
                frame = self._outbox.popleft()
            try:
                self.channel.send(frame)
            except ChannelClosed:
                return  # the thread that reads from it notices as well
            except ValueError as error:
                # All values together exceed a frame; the other members get this error
                # in the same way.
                self.post(Frame(ERROR, frame.id, _too_large(error), None, []))


def _too_large(error: ValueError) -> dict[str, Any]:
    text = f"The values of all workers together are too large for an answer: {error}"
    return {"failed": text, "mismatch": False}


Answers = list[tuple[Member, Frame]]
"""Frames to send, each with the member that gets it."""


class Refusal(NamedTuple):
    """The reason why a worker is not admitted.

    Attributes:
      text: The reason in words.
      kind: `LATE`, `NOT_UNIQUE`, `MISFIT`, or empty for any other reason.
      numbers: The ranks that are missing (`LATE`); the rank that two workers have
        (`NOT_UNIQUE`); the newcomer's rank and world_size, and the coordinator's
        (`MISFIT`).
    """

    text: str
    kind: str = ""
    numbers: tuple[int, ...] = ()


class Doubt(NamedTuple):
    """A newcomer whose name or rank is taken, by a worker that may be dead."""

    newcomer: Member
    rival: Member
    world_size: int
    probe: int


class Membership(abc.ABC):
    """The members of one group. Its owner locks it.

    Methods that change it return the frames that are due because of the change.

    Args:
      world_size: How many make the group; 0 for an elastic one.

    Attributes:
      elastic: Whether workers come and go one by one.
      failure: Why no worker can join, or None.
    """

    def __init__(self, world_size: int) -> None:
        self.elastic = not world_size
        self.failure: Refusal | None = None
        self._world_size = world_size
        self._members: dict[str, Member] = {}
        self._doubts: list[Doubt] = []
        self._probes = 0

    # --- joining ---

    @abc.abstractmethod
    def add(self, member: Member, world_size: int) -> Answers:
        """Handle a request to join."""

    @abc.abstractmethod
    def not_unique(self, doubt: Doubt) -> Answers:
        """Handle a newcomer whose name or rank is certainly taken."""

    @abc.abstractmethod
    def fail(self, failure: str) -> Answers:
        """Refuse all who wait to join, and all who come later."""

    def refused(self, stranger: str) -> Answers:
        """Handle a peer that could not prove the key."""
        # It never ends the wait: otherwise anyone who reaches the port could end every
        # group.
        return []

    @abc.abstractmethod
    def expire(self, now: float) -> Answers:
        """Refuse newcomers whose timeout has passed."""

    def until(self) -> float | None:
        """The earliest moment at which `expire` can have an effect, or None."""
        moments = [member.until for member in self._joining()]
        return min((at for at in moments if at is not None), default=None)

    @abc.abstractmethod
    def is_ending(self, info: WorkerInfo) -> bool:
        """Whether this newcomer means the next group at this place, not this one."""

    def knows(self, member: Member, newcomer: int) -> Answers:
        """Handle a member's report that it knows the newcomer of this incarnation."""
        return []

    def close(self) -> list[Member]:
        """Stop admitting workers; return those that were waiting."""
        return []

    def all_told(self) -> bool:
        """Whether, after a failure, as many were refused as were expected."""
        return True

    def lives(self, member: Member, probe: int) -> Answers:
        """Handle a member's answer to the probe of this number."""
        # An answer to an earlier probe proves nothing: the rival may have died since.
        decided = [d for d in self._doubts if d.rival is member and d.probe <= probe]
        self._doubts = [doubt for doubt in self._doubts if doubt not in decided]
        return [answer for doubt in decided for answer in self.not_unique(doubt)]

    # --- leaving ---

    def remove(self, member: Member) -> bool:
        """Remove a worker; return whether all others knew it as a member."""
        self._doubts = [one for one in self._doubts if one.newcomer is not member]
        return self._forget(member)

    def advance(self) -> Answers:
        """Admit newcomers whose name or rank was taken by a departed worker."""
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
        """Whether it was admitted and has not been replaced by a successor."""

    @abc.abstractmethod
    def present(self) -> list[Member]:
        """The live members, by rank."""

    @abc.abstractmethod
    def gone(self, name: str) -> str | None:
        """The reason why the worker of this name will not come; None if it may."""

    def is_present(self, name: str) -> bool:
        """Whether a worker of this name is a live member."""
        return any(member.info.name == name for member in self.present())

    # --- inside ---

    @abc.abstractmethod
    def _forget(self, member: Member) -> bool:
        """See `remove`."""

    @abc.abstractmethod
    def _joining(self) -> list[Member]:
        """The workers that wait to be admitted."""

    def _doubt(self, newcomer: Member, rival: Member, world_size: int) -> Answers:
        answers = self._probe([rival])
        self._doubts.append(Doubt(newcomer, rival, world_size, self._probes))
        return answers

    def _probe(self, members: list[Member]) -> Answers:
        """Ask members whether they live."""
        # Numbered, because only an answer to this very probe says so.
        self._probes += 1
        meta = {"probe": self._probes}
        return [(one, Frame("group.probe", 0, meta, None, [])) for one in members]

    def _misfit(self, member: Member, world_size: int) -> Refusal | None:
        """The refusal of a newcomer whose world size or rank does not fit."""
        name, rank, ours = member.info.name, member.info.id, self._world_size
        if bool(world_size) != bool(ours):
            theirs, own = (
                f"a world_size of {n}" if n else "none" for n in (world_size, ours)
            )
            text = _MIXED.format(name=name, theirs=theirs, ours=own)
        elif world_size != ours:
            text = (
                f"{name} was told a world_size of {world_size}, the coordinator {ours}."
            )
        elif ours and rank >= ours:
            text = f"{name} has rank {rank} in a group of {ours}."
        else:
            return None
        return Refusal(text, MISFIT, (rank, world_size, ours))


def rival_of(newcomer: Member, members: list[Member]) -> Member | None:
    """Return the first of `members` that has the newcomer's name or rank."""
    for other in members:
        info = newcomer.info
        if other.info.name == info.name or other.info.id == info.id:
            return other
    return None


def clash(newcomer: WorkerInfo, rival: WorkerInfo) -> Refusal:
    """Return the refusal of a newcomer that shares its name or rank with a member."""
    if newcomer.name == rival.name:
        text = (
            f"RPC worker name {newcomer.name} is not unique. Workers {rival.id} and "
            f"{newcomer.id} share the same name."
        )
    else:
        text = (
            f"Rank {newcomer.id} is not unique: {rival.name} and {newcomer.name} "
            "have it."
        )
    return Refusal(text, NOT_UNIQUE, (newcomer.id,))


def set_incarnation(member: Member, incarnation: int) -> None:
    """Give a worker that is being admitted its incarnation."""
    member.info = dataclasses.replace(member.info, incarnation=incarnation)


def record_of(member: Member) -> list[Any]:
    """Return the row of a member's `PeerRecord`, as sent to other workers."""
    return PeerRecord(member.info, member.channel.peer, member.address).row()


def refuse(members: list[Member], refusal: Refusal) -> Answers:
    """Return the answers that refuse these members' requests to join."""
    text, kind, numbers = refusal
    meta = {"error": text, "kind": kind, "numbers": list(numbers)}
    return [(one, Frame(ERROR, one.request, meta, None, [])) for one in members]
