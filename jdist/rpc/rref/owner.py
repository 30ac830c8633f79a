"""The owner's side of the protocol: its values, and the forks that keep them."""

import collections
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jdist.rpc.base.dedup_window import DedupWindow
from jdist.rpc.base.ids import GloballyUniqueId


class OwnedEntry:
    """One value that other workers hold.

    Attributes:
      owner_value: Where the value is or will be; opaque here.
      created: Whether its creation has begun; until then only the name is known.
      holders: Incarnation of the holder of each fork that is counted.
    """

    __slots__ = ("created", "holders", "owner_value")

    def __init__(self, owner_value: Any, created: bool) -> None:
        self.owner_value = owner_value
        self.created = created
        self.holders: dict[GloballyUniqueId, int] = {}


class Swept(NamedTuple):
    """Consequences of discounting all forks of a worker.

    Attributes:
      freed: Values without a holder.
      orphans: Values that the worker would have created.
    """

    freed: list[Any]
    orphans: list[Any]


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
        self._creations: collections.defaultdict[int, DedupWindow]
        self._creations = collections.defaultdict(DedupWindow)
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

    def create(
        self,
        rref: GloballyUniqueId,
        fork: GloballyUniqueId,
        holder: int,
        low_water_mark: int,
    ) -> OwnedEntry | None:
        """Begins the creation that `holder` asked for, which has the first fork.

        None for a duplicate: the request came before, or was aborted.
        """
        if not self._creations[holder].take(rref.local_id, low_water_mark):
            return None
        entry = self._entries.get(rref)
        if entry is None:
            entry = self._enter(rref, self._new_owner_value(), created=True)
        entry.created = True
        entry.holders[fork] = holder
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
    ) -> Any:
        """Discounts a fork; returns the value's place if it was the last, else None."""
        entry = self._entries.get(rref)
        # Only its holder may drop a fork; a peer could name any.
        if entry is None or entry.holders.get(fork) != holder:
            return None
        del entry.holders[fork]
        return self._free(rref, entry)

    def sweep(self, holder: int) -> Swept:
        """Discounts all forks of the departed worker `holder`."""
        self._gone.add(holder)
        swept = Swept([], [])
        for rref, entry in list(self._entries.items()):
            for fork in [f for f, one in entry.holders.items() if one == holder]:
                del entry.holders[fork]
            # Its request to create the value will no longer come, and must not keep the
            # entry alive.
            if not entry.created and rref.created_on == holder:
                entry.created = True
                swept.orphans.append(entry.owner_value)
            freed = self._free(rref, entry)
            if freed is not None:
                swept.freed.append(freed)
        self._creations.pop(holder, None)
        return swept

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

    def _free(self, rref: GloballyUniqueId, entry: OwnedEntry) -> Any:
        if entry.holders or not entry.created:
            return None
        del self._entries[rref]
        return entry.owner_value
