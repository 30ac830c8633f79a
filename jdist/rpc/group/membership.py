"""The coordinator's view of a group: members, newcomers and departed workers.

A name or a rank counts as taken only once its owner has answered a probe: a worker that
died a moment ago is still listed, and must not keep its successor out.
"""

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


class Membership:
    """The members of one group. Its owner locks it.

    A group of fixed size is *forming* until all of its workers have come, and each has
    confirmed that it lives. What is wrong with one of them fails the group, because
    that one has the place of a worker that will be missing. Afterwards no worker is
    admitted, and only the newcomer is refused.

    An elastic group admits a worker at any time, under a name and a rank that are free,
    but none before rank 0, whose process hosts the coordinator. It does so in two
    steps, so that no worker is called by, or told of, a worker that it does not know:

        coordinator -> all members   coming    serve this one from now on
        all members -> coordinator   confirm
        coordinator -> newcomer      the answer to its request, with all members

    A member may call a newcomer earlier, which serves no call before it has its answer.

    Newcomers are admitted one after the other. A worker that leaves, or is lost, is no
    longer waited for.

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
        self._forming = not self.elastic
        self._closing = False
        self._members: dict[str, Member] = {}
        # Newcomers: those that wait for their turn, those that are being admitted, and
        # those whose name or rank is taken by a worker that may be dead.
        self._waiting: list[Member] = []
        self._entering: list[Member] = []
        self._doubtful: list[Member] = []
        self._told = 0
        self._strangers: list[str] = []
        self._inquiries: dict[int, Inquiry] = {}
        self._numbers = itertools.count(1)
        self._incarnations: set[int] = set()
        self._last = MOST_WORKERS

    # --- joining ---

    def add(self, member: Member, world_size: int) -> Answers:
        """Handle a request to join."""
        refusal = self.failure or self._misfit(member, world_size)
        if refusal is not None:
            return self._turn_away(member, refusal)
        name, rank = member.info.name, member.info.id
        for other in (*self.present(), *self._waiting, *self._entering):
            if other.info.name == name or other.info.id == rank:
                return self._doubt(member, other, world_size)
        if not self.elastic and not self._forming:
            text = (
                f"{name} comes to a group of {self._world_size} workers that is "
                "complete. No worker takes the place of one that is lost there; for "
                "that, initialize all of them without a world_size."
            )
            return self._turn_away(member, Refusal(text))
        self._waiting.append(member)
        told = [(member, _stranger(text)) for text in self._strangers]
        return told + self._admit()

    def fail(self, failure: Refusal, *newcomers: Member) -> Answers:
        """Refuse all who wait to join, and all who come later."""
        self.failure = self.failure or failure
        waiting = [*self._dismiss(), *newcomers]
        self._entering = []
        return self._refuse(waiting, failure)

    def close(self) -> list[Member]:
        """Stop admitting workers; return those that were waiting."""
        self._closing = True
        return self._dismiss()

    def refused(self, stranger: str) -> Answers:
        """Handle a peer that could not prove the key, which may be one that is missing.

        It is reported to those that wait for the group to form, and to later ones.
        """
        # It never ends the wait: otherwise anyone who reaches the port could end every
        # group.
        known = stranger in self._strangers
        if not self._forming or known or len(self._strangers) == _MOST_STRANGERS:
            return []
        self._strangers.append(stranger)
        return [(member, _stranger(stranger)) for member in self._joining()]

    def expire(self, now: float) -> Answers:
        """Refuse newcomers whose timeout has passed."""
        late = [m for m in self._joining() if m.until is not None and m.until <= now]
        if late and self._forming:
            # A worker that gives up will not be there when the others come.
            return self.fail(self._missing())
        unaware = ", ".join(sorted(member.info.name for member in self._silent()))
        why = f"{unaware} did not say that they know of it" if unaware else "no turn"
        answers: Answers = []
        for member in late:
            member.until = None
            self._forget(member)
            text = f"{member.info.name} was not let in in time: {why}."
            answers += self._refuse([member], Refusal(text, LATE))
        return answers

    def until(self) -> float | None:
        """The earliest moment at which `expire` can have an effect, or None."""
        moments = [member.until for member in self._joining()]
        return min((at for at in moments if at is not None), default=None)

    def is_ending(self, info: WorkerInfo) -> bool:
        """Whether this newcomer means the next group at this place, not this one."""
        # By rank as well: a process that ends one group may have another name in the
        # next.
        return self._closing or any(
            member.left and (member.info.name == info.name or member.info.id == info.id)
            for member in self._members.values()
        )

    def all_told(self) -> bool:
        """Whether, after a failure, as many were refused as were expected."""
        return self._told >= self._world_size

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

    # --- leaving ---

    def remove(self, member: Member) -> bool:
        """Remove a worker; return whether all others knew it as a member."""
        self._forget(member)
        if member in self._entering:
            self._waiting[:0] = [one for one in self._entering if one is not member]
            self._entering = []
            return self.elastic  # where all others know of it by `group.coming`
        if not self.has(member):
            return False
        # A lost member stays until a worker of its name joins: `gone` needs its reason.
        # In a group of fixed size one that left stays, too: see `is_ending`.
        if member.left and self.elastic:
            del self._members[member.info.name]
        return True

    def advance(self, gone: Member) -> Answers:
        """Handle what waited for a worker that is gone; admit the next newcomers."""
        return self._await_no_longer(gone, list(self._inquiries)) + self._admit()

    # --- asking ---

    def has(self, member: Member) -> bool:
        """Whether it was admitted and has not been replaced by a successor."""
        return self._members.get(member.info.name) is member

    def present(self) -> list[Member]:
        """The live members, by rank."""
        here = [one for one in self._members.values() if one.gone is None]
        return sorted(here, key=lambda member: member.info.id)

    def gone(self, name: str) -> str | None:
        """The reason why the worker of this name will not come; None if it may."""
        member = self._members.get(name)
        if member is None:
            return None if self.elastic else "no such worker"
        return member.gone

    # --- inside ---

    def _joining(self) -> list[Member]:
        return [*self._waiting, *self._entering, *self._doubtful]

    def _dismiss(self) -> list[Member]:
        joining = self._joining()
        self._waiting.clear()
        self._doubtful.clear()
        return joining

    def _forget(self, member: Member) -> None:
        """Remove a newcomer that is not being admitted."""
        for newcomers in (self._waiting, self._doubtful):
            if member in newcomers:
                newcomers.remove(member)

    def _silent(self) -> set[Member]:
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

    def _doubt(self, newcomer: Member, rival: Member, world_size: int) -> Answers:
        """Ask the rival whether it lives, and refuse or admit the newcomer then."""
        self._doubtful.append(newcomer)

        def decide() -> Answers:
            if newcomer not in self._doubtful:
                return []  # it was refused meanwhile, or is gone
            self._doubtful.remove(newcomer)
            if rival.gone is None:
                return self._turn_away(newcomer, _clash(newcomer.info, rival.info))
            return self.add(newcomer, world_size)

        return self.ask([rival], "group.probe", {}, decide)

    def _admit(self) -> Answers:
        """Begin to admit those whose turn it is, unless others are being admitted."""
        if self._entering:
            return []
        if self.elastic:
            # One at a time, and only when all members know it: as soon as it is
            # admitted, any of them may receive a call from it or a reference to it.
            begun = any(member.info.id == 0 for member in self.present())
            entering = [m for m in self._waiting if m.info.id == 0 or begun][:1]
        else:
            full = len(self._waiting) == self._world_size
            entering = [*self._waiting] if full else []
        if not entering:
            return []
        self._entering = entering
        for one in entering:
            self._waiting.remove(one)
            incarnation = self._free_incarnation(one.info.id)
            if incarnation is None:
                self._entering = []
                text = f"This group has had {MOST_WORKERS} workers, and can have no "
                return self._refuse(entering, Refusal(text + "more.")) + self._admit()
            one.info = dataclasses.replace(one.info, incarnation=incarnation)
        if self.elastic:
            coming = {"member": _record_of(entering[0])}
            return self.ask(
                self.present(), "group.coming", coming, lambda: self._enter(entering)
            )
        # All but the last one must answer before the group is complete: one that died a
        # moment ago would be missed for ever, and its successor be refused.
        return self.ask(entering[:-1], "group.probe", {}, lambda: self._enter(entering))

    def _enter(self, entering: list[Member]) -> Answers:
        if self._entering is not entering:
            return []  # one of them is gone, or the group has failed
        self._entering, self._forming = [], False
        self._members |= {one.info.name: one for one in entering}
        meta = {"members": [_record_of(one) for one in self.present()]}
        answers = [
            (one, Frame(REPLY, one.request, meta, None, []))
            for one in sorted(entering, key=lambda member: member.info.id)
        ]
        return answers + self._admit()

    def _free_incarnation(self, rank: int) -> int | None:
        """The rank if unused as an incarnation, else the highest unused number."""
        # No other worker has this rank in the life of a group of fixed size.
        if not self.elastic or rank not in self._incarnations:
            self._incarnations.add(rank)
            return rank
        # From above: new ranks are taken from below, so that the two meet last.
        while self._last:
            self._last -= 1
            if self._last not in self._incarnations:
                self._incarnations.add(self._last)
                return self._last
        return None

    # --- refusals ---

    def _turn_away(self, newcomer: Member, refusal: Refusal) -> Answers:
        """Refuse a newcomer; while the group is forming, all others with it."""
        if self._forming:
            return self.fail(refusal, newcomer)
        return self._refuse([newcomer], refusal)

    def _refuse(self, newcomers: list[Member], refusal: Refusal) -> Answers:
        self._told += len(newcomers)
        text, kind, numbers = refusal
        meta = {"error": text, "kind": kind, "numbers": list(numbers)}
        return [(one, Frame(ERROR, one.request, meta, None, [])) for one in newcomers]

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

    def _missing(self) -> Refusal:
        """The refusal of all who wait for a group that has not formed in time."""
        here = [member.info for member in (*self._waiting, *self._entering)]
        present = {info.id for info in here}
        missing = [rank for rank in range(self._world_size) if rank not in present]
        text = (
            f"Not all of the {self._world_size} workers have come in time. "
            f"Missing ranks: {missing}. "
            f"Here: {', '.join(f'{info.name} ({info.id})' for info in here)}."
        )
        if not missing:
            silent = self._silent()
            missing = sorted(one.info.id for one in silent)
            text += f" Silent: {', '.join(one.info.name for one in silent)}."
        return Refusal(" ".join([text, *self._strangers]), LATE, tuple(missing))


def _stranger(text: str) -> Frame:
    return Frame("group.stranger", 0, {"text": text}, None, [])


def _clash(newcomer: WorkerInfo, rival: WorkerInfo) -> Refusal:
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


def _record_of(member: Member) -> list[Any]:
    """Return the row of a member's `PeerRecord`, as sent to other workers."""
    return PeerRecord(member.info, member.channel.peer, member.address).row()
