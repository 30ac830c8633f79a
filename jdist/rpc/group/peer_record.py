"""What a worker is told of another one when it joins."""

from typing import Any, NamedTuple

from jdist.rpc.base.worker_info import WorkerInfo


class Listing(NamedTuple):
    """One worker of a group.

    Attributes:
      info: Its name, rank and number.
      identity: The name that its transport proves. In a group of fixed size it is the
        worker's own. In an elastic one it is new each time that somebody joins, so
        that nobody is taken for a later worker of the same name: say, one that was
        given up because it was frozen, and thaws.
      address: Where it listens.
    """

    info: WorkerInfo
    identity: str
    address: Any

    def row(self) -> list[Any]:
        """As plain values."""
        info = self.info
        return [info.name, info.id, info.number, self.identity, self.address]

    @classmethod
    def of_row(cls, row: Any) -> "Listing":
        """The inverse of `row`.

        Example:
          >>> one = Listing(WorkerInfo("a", 0, number=7), "a:5f", ["127.0.0.1", 1])
          >>> Listing.of_row(one.row()) == one, Listing.of_row(one.row()).info.number
          (True, 7)
        """
        name, rank, number, identity, address = row
        return cls(WorkerInfo(name, rank, number), identity, address)
