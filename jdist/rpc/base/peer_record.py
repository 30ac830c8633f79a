"""The record of a worker that the others of its group are given."""

from typing import Any, NamedTuple

from jdist.rpc.base.worker_info import WorkerInfo

__all__ = ["PeerRecord"]


class PeerRecord(NamedTuple):
    """One worker of a group, as others need it to connect to it.

    Attributes:
      info: Its name, rank and incarnation.
      transport_name: The name that its transport proves in a handshake. In a group of
        fixed size it is the worker's own. In an elastic one it has a random suffix, so
        that a worker which was given up because it was frozen, and thaws, is not taken
        for its successor.
      address: Where it listens.
    """

    info: WorkerInfo
    transport_name: str
    address: Any

    def row(self) -> list[Any]:
        """As plain values, for the wire."""
        info = self.info
        who = [info.name, info.id, info.incarnation]
        return [*who, self.transport_name, self.address]

    @classmethod
    def of_row(cls, row: Any) -> "PeerRecord":
        """The inverse of `row`.

        Example:
          >>> one = PeerRecord(WorkerInfo("a", 0, 7), "a:5f", ["127.0.0.1", 1])
          >>> PeerRecord.of_row(one.row()) == one
          True
          >>> PeerRecord.of_row(one.row()).info.incarnation
          7
        """
        name, rank, incarnation, transport_name, address = row
        return cls(WorkerInfo(name, rank, incarnation), transport_name, address)
