"""The identity of a worker: name, rank and incarnation."""

import dataclasses
import re

from jdist._errors import requirement

__all__ = ["MOST_WORKERS", "WorkerInfo", "incarnation_of"]


# torch's rule, word for word in the messages its users search for.
_NAME = re.compile(r"[A-Za-z0-9_:-]+")
_LONGEST_NAME = 127
MOST_WORKERS = 1 << 16
"""That a group can ever have: their incarnations fill the top 16 bits of ids."""


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
            raise ValueError(requirement("WorkerInfo(name=...)", rule, repr(self.name)))
        if len(self.name) > _LONGEST_NAME:
            rule = f"must be shorter than {_LONGEST_NAME + 1} characters"
            raise ValueError(requirement("WorkerInfo(name=...)", rule, len(self.name)))
        if not _NAME.fullmatch(self.name):
            rule = "is refused: Worker name must match [A-Za-z0-9_:-]+"
            raise ValueError(requirement("WorkerInfo(name=...)", rule, repr(self.name)))
        if not 0 <= self.id < MOST_WORKERS:
            rule = "must be in 0..65535"
            raise ValueError(requirement("WorkerInfo(id=...)", rule, self.id))


def incarnation_of(member: WorkerInfo) -> int:
    """The incarnation of a worker that belongs to a group."""
    assert member.incarnation is not None
    return member.incarnation
