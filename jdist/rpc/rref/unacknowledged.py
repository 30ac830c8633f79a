"""Forks that this worker gave to others and that were not acknowledged yet."""

import collections
from typing import NamedTuple

from jdist.rpc.base.ids import GloballyUniqueId
from jdist.rpc.rref.dedup_window import UnsettledNumbers
from jdist.rpc.rref.user_fork import UserFork

__all__ = ["GivenFork", "Unacknowledged"]


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


class Unacknowledged:
    """The forks in transit from one worker, by receiver."""

    def __init__(self) -> None:
        self._given: dict[GloballyUniqueId, GivenFork] = {}
        self._numbers: collections.defaultdict[int, UnsettledNumbers]
        self._numbers = collections.defaultdict(UnsettledNumbers)

    def __len__(self) -> int:
        return len(self._given)

    def begin(self, given: GivenFork) -> int:
        """It is about to be sent; the low-water mark to send with it."""
        self._given[given.fork] = given
        numbers = self._numbers[given.receiver]
        numbers.begin(given.fork.local_id)
        return numbers.low_water_mark

    def find(self, fork: GloballyUniqueId, receiver: int) -> GivenFork | None:
        """The fork, if it is under way to that worker."""
        given = self._given.get(fork)
        return given if given is not None and given.receiver == receiver else None

    def end(self, fork: GloballyUniqueId, receiver: int) -> GivenFork | None:
        """Ends a fork that arrived or was never sent; None when it has ended before."""
        given = self.find(fork, receiver)
        if given is not None:
            del self._given[fork]
            self._numbers[receiver].end(fork.local_id)
        return given

    def low_water_mark(self, receiver: int) -> int:
        """All forks below it have arrived there."""
        return self._numbers[receiver].low_water_mark

    def sweep(self, receiver: int) -> list[GivenFork]:
        """Ends and returns all forks in transit to a worker that is gone."""
        self._numbers.pop(receiver, None)
        lost = [given for given in self._given.values() if given.receiver == receiver]
        for given in lost:
            del self._given[given.fork]
        return lost
