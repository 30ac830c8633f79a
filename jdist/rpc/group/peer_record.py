"""What a worker is told of another one when it joins."""

from typing import Any, NamedTuple

from jdist.rpc.base.worker_info import WorkerInfo


class PeerRecord(NamedTuple):
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
        return [info.name, info.id, info.incarnation, self.identity, self.address]

    @classmethod
    def of_row(cls, row: Any) -> "PeerRecord":
        """The inverse of `row`.

        Example:
          >>> info = WorkerInfo("a", 0, incarnation=7)
          >>> one = PeerRecord(info, "a:5f", ["127.0.0.1", 1])
          >>> back = PeerRecord.of_row(one.row())
          >>> back == one, back.info.incarnation
          (True, 7)
        """
        name, rank, incarnation, identity, address = row
        return cls(WorkerInfo(name, rank, incarnation), identity, address)
