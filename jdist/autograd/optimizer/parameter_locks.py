"""One lock for each variable, so that steps on common parameters come one by one.

Whoever steps a set of variables holds the locks of all of them, taken in one order that
everybody follows. Steps on the same set, or on sets that overlap, so exclude each other
and never wait in a circle; steps on sets without a common variable run side by side.
"""

from collections.abc import Iterable

from jdist.autograd.graph.variable import Variable
from jdist.rpc.extension import InterruptSafeLock

BUSY = "while another step held one of the parameters"
"""What is said of a step that comes too late for its turn, see `holding`."""


def locks_of(variables: Iterable[Variable]) -> list[InterruptSafeLock]:
    """The locks of these variables, in the order in which to take them.

    The order is that of addresses. It holds as long as the variables live, so whoever
    keeps the locks must keep the variables.
    """
    return [variable.step_lock for variable in sorted(variables, key=id)]
