"""One lock for each variable, so that steps on common parameters come one by one.

Whoever steps a set of variables holds the locks of all of them, taken in one order that
everybody follows. Steps on the same set, or on sets that overlap, so exclude each other
and never wait in a circle; steps on sets without a common variable run side by side.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

from jdist.autograd.variable import Variable
from jdist.rpc import RpcTimeout
from jdist.rpc.deadline import Deadline, exceeded


def locks_of(variables: Iterable[Variable]) -> list[threading.Lock]:
    """The locks of these variables, in the order in which to take them.

    The order is that of addresses. It holds as long as the variables live, so whoever
    keeps the locks must keep the variables.
    """
    return [variable.step_lock for variable in sorted(variables, key=id)]


@contextlib.contextmanager
def holding(locks: Sequence[threading.Lock], limit: Deadline) -> Iterator[None]:
    """Within it, nobody else has one of these locks.

    Raises:
      RpcTimeout: The deadline came while somebody else had one.
    """
    with contextlib.ExitStack() as held:
        for lock in locks:
            seconds = limit.remaining()
            if not lock.acquire(timeout=-1 if seconds is None else seconds):
                what = "while another step held one of the parameters"
                raise RpcTimeout(f"{exceeded(limit)} {what}.")
            held.callback(lock.release)
        yield
