"""Scheduling classes of the threads in a process that `spawn` or `launch` started.

Linux gives each thread a scheduling class, which the threads that it starts inherit.
Started processes begin in the batch class, in which a thread that wakes up never
preempts a running one. This suits the threads of XLA and gloo on a core of their own:
preemption would only delay the other thread. It does not suit a thread that waits for a
message: in the batch class it waits for the end of the running thread's time slice, up
to 4 ms, whenever another program has the core. A process that becomes a worker
therefore leaves the class; threads that JAX started earlier stay in it. A worker of a
pipeline or of an elastic run enters it again, because its messages are large and arrive
while it computes.
"""

import contextlib
import os
from collections.abc import Iterator

BATCH = "JDIST_BATCH_CLASS"
"""The environment variable of a process that was started in the batch class."""


def leave_batch_class() -> None:
    """Moves this thread to the ordinary class, unless the user chose another one."""
    if _begun_in_batch_class():
        _enter(os.SCHED_OTHER)


def enter_batch_class() -> None:
    """Moves the threads of the ordinary class to that in which the process began."""
    # All threads: one that receives a large message must not preempt a computing one.
    if not _begun_in_batch_class():
        return
    # Threads that are not moved yet may start others meanwhile, which inherit their
    # class: done once a look finds none to move.
    while sum(_moved(int(thread)) for thread in os.listdir("/proc/self/task")):
        pass


def _moved(thread: int) -> bool:
    """Moves a thread from the ordinary to the batch class, if it is there and may."""
    try:
        if os.sched_getscheduler(thread) != os.SCHED_OTHER:
            return False
    except OSError:  # it has ended
        return False
    return _enter(os.SCHED_BATCH, thread)


@contextlib.contextmanager
def in_batch_class() -> Iterator[None]:
    """Starts threads of its block in the class in which the process began.

    A no-op in a process that was not put into the batch class.
    """
    if not _begun_in_batch_class():
        yield
        return
    before = os.sched_getscheduler(0)
    _enter(os.SCHED_BATCH)
    try:
        yield
    finally:
        _enter(before)


def _begun_in_batch_class() -> bool:
    return BATCH in os.environ


def _enter(scheduling_class: int, thread: int = 0) -> bool:
    # A sandbox may forbid the call, which is then skipped; the thread may have ended.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(thread, scheduling_class, os.sched_param(0))
        return True
    return False
