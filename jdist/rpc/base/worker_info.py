"""The identity of a worker: name, rank and incarnation."""

import dataclasses
import re
from typing import Any, NamedTuple

from jdist._errors import quoted, value_error

# torch's rule, word for word in the messages its users search for.
_NAME = re.compile(r"[A-Za-z0-9_:-]+")
_LONGEST_NAME = 127
MOST_WORKERS = 1 << 16
"""Largest number of workers that a group can ever have: their incarnations fill the top
16 bits of ids."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class WorkerInfo:
    """Name and rank of a worker: hashable, comparable, sendable.

    Attributes:
      name: Unique in the group: 1 to 127 of the characters `A-Za-z0-9_:-`.
      id: The worker's rank, 0 to 65535.
      incarnation: Tells it from an earlier worker of its name and rank; None before it
        belongs to a group. Unique in the group's life, and the top 16 bits of every
        id. It is not compared: workers that are equal may differ in it.

    Raises:
      ValueError: The name or the rank is not allowed.

    Source: `torch.distributed.rpc.WorkerInfo`.

    Example:
      >>> WorkerInfo("trainer", 1)
      WorkerInfo(name='trainer', id=1)
    """

    name: str
    id: int
    incarnation: int | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            rule = "must be non-empty: worker name must be non-empty"
            raise value_error("WorkerInfo(name=...)", rule, quoted(self.name))
        if len(self.name) > _LONGEST_NAME:
            rule = f"must be shorter than {_LONGEST_NAME + 1} characters"
            raise value_error("WorkerInfo(name=...)", rule, len(self.name))
        if not _NAME.fullmatch(self.name):
            rule = "is refused: Worker name must match [A-Za-z0-9_:-]+"
            raise value_error("WorkerInfo(name=...)", rule, quoted(self.name))
        if not 0 <= self.id < MOST_WORKERS:
            raise value_error("WorkerInfo(id=...)", "must be in 0..65535", self.id)


class PeerRecord(NamedTuple):
    """The data by which other workers connect to a worker.

    Attributes:
      info: Name, rank and incarnation of the worker.
      transport_name: The name that its transport proves in a handshake. In a group of
        fixed size it is the worker's own. In an elastic one it has a random suffix, so
        that a worker which was given up because it was frozen, and thaws, is not taken
        for its successor.
      address: Address at which it listens.
    """

    info: WorkerInfo
    transport_name: str
    address: Any

    def row(self) -> list[Any]:
        """The record as plain values, for the wire."""
        info = self.info
        named = [info.name, info.id, info.incarnation]
        return [*named, self.transport_name, self.address]

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


def incarnation_of(member: WorkerInfo) -> int:
    """Return the incarnation of a worker that belongs to a group."""
    assert member.incarnation is not None
    return member.incarnation
