"""Ids of contexts and messages: 64 bits, the worker on top, a counter below.

A worker gives them out without asking anybody. From one calling thread they repeat from
run to run.
"""

from jdist._errors import requirement
from jdist.rpc.extension import LOCAL_BITS, GloballyUniqueId, IdCounter

LAST_WORKER = (1 << 16) - 1


class Ids:
    """The ids that one worker gives out.

    Args:
      worker: Its number, 0 to 65535: in a fixed group its rank.
      first: The first number below that, for contexts. Messages begin at 1: 0 is
        the id of none.

    Raises:
      ValueError: The worker id has more than 16 bits.

    Source: `torch/csrc/distributed/autograd/context/container.h`.

    Example:
      >>> ids = Ids(worker=3)
      >>> ids.context() >> 48, ids.message() - (3 << 48)
      (3, 1)
    """

    def __init__(self, worker: int, first: int = 0) -> None:
        if type(worker) is not int or not 0 <= worker <= LAST_WORKER:
            rule = f"must be a worker id in 0..{LAST_WORKER}"
            raise ValueError(requirement("Ids(worker)", rule, worker))
        self.worker = worker
        self._contexts = IdCounter(worker, first)
        self._messages = IdCounter(worker, max(first, 1))

    @property
    def highest(self) -> int:
        """The last id that this worker could give out."""
        return (self.worker + 1 << LOCAL_BITS) - 1

    def context(self) -> int:
        """A new id for a context.

        Raises:
          OverflowError: All 2**48 are used up.
        """
        return self._contexts.packed()

    def message(self) -> int:
        """A new id for a request or a reply; raises what `context` raises."""
        return self._messages.packed()


def maker(packed: int) -> int:
    """Number of the worker that gave out an id.

    Example:
      >>> maker((2 << 48) + 5)
      2
    """
    return GloballyUniqueId.unpacked(packed).created_on
