"""Distributed reference counting: keeps a value alive while a reference to it is held.

All rules of the protocol stand here, as one state machine per worker without threads,
clocks or sockets: methods are events, and each returns the effects to be performed.

Two guarantees carry it (torch's names):

- G1. A holder that drops its fork notifies the owner.
- G2. A fork is not dropped before every fork made of it is counted by the owner.

Hence at any time each holder is counted itself, or descends by forks that are not yet
counted from one that is; and the value is freed only when no holder is counted. In
detail:

- The owner counts a fork that it gives away from the moment at which it is given.
- Another holder's gift is counted when its receiver has asked the owner (`Fork`), and
  the receiver then tells the giver (`Accept`).
- A reference that comes home to its owner is accepted at once: the fork that it came
  as is never counted, it only kept the giver's fork alive on the way.
- A creator's fork is counted with the creation, or when that was aborted.

A fork is under way until it is accepted. If the call or answer with it is lost, it is
delivered again by itself (`Take`), so that each fork that was ever made ends by being
dropped. A worker that goes takes its forks with it: the owner forgets them, and those
that it had given and that were not counted yet may find the value freed.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jdist.rpc.base.dedup_window import DedupWindow, Unsettled
from jdist.rpc.base.ids import GloballyUniqueId, IdCounter
from jdist.rpc.rref.messages import (
    Abort,
    Accept,
    CreationName,
    Delete,
    Fork,
    Message,
    Ref,
    Take,
)


@dataclasses.dataclass(slots=True, eq=False)
class UserFork:
    """One fork of this worker.

    It may be dropped once the owner counts it (or never will) and all forks made of it
    are counted too: until then it keeps the value alive for them.

    Attributes:
      owner: Incarnation of the worker that has the value.
      rref: Id of the reference.
      fork: Id of this fork.
      giver: Incarnation of the worker from which it came; None for the creator's own.
      counted: Whether the owner is known to count it.
      failed: Why the owner will never count it, or that the owner is gone.
      dropped: Whether the program no longer uses it.
      children: Number of forks made of it that are not counted yet.
    """

    owner: int
    rref: GloballyUniqueId
    fork: GloballyUniqueId
    giver: int | None
    counted: bool = False
    failed: str | None = None
    dropped: bool = False
    children: int = 0

    @property
    def pending(self) -> bool:
        """Whether the owner has not answered yet."""
        return not self.counted and self.failed is None

    @property
    def over(self) -> bool:
        """Whether `Delete` may be sent to the owner."""
        return self.dropped and not self.children and not self.pending


class GivenFork(NamedTuple):
    """A fork in transit.

    Attributes:
      receiver: Incarnation of the receiver.
      rref: Id of the reference.
      fork: Id of the fork.
      parent: The giver's own fork, which has to outlive this; None where the giver is
        the owner and counts the fork from the beginning.
    """

    receiver: int
    rref: GloballyUniqueId
    fork: GloballyUniqueId
    parent: UserFork | None


# --- effects ---


class Send(NamedTuple):
    """Effect: deliver `message` to the worker of incarnation `to`, exactly once."""

    to: int
    message: Message


class Settled(NamedTuple):
    """Effect: end the waits for this fork to be counted; see `failed`."""

    user_fork: UserFork


class Never(NamedTuple):
    """Effect: fail the waits for this value, for this reason."""

    owner_value: Any
    reason: str


class Freed(NamedTuple):
    """Effect: release this value."""

    owner_value: Any


Effects = list[Send | Settled | Never | Freed]


# --- the owner's side: its values, and the forks that keep them ---


@dataclasses.dataclass(slots=True, eq=False)
class OwnedEntry:
    """One value that other workers hold.

    Attributes:
      owner_value: Where the value is or will be; opaque here.
      created: Whether its creation has begun; until then only the name is known.
      holders: Incarnation of the holder of each fork that is counted.
    """

    owner_value: Any
    created: bool
    holders: dict[GloballyUniqueId, int] = dataclasses.field(default_factory=dict)


class OwnedValues:
    """The values of one worker that have forks.

    An entry lives as long as it has a fork, or as its creation is still to come. What
    the worker's own program refers to beyond that is Python's to count.

    Args:
      me: Incarnation of the worker.
      new_owner_value: Makes the place for a value that is not there yet.
    """

    def __init__(self, me: int, new_owner_value: Callable[[], Any]) -> None:
        self._me = me
        self._new_owner_value = new_owner_value
        self._entries: dict[GloballyUniqueId, OwnedEntry] = {}
        self._creations: defaultdict[int, DedupWindow] = defaultdict(DedupWindow)
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[GloballyUniqueId, OwnedEntry]]:
        return iter(self._entries.items())

    @property
    def forks(self) -> int:
        """The number of forks that are counted."""
        return sum(len(entry.holders) for entry in self._entries.values())

    def find(self, rref: GloballyUniqueId) -> OwnedEntry | None:
        """Finds an entry, also of a value whose creation is still to come.

        None when the value was freed: all its holders have dropped it or are lost.
        """
        entry = self._entries.get(rref)
        # A fork or a fetch may overtake the creation.
        if entry is None and self._may_come(rref):
            entry = self._enter(rref, self._new_owner_value(), created=False)
        return entry

    def share(self, rref: GloballyUniqueId, owner_value: Any) -> OwnedEntry:
        """Finds or makes the entry of a value that this worker itself refers to."""
        return self._entries.get(rref) or self._enter(rref, owner_value, created=True)

    def create(self, holder: int, name: CreationName) -> OwnedEntry | None:
        """Begins the creation that `holder` asked for, which has the first fork.

        None for a duplicate: the request came before, or was aborted.
        """
        if not self._creations[holder].take(name.rref.local_id, name.low_water_mark):
            return None
        entry = self.share(name.rref, self._new_owner_value())
        entry.created = True
        entry.holders[name.fork] = holder
        return entry

    def count(
        self, rref: GloballyUniqueId, fork: GloballyUniqueId, holder: int
    ) -> bool:
        """Counts one more fork; False when the value was freed."""
        entry = self.find(rref)
        if entry is None:
            return False
        # It may be counted already, by the creation itself.
        entry.holders.setdefault(fork, holder)
        return True

    def discount(
        self, rref: GloballyUniqueId, fork: GloballyUniqueId, holder: int
    ) -> Effects:
        """Discounts a fork; frees the value if it was the last."""
        entry = self._entries.get(rref)
        # Only its holder may drop a fork; a peer could name any.
        if entry is None or entry.holders.get(fork) != holder:
            return []
        del entry.holders[fork]
        return self._free(rref, entry)

    def sweep(self, holder: int, reason: str) -> Effects:
        """Discounts all forks of the departed worker `holder`."""
        self._gone.add(holder)
        effects: Effects = []
        for rref, entry in list(self._entries.items()):
            for fork in [f for f, one in entry.holders.items() if one == holder]:
                del entry.holders[fork]
            # Its request to create the value will no longer come, and must not keep the
            # entry alive.
            if not entry.created and rref.created_on == holder:
                entry.created = True
                effects.append(Never(entry.owner_value, reason))
            effects += self._free(rref, entry)
        self._creations.pop(holder, None)
        return effects

    def _enter(
        self, rref: GloballyUniqueId, owner_value: Any, created: bool
    ) -> OwnedEntry:
        entry = self._entries[rref] = OwnedEntry(owner_value, created)
        return entry

    def _may_come(self, rref: GloballyUniqueId) -> bool:
        """Whether a request to create it can still arrive."""
        creator = rref.created_on
        # This worker registers its own values before their ids can travel.
        if creator == self._me or creator in self._gone:
            return False
        return not self._creations[creator].seen(rref.local_id)

    def _free(self, rref: GloballyUniqueId, entry: OwnedEntry) -> Effects:
        if entry.holders or not entry.created:
            return []
        del self._entries[rref]
        return [Freed(entry.owner_value)]


class Protocol:
    """The state machine of one worker; its user serializes all calls.

    Args:
      me: Incarnation of the worker.
      ids: Gives out the ids of references and forks; the caller's lock keeps the order.
      new_owner_value: Makes the place for a value that is not there yet.
    """

    def __init__(
        self, me: int, ids: IdCounter, new_owner_value: Callable[[], Any]
    ) -> None:
        self.me = me
        self._ids = ids
        self.owned = OwnedValues(me, new_owner_value)
        self.user_forks: dict[GloballyUniqueId, UserFork] = {}
        # Forks in transit, by receiver.
        self._given: defaultdict[int, Unsettled[GivenFork]] = defaultdict(Unsettled)
        self._taken: defaultdict[int, DedupWindow] = defaultdict(DedupWindow)
        self._creating: defaultdict[int, Unsettled[UserFork]] = defaultdict(Unsettled)
        self._gone: dict[int, str] = {}

    # --- creating ---

    def name(self) -> GloballyUniqueId:
        """Makes an id for a value of this worker."""
        return self._ids.next()

    def create(self, owner: int, into: list[UserFork]) -> tuple[UserFork, int]:
        """Names a value that another worker will be asked to create.

        The fork is in `into` before it is registered: for the caller, should this be
        interrupted.

        Returns:
          The creator's fork, and the low-water mark of its requests.
        """
        rref, fork = self._ids.next(), self._ids.next()
        user_fork = UserFork(owner, rref, fork, None)
        # The owner may have gone between the look-up and this.
        user_fork.failed = self._gone.get(owner)
        into.append(user_fork)
        self.user_forks[fork] = user_fork
        if user_fork.failed is not None:
            return user_fork, 0
        self._creating[owner].begin(rref.local_id, user_fork)
        return user_fork, self._creating[owner].low_water_mark

    def create_here(self, rref: GloballyUniqueId, owner_value: Any) -> None:
        """Counts a request of this worker to itself as a holder of the value."""
        self.owned.share(rref, owner_value).holders[rref] = self.me

    def not_created(self, user_fork: UserFork, reason: str) -> Effects:
        """Records that the request failed; the owner may have received it or not."""
        if user_fork.fork not in self.user_forks:
            return []
        if user_fork.failed is not None:  # the owner is gone
            return self._drop_if_over(user_fork)
        # After an `Abort` the owner counts the fork in either case, so the fork ends
        # like any other.
        low_water_mark = self._creating[user_fork.owner].low_water_mark
        return [
            Send(
                user_fork.owner,
                Abort(user_fork.rref, user_fork.fork, low_water_mark, reason),
            )
        ]

    def not_asked(self, user_fork: UserFork) -> None:
        """Forgets a reference whose request was never sent."""
        self.user_forks.pop(user_fork.fork, None)
        self._creating[user_fork.owner].end(user_fork.rref.local_id)

    def on_create(self, creator: int, name: CreationName) -> OwnedEntry | None:
        """Handles a request to create a value; None if it must not be followed."""
        return None if creator in self._gone else self.owned.create(creator, name)

    # --- giving ---

    def give(self, user_fork: UserFork, to: int) -> Ref:
        """Makes a fork for `to` of a reference that this worker holds."""
        # Guarantee G2: it is not dropped before the child is counted.
        user_fork.children += 1
        return self._give(user_fork.owner, user_fork.rref, to, user_fork)

    def give_owned(self, rref: GloballyUniqueId, owner_value: Any, to: int) -> Ref:
        """Makes a fork for `to` of a reference to this worker's own value."""
        entry = self.owned.share(rref, owner_value)
        ref = self._give(self.me, rref, to, None)
        entry.holders[ref.fork] = to
        return ref

    def undelivered(self, fork: GloballyUniqueId, to: int) -> Effects:
        """Handles the loss, certain or possible, of the message with a fork."""
        given = self.in_transit(fork, to)
        if given is None:
            return []
        if to in self._gone:
            self._given[to].end(fork.local_id)
            return self._returned(given)
        owner = self.me if given.parent is None else given.parent.owner
        low_water_mark = self._given[to].low_water_mark
        return [Send(to, Take(Ref(owner, given.rref, fork, low_water_mark)))]

    def in_transit(self, fork: GloballyUniqueId, receiver: int) -> GivenFork | None:
        """Finds a fork that is in transit to that worker."""
        given = self._given[receiver].get(fork.local_id)
        return given if given is not None and given.fork == fork else None

    @property
    def forks_in_transit(self) -> int:
        """The number of forks that were given and have not been accepted."""
        return sum(map(len, self._given.values()))

    # --- taking ---

    def take(
        self, giver: int, ref: Ref
    ) -> tuple[UserFork | OwnedEntry | None, Effects]:
        """Takes a reference that arrived: a fork, or the entry of an own value.

        None if the fork is no longer available: it came before, or it came home and
        the value was freed, because its giver is lost.
        """
        window = self._taken[giver]
        # `Take` and the late message itself may both come; the first one counts.
        if window.seen(ref.fork.local_id):
            return None, []
        # It came home: the value is found by its id, and the fork is never counted.
        if ref.owner == self.me:
            window.take(ref.fork.local_id, ref.low_water_mark)
            return self.owned.find(ref.rref), [Send(giver, Accept(ref.fork))]
        user_fork = UserFork(ref.owner, ref.rref, ref.fork, giver)
        user_fork.failed = self._gone.get(ref.owner)
        self.user_forks[ref.fork] = user_fork
        # Last, so that `decline` can make up for an interrupt.
        window.take(ref.fork.local_id, ref.low_water_mark)
        return user_fork, self._confirm(user_fork, giver)

    def decline(self, giver: int, ref: Ref) -> Effects:
        """Drops a reference of an answer that could not be read, or only in part.

        No object of the program has the reference, whether it was taken or not.
        """
        if giver in self._gone:
            return []
        taken, effects = self.take(giver, ref)
        if taken is None:
            # It may have been sent: a second one changes nothing.
            accept: Effects = [Send(giver, Accept(ref.fork))]
            if ref.owner == self.me:
                return accept
            taken = self.user_forks.get(ref.fork)
            if isinstance(taken, UserFork):
                effects = self._confirm(taken, giver) if taken.pending else accept
        return effects + self.drop(taken) if isinstance(taken, UserFork) else effects

    def on_take(self, giver: int, message: Take) -> Effects:
        """Takes and drops a fork whose message was lost."""
        if giver in self._gone:
            return []  # it went with its giver, and `gone` forgot what had come
        taken, effects = self.take(giver, message.ref)
        return effects + self.drop(taken) if isinstance(taken, UserFork) else effects

    # --- dropping ---

    def drop(self, user_fork: UserFork) -> Effects:
        """Drops a fork that the program no longer uses; idempotent."""
        user_fork.dropped = True
        return self._drop_if_over(user_fork)

    # --- what others say ---

    def on_fork(self, holder: int, message: Fork) -> bool:
        """Counts a fork; False when the value was freed."""
        if holder in self._gone:
            return False
        return self.owned.count(message.rref, message.fork, holder)

    def on_abort(self, creator: int, message: Abort) -> Effects:
        """Handles an aborted creation; without effect if it has begun."""
        name = CreationName(message.rref, message.fork, message.low_water_mark)
        entry = self.on_create(creator, name)
        return [] if entry is None else [Never(entry.owner_value, message.reason)]

    def on_accept(self, receiver: int, message: Accept) -> Effects:
        """Handles the arrival of a fork that this worker gave."""
        given = self.in_transit(message.fork, receiver)
        if given is None:
            return []
        self._given[receiver].end(message.fork.local_id)
        # Its `Delete` ends it.
        if given.parent is None and receiver != self.me:
            return []  # the owner's gift, counted from the beginning
        return self._returned(given)

    def on_delete(self, holder: int, message: Delete) -> Effects:
        """Handles a holder's dropped fork."""
        return self.owned.discount(message.rref, message.fork, holder)

    def answered(self, fork: GloballyUniqueId, refusal: str | None = None) -> Effects:
        """Handles the owner's answer to a creation, a `Fork` or an `Abort`.

        The owner counts the fork, or refuses it because the value was freed.
        """
        user_fork = self.user_forks.get(fork)
        if user_fork is None:
            return []
        if refusal is not None:
            return self._failed(user_fork, refusal)
        return self._counted(user_fork)

    # --- workers go ---

    def gone(self, worker: int, reason: str) -> Effects:
        """Handles the loss or departure of a worker."""
        self._gone[worker] = reason
        # Its incarnation never comes again, so nothing of it needs deduplication.
        self._taken.pop(worker, None)
        self._creating.pop(worker, None)
        effects = self.owned.sweep(worker, reason)
        for given in self._given.pop(worker, Unsettled()).clear():
            effects += self._returned(given)
        for user_fork in list(self.user_forks.values()):
            if user_fork.owner == worker:
                effects += self._failed(user_fork, reason)
        return effects

    # --- inside ---

    def _give(
        self, owner: int, rref: GloballyUniqueId, to: int, parent: UserFork | None
    ) -> Ref:
        fork, given = self._ids.next(), self._given[to]
        given.begin(fork.local_id, GivenFork(to, rref, fork, parent))
        return Ref(owner, rref, fork, given.low_water_mark)

    def _confirm(self, user_fork: UserFork, giver: int) -> Effects:
        """Makes the owner count a fork that has arrived, and informs the giver."""
        if user_fork.failed is not None:
            return [Send(giver, Accept(user_fork.fork))]
        # The owner counted it when it gave it away.
        if giver == user_fork.owner:
            return self._counted(user_fork)
        return [Send(user_fork.owner, Fork(user_fork.rref, user_fork.fork))]

    def _returned(self, given: GivenFork) -> Effects:
        """Ends the giver's share in a fork that has arrived or is lost."""
        if given.parent is not None:
            given.parent.children -= 1
            return self._drop_if_over(given.parent)
        return self.owned.discount(given.rref, given.fork, given.receiver)

    def _counted(self, user_fork: UserFork) -> Effects:
        if not user_fork.pending:
            return []
        user_fork.counted = True
        return self._settled(user_fork)

    def _failed(self, user_fork: UserFork, reason: str) -> Effects:
        if user_fork.failed is not None:
            return []
        # In this order: `pending` depends on `failed`.
        was_pending, user_fork.failed = user_fork.pending, reason
        return (
            self._settled(user_fork) if was_pending else self._drop_if_over(user_fork)
        )

    def _settled(self, user_fork: UserFork) -> Effects:
        effects: Effects = [Settled(user_fork)]
        if user_fork.giver is not None:
            effects.append(Send(user_fork.giver, Accept(user_fork.fork)))
        elif user_fork.owner in self._creating:
            self._creating[user_fork.owner].end(user_fork.rref.local_id)
        return effects + self._drop_if_over(user_fork)

    def _drop_if_over(self, user_fork: UserFork) -> Effects:
        if not user_fork.over or user_fork.fork not in self.user_forks:
            return []
        del self.user_forks[user_fork.fork]
        if user_fork.failed is not None:
            return []
        return [Send(user_fork.owner, Delete(user_fork.rref, user_fork.fork))]
