"""The coordinator's view of a group: members, newcomers and departed workers.

A name or a rank counts as taken only once its owner has answered a probe: a worker that
died a moment ago is still listed, and must not keep its successor out.
"""

import abc
import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jdist.rpc.base.current import Meta
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.worker_info import MOST_WORKERS, PeerRecord, WorkerInfo
from jdist.rpc.wire.channel import Channel, ChannelClosed
from jdist.rpc.wire.frame import ERROR, REPLY, Frame

LATE = "late"
NOT_UNIQUE = "not unique"
MISFIT = "misfit"

# Strangers choose their names, and could send many.
_MOST_STRANGERS = 8

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


class Inquiry(NamedTuple):
    """A message that members confirm, each by its number.

    Attributes:
      awaited: The members that have not confirmed it and are not gone.
      then: Called once there are none; returns the frames that are due.
    """

    awaited: set[Member]
    then: Callable[[], Answers]


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
        # Newcomers whose name or rank is taken, by workers that may be dead.
        self._doubtful: list[Member] = []
        self._inquiries: dict[int, Inquiry] = {}
        self._numbers = itertools.count(1)

    # --- joining ---

    @abc.abstractmethod
    def add(self, member: Member, world_size: int) -> Answers:
        """Handle a request to join."""

    @abc.abstractmethod
    def not_unique(self, newcomer: Member, rival: Member) -> Answers:
        """Handle a newcomer whose name or rank is certainly the rival's."""

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

    def close(self) -> list[Member]:
        """Stop admitting workers; return those that were waiting."""
        return []

    def all_told(self) -> bool:
        """Whether, after a failure, as many were refused as were expected."""
        return True

    # --- confirmations ---

    def ask(
        self,
        members: Sequence[Member],
        kind: str,
        meta: Meta,
        then: Callable[[], Answers],
    ) -> Answers:
        """Send a message; `then` once each of these members confirms it, or is gone."""
        if not members:
            return then()
        number = next(self._numbers)
        self._inquiries[number] = Inquiry(set(members), then)
        frame = Frame(kind, 0, meta | {"confirm": number}, None, [])
        return [(one, frame) for one in members]

    def confirmed(self, member: Member, number: int) -> Answers:
        """Handle a member's confirmation of the message of this number."""
        # Only of that one: the member may have died since it confirmed an earlier one.
        return self._await_no_longer(member, [number])

    def silent(self) -> set[Member]:
        """The members that have not confirmed all that they were asked."""
        return {one for each in self._inquiries.values() for one in each.awaited}

    def _await_no_longer(self, member: Member, numbers: Iterable[int]) -> Answers:
        answers: Answers = []
        for number in numbers:
            inquiry = self._inquiries.get(number)
            if inquiry is None or member not in inquiry.awaited:
                continue
            inquiry.awaited.discard(member)
            if not inquiry.awaited:
                del self._inquiries[number]
                answers += inquiry.then()
        return answers

    # --- leaving ---

    def remove(self, member: Member) -> bool:
        """Remove a worker; return whether all others knew it as a member."""
        if member in self._doubtful:
            self._doubtful.remove(member)
        return self._forget(member)

    def advance(self, gone: Member) -> Answers:
        """Handle what waited for the confirmation of a worker that is gone."""
        return self._await_no_longer(gone, list(self._inquiries))

    # --- asking ---

    def has(self, member: Member) -> bool:
        """Whether it was admitted and has not been replaced by a successor."""
        return self._members.get(member.info.name) is member

    def present(self) -> list[Member]:
        """The live members, by rank."""
        here = [one for one in self._members.values() if one.gone is None]
        return sorted(filter(self.has, here), key=lambda member: member.info.id)

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
        """Ask the rival whether it lives, and admit or refuse the newcomer then."""
        self._doubtful.append(newcomer)

        def decide() -> Answers:
            if newcomer not in self._doubtful:
                return []  # it was refused meanwhile, or is gone
            self._doubtful.remove(newcomer)
            if rival.gone is None:
                return self.not_unique(newcomer, rival)
            return self.add(newcomer, world_size)

        return self.ask([rival], "group.probe", {}, decide)

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
        members = dict(self._members)
        others = [one for one in members.values() if one is not member]

        def all_live() -> Answers:
            return self._complete() if self._members == members else []

        return told + self.ask(others, "group.probe", {}, all_live)

    def _complete(self) -> Answers:
        self.complete = True
        present = self.present()
        meta = {"members": [record_of(one) for one in present]}
        return [(one, Frame(REPLY, one.request, meta, None, [])) for one in present]

    def not_unique(self, newcomer: Member, rival: Member) -> Answers:
        """See `Membership.not_unique`: fails the group unless it is complete."""
        refusal = clash(newcomer.info, rival.info)
        # Before that, one of the two has the place of a worker that will be missing.
        if self.complete:
            return self._refuse([newcomer], refusal)
        return self._fail(refusal, [newcomer])

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
            silent = self.silent()
            missing = sorted(one.info.id for one in silent)
            text += f" Silent: {', '.join(one.info.name for one in silent)}."
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
        """See `Membership.has`; true for none before the group is complete."""
        return self.complete and super().has(member)

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
        return self.complete

    def _joining(self) -> list[Member]:
        return [] if self.complete else [*self._members.values(), *self._doubtful]

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
        self._doubtful.clear()
        return self._refuse(waiting, failure)

    def _refuse(self, members: list[Member], refusal: Refusal) -> Answers:
        self._told += len(members)
        return refuse(members, refusal)


def _stranger(text: str) -> Frame:
    return Frame("group.stranger", 0, {"text": text}, None, [])


class ElasticMembership(Membership):
    """A worker may join at any time, under a name and a rank that are free.

    No worker is admitted before rank 0, whose process hosts the coordinator.

    A newcomer is admitted in two steps, so that no worker is called by, or told of, a
    worker that it does not know:

        coordinator -> all members   coming    serve this one from now on
        all members -> coordinator   confirm
        coordinator -> newcomer      the answer to its request, with all members
        coordinator -> all members   came      you may call it, and speak of it

    Newcomers are admitted one after the other. A worker that leaves, or is lost, is no
    longer waited for.

    Attributes:
      closing: Whether admission has ended, because rank 0 is about to leave.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.closing = False
        self._waiting: list[Member] = []
        self._entering: Member | None = None
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
        return self._admit_next()

    def advance(self, gone: Member) -> Answers:
        """See `Membership.advance`; admits the next newcomer."""
        return super().advance(gone) + self._admit_next()

    @property
    def is_ready(self) -> bool:
        """Whether rank 0 has been admitted."""
        return any(member.info.id == 0 for member in self.present())

    def not_unique(self, newcomer: Member, rival: Member) -> Answers:
        """See `Membership.not_unique`: only the newcomer is refused."""
        return refuse([newcomer], clash(newcomer.info, rival.info))

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
        unaware = ", ".join(sorted(member.info.name for member in self.silent()))
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

    def gone(self, name: str) -> str | None:
        """See `Membership.gone`: only for a lost worker; others may still join."""
        member = self._members.get(name)
        return None if member is None else member.gone

    # --- inside ---

    def _dismiss(self) -> list[Member]:
        joining = self._joining()
        self._waiting.clear()
        self._doubtful.clear()
        return joining

    def _admit_next(self) -> Answers:
        # One newcomer at a time, and only when all members know it: as soon as it is
        # admitted, any of them may receive a call from it or a reference that names it.
        ready = [m for m in self._waiting if m.info.id == 0 or self.is_ready]
        if self._entering is not None or not ready:
            return []
        member = ready[0]
        self._waiting.remove(member)
        free = self._free_incarnation(member.info.id)
        if free is None:
            text = f"This group has had {MOST_WORKERS} workers, and can have no more."
            return refuse([member], Refusal(text)) + self._admit_next()
        set_incarnation(member, free)
        self._entering = member
        meta = {"member": record_of(member)}
        return self.ask(
            self.present(), "group.coming", meta, lambda: self._enter(member)
        )

    def _enter(self, member: Member) -> Answers:
        if member is not self._entering:
            return []  # it is gone
        self._entering = None
        meta = {"incarnation": member.info.incarnation}
        came = Frame("group.came", 0, meta, None, [])
        told: Answers = [(other, came) for other in self.present()]
        self._members[member.info.name] = member
        members = {"members": [record_of(one) for one in self.present()]}
        member.until = None
        answer = Frame(REPLY, member.request, members, None, [])
        return [(member, answer), *told, *self._admit_next()]

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
        if member in self._waiting:
            self._waiting.remove(member)
        if member is self._entering:
            self._entering = None
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
        return [*self._candidates(), *self._doubtful]


def rival_of(newcomer: Member, members: list[Member]) -> Member | None:
    """Return the first of `members` that has the newcomer's name or rank."""
    name, rank = newcomer.info.name, newcomer.info.id
    rivals = (one for one in members if one.info.name == name or one.info.id == rank)
    return next(rivals, None)


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
