"""The protocol that keeps a value alive as long as anybody holds a reference to it.

This is all of its rules, as one state machine per worker without threads, clocks or
sockets: methods are what happens, and each returns what is to be done about it.

Two guarantees carry it (torch's names):

- G1. The owner is told when a holder drops its fork.
- G2. A fork is not dropped before every fork made of it is counted by the owner.

Hence at any time each holder is counted itself, or descends by forks that are not yet
counted from one that is; and the value is freed only when nobody is counted. In detail:

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

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

from jdist.rpc.base.ids import GloballyUniqueId, IdCounter
from jdist.rpc.rref.held import Held, Holdings
from jdist.rpc.rref.messages import Abort, Accept, Delete, Fork, Message, Ref, Take
from jdist.rpc.rref.owned import Entry, Owned
from jdist.rpc.rref.transit import Given, Transit
from jdist.rpc.rref.window import UnderWay, Window


class Post(NamedTuple):
    """To be done: have `message` arrive at the worker numbered `to`, exactly once."""

    to: int
    message: Message


class Settled(NamedTuple):
    """To be done: whoever waits for this fork to be counted goes on; see `failed`."""

    held: Held


class Never(NamedTuple):
    """To be done: the value for this cell will not come, for this reason."""

    cell: Any
    reason: str


class Freed(NamedTuple):
    """To be done: let go of this cell."""

    cell: Any


Effects = list[Post | Settled | Never | Freed]


class Created(NamedTuple):
    """A reference to a value that another worker was asked to create."""

    held: Held
    floor: int


class Protocol:
    """One worker's part. Whoever has it locks it.

    Args:
      me: Number of the worker. Workers are known by theirs, which never come again.
      ids: Gives out the ids of references and forks; the caller's lock keeps the order.
      new_cell: Makes the place for a value that is not there yet.
    """

    def __init__(self, me: int, ids: IdCounter, new_cell: Callable[[], Any]) -> None:
        self.me = me
        self._ids = ids
        self.owned = Owned(me, new_cell)
        self.holdings = Holdings()
        self.transit = Transit()
        self._taken: collections.defaultdict[int, Window]
        self._taken = collections.defaultdict(Window)
        self._creating: collections.defaultdict[int, UnderWay]
        self._creating = collections.defaultdict(UnderWay)
        self._gone: dict[int, str] = {}

    # --- creating ---

    def name(self) -> GloballyUniqueId:
        """The id for a value of this worker's own."""
        return self._ids.next()

    def create(self, owner: int) -> Created:
        """Another worker will be asked to create a value."""
        rref, fork = self._ids.next(), self._ids.next()
        held = self.holdings.add(Held(owner, rref, fork, None))
        held.failed = self._gone.get(owner)
        if held.failed is not None:
            return Created(held, 0)
        self._creating[owner].begin(rref.local_id)
        return Created(held, self._creating[owner].floor)

    def created(self, held: Held) -> Effects:
        """The owner did as it was asked."""
        return self._counted(held)

    def not_created(self, held: Held, reason: str) -> Effects:
        """The request failed, and who knows whether the owner got it."""
        if held.failed is not None:  # the owner is gone
            return self._drop_if_over(held)
        floor = self._creating[held.owner].floor
        return [Post(held.owner, Abort(held.rref, held.fork, floor, reason))]

    def not_asked(self, held: Held) -> None:
        """The request was never sent: there is no such reference."""
        self.holdings.remove(held)
        self._creating[held.owner].end(held.rref.local_id)

    def on_create(
        self, creator: int, rref: GloballyUniqueId, fork: GloballyUniqueId, floor: int
    ) -> Entry | None:
        """A request to create a value arrived; None when it is not to be followed."""
        if creator in self._gone:
            return None
        return self.owned.create(rref, fork, creator, floor)

    # --- giving ---

    def give(self, held: Held, to: int) -> Ref:
        """A reference is about to be sent, by one that holds it."""
        held.children += 1
        return self._give(held.owner, held.rref, to, held)

    def give_owned(self, rref: GloballyUniqueId, cell: Any, to: int) -> Ref:
        """A reference is about to be sent, by its owner."""
        entry = self.owned.share(rref, cell)
        ref = self._give(self.me, rref, to, None)
        entry.holders[ref.fork] = to
        return ref

    def undelivered(self, fork: GloballyUniqueId, to: int) -> Effects:
        """The message that it was sent with is lost, may be, or was never sent."""
        given = self.transit.find(fork, to)
        if given is None:
            return []
        if to in self._gone:
            self.transit.end(fork, to)
            return self._returned(given)
        owner = self.me if given.parent is None else given.parent.owner
        return [Post(to, Take(Ref(owner, given.rref, fork, self.transit.floor(to))))]

    # --- taking ---

    def take(self, giver: int, ref: Ref) -> tuple[Held | Entry | None, Effects]:
        """A reference arrived: a fork of this worker's, or its own value's entry.

        None when the fork is not to be had any more: it came before, or it came home
        and the value was freed, because the one who gave it is lost.
        """
        if not self._taken[giver].take(ref.fork.local_id, ref.floor):
            return None, []
        if ref.owner == self.me:
            return self.owned.find(ref.rref), [Post(giver, Accept(ref.fork))]
        held = self.holdings.add(Held(ref.owner, ref.rref, ref.fork, giver))
        held.failed = self._gone.get(ref.owner)
        if held.failed is not None:
            return held, [Post(giver, Accept(ref.fork))]
        if giver == ref.owner:
            return held, self._counted(held)
        return held, [Post(ref.owner, Fork(ref.rref, ref.fork))]

    def on_take(self, giver: int, message: Take) -> Effects:
        """The message with this fork was lost: it is taken, and dropped."""
        taken, effects = self.take(giver, message.ref)
        return effects + self.drop(taken) if isinstance(taken, Held) else effects

    # --- dropping ---

    def drop(self, held: Held) -> Effects:
        """The program has no use for this fork any more; any number of times."""
        held.dropped = True
        return self._drop_if_over(held)

    # --- what others say ---

    def on_fork(self, holder: int, message: Fork) -> bool:
        """Counts a fork; False when the value was freed."""
        if holder in self._gone:
            return False
        return self.owned.count(message.rref, message.fork, holder)

    def on_abort(self, creator: int, message: Abort) -> Effects:
        """A creation is to be forgotten if it has not begun."""
        rref, fork, floor, reason = message
        entry = self.on_create(creator, rref, fork, floor)
        return [] if entry is None else [Never(entry.cell, reason)]

    def on_accept(self, receiver: int, message: Accept) -> Effects:
        """A fork that this worker gave has arrived and is counted."""
        given = self.transit.end(message.fork, receiver)
        if given is None:
            return []
        if given.parent is None and receiver != self.me:
            return []  # the owner's gift, counted from the beginning
        return self._returned(given)

    def on_delete(self, holder: int, message: Delete) -> Effects:
        """A holder dropped its fork."""
        cell = self.owned.discount(message.rref, message.fork, holder)
        return [] if cell is None else [Freed(cell)]

    def counted(self, fork: GloballyUniqueId) -> Effects:
        """The owner's answer to `Fork` or `Abort`: it counts the fork."""
        held = self.holdings.find(fork)
        return [] if held is None else self._counted(held)

    def refused(self, fork: GloballyUniqueId, reason: str) -> Effects:
        """The owner's answer to `Fork`: the value was freed."""
        held = self.holdings.find(fork)
        return [] if held is None else self._failed(held, reason)

    # --- workers go ---

    def gone(self, worker: int, reason: str) -> Effects:
        """A worker is lost or has left, and its part in everything ends."""
        self._gone[worker] = reason
        self._taken.pop(worker, None)
        self._creating.pop(worker, None)
        swept = self.owned.sweep(worker)
        effects: Effects = [Never(cell, reason) for cell in swept.orphans]
        effects += [Freed(cell) for cell in swept.freed]
        for given in self.transit.sweep(worker):
            effects += self._returned(given)
        for held in self.holdings:
            if held.owner == worker:
                effects += self._failed(held, reason)
        return effects

    # --- inside ---

    def _give(
        self, owner: int, rref: GloballyUniqueId, to: int, parent: Held | None
    ) -> Ref:
        fork = self._ids.next()
        floor = self.transit.begin(Given(to, rref, fork, parent))
        return Ref(owner, rref, fork, floor)

    def _returned(self, given: Given) -> Effects:
        """The giver's own share in a gift ends."""
        if given.parent is not None:
            given.parent.children -= 1
            return self._drop_if_over(given.parent)
        cell = self.owned.discount(given.rref, given.fork, given.receiver)
        return [] if cell is None else [Freed(cell)]

    def _counted(self, held: Held) -> Effects:
        if not held.pending:
            return []
        held.counted = True
        return self._settled(held)

    def _failed(self, held: Held, reason: str) -> Effects:
        if held.failed is not None:
            return []
        was_pending, held.failed = held.pending, reason
        return self._settled(held) if was_pending else self._drop_if_over(held)

    def _settled(self, held: Held) -> Effects:
        effects: Effects = [Settled(held)]
        if held.giver is not None:
            effects.append(Post(held.giver, Accept(held.fork)))
        elif held.owner in self._creating:
            self._creating[held.owner].end(held.rref.local_id)
        return effects + self._drop_if_over(held)

    def _drop_if_over(self, held: Held) -> Effects:
        if not held.over or self.holdings.find(held.fork) is not held:
            return []
        self.holdings.remove(held)
        if held.failed is not None:
            return []
        return [Post(held.owner, Delete(held.rref, held.fork))]
