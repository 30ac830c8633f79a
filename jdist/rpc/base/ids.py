"""Ids that are unique in the whole group, made without communication."""

import itertools
from typing import Annotated, NamedTuple

import msgspec

from jdist._errors import value_error

LOCAL_BITS = 48


class GloballyUniqueId(NamedTuple):
    """An id of 64 bits: the worker that made it (16) and a counter of that worker (48).

    Attributes:
      created_on: Incarnation of the worker, 0 to 65535: its rank, unless an earlier
        worker had that.
      local_id: The counter.

    Source: `torch/csrc/distributed/rpc/types.h`.

    Example:
      >>> GloballyUniqueId(3, 1)
      GloballyUniqueId(created_on=3, local_id=1)
    """

    created_on: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    local_id: Annotated[int, msgspec.Meta(ge=0, lt=1 << LOCAL_BITS)]

    def packed(self) -> int:
        """Both in one number of 64 bits, the worker on top."""
        return self.created_on << LOCAL_BITS | self.local_id

    @classmethod
    def unpacked(cls, number: int) -> "GloballyUniqueId":
        """The inverse of `packed`.

        Raises:
          ValueError: The number does not have 64 bits.

        Example:
          >>> GloballyUniqueId.unpacked(GloballyUniqueId(3, 1).packed())
          GloballyUniqueId(created_on=3, local_id=1)
        """
        if not 0 <= number < 1 << 64:
            raise value_error("unpacked(number)", "must have 64 bits", number)
        return cls(number >> LOCAL_BITS, number & ((1 << LOCAL_BITS) - 1))


class IdCounter:
    """Makes the ids of one worker in rising order; thread-safe.

    Args:
      worker: Number of the worker.
      first: The first counter.

    Example:
      >>> ids = IdCounter(worker=2)
      >>> ids.next().local_id, ids.next().local_id
      (0, 1)
    """

    def __init__(self, worker: int, first: int = 0) -> None:
        self._worker = worker
        # Atomic: the counter is written in C, so that no lock is needed.
        self._numbers = itertools.count((worker << LOCAL_BITS) + first)

    def next(self) -> GloballyUniqueId:
        """Makes a new id.

        Raises:
          OverflowError: All 2**48 are used up.
        """
        return GloballyUniqueId.unpacked(self.packed())

    def packed(self) -> int:
        """Makes a new id, in one number; raises what `next` raises."""
        number = next(self._numbers)
        if number >> LOCAL_BITS != self._worker:
            raise OverflowError(f"Worker {self._worker} has no ids left.")
        return number
