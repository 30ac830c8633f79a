"""Scheduling classes of the threads in a process that `spawn` or `launch` started.

Linux gives each thread a class, which the threads that it starts inherit. Started
processes begin in the batch class: a thread of it that wakes up never interrupts one
that runs. XLA and gloo want that on a core of their own, where each would only keep the
other from its work. A thread that waits for a message wants the contrary: in the batch
class it waits for the end of the running thread's time slice, up to 4 ms, whenever
another program has the core. So a process that becomes a worker leaves the class, and
what JAX has started before stays in it. A worker of a pipeline, or of an elastic run,
enters it again: its messages are large and come while it computes.
"""

import contextlib
import json
import os
from collections.abc import Iterator

SETTINGS = "JDIST_PROCESS_SETTINGS"
"""Name of the variable in which a started process finds what was applied to it."""

BATCH = "batch class"
"""In it: that the process was put into the batch class."""


def leave_batch_class() -> None:
    """Puts this thread into the ordinary class, unless the user chose another one."""
    if _begun_in_batch_class():
        _enter(os.SCHED_OTHER)


def enter_batch_class() -> None:
    """Puts all threads of this process back into the class in which it began.

    For workers that compute while messages come: a thread that takes in a large one
    must not interrupt the one that computes.
    """
    if _begun_in_batch_class():
        for thread in os.listdir("/proc/self/task"):
            _enter(os.SCHED_BATCH, int(thread))


@contextlib.contextmanager
def in_batch_class() -> Iterator[None]:
    """Has threads that are started in the block be of the class the process began in.

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
    applied = json.loads(os.environ.get(SETTINGS, "{}"))
    return bool(applied.get("scheduling") == BATCH)


def _enter(scheduling_class: int, thread: int = 0) -> None:
    # Where a sandbox forbids it, the thread stays as it is; it may also have ended.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(thread, scheduling_class, os.sched_param(0))
